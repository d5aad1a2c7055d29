# SPDX-License-Identifier: Apache-2.0
"""What was measured of attention is remembered on disk for other processes; a file that is not sound costs nothing."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_kernels import Kernels, call_of

from nexfort_engine.attention import tuning_cache
from nexfort_engine.attention.backends import own
from nexfort_engine.attention.tuner import Told
from nexfort_engine.attention.tuning_cache import Row, Table, file_name
from nexfort_engine.reporting.report import Report

ORDER = (0, 1, 2, 3)
SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def asked_once(folder: Path, kernels: Kernels, rows: int = 8) -> str:
    """What the report says of a call in a process of which nothing is known."""
    report = Report()
    call = call_of(rows=rows)
    assert torch.equal(kernels.chooser().run(call, ORDER, False, Told(folder, report)), own(call))
    return str(report)


def process(folder: Path, **microseconds: float) -> subprocess.Popen[str]:
    given = [f"{name}={value}" for name, value in microseconds.items()]
    command = [sys.executable, str(SUPPORT / "attention_kernels.py"), str(folder), *given]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)


def answer(running: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 0
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.large  # costs time and changes no result
def test_another_process_measures_nothing_and_takes_the_same(folder: Path) -> None:
    first = answer(process(folder, fast=50))
    second = answer(process(folder, fast=500))  # though its clock would say otherwise
    assert (first["measured"], second["measured"]) == (3, 0)
    assert second["asked"] == {"fast": 3} and second["notes"] == first["notes"]


def test_the_file_is_readable_private_and_for_one_device_and_torch(folder: Path) -> None:
    asked_once(folder, Kernels(fast=50, slow=300))
    (file,) = folder.glob("attention-*")
    assert file.name == f"attention-cpu-torch-{torch.__version__}.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = json.loads(file.read_text())
    assert (found["device"], found["torch"]) == ("cpu", torch.__version__)
    ((kind, row),) = found["choices"].items()
    assert "2 heads of 16" in kind
    assert row == {"kernel": "fast", "microseconds": {"torch": 100.0, "fast": 50.0, "slow": 300.0}}


def test_processes_that_write_at_once_lose_nothing(folder: Path) -> None:
    running = [process(folder, **{f"fast{i}": 50}) for i in range(3)]  # kernels of their own, so kinds of their own
    assert [answer(one)["measured"] for one in running] == [3, 3, 3]
    (file,) = folder.glob("attention-*")
    assert len(json.loads(file.read_text())["choices"]) == 9


def test_what_was_first_on_disk_stands(folder: Path) -> None:
    late, first = Table(folder, "cpu"), Table(folder, "cpu")
    first.keep("a kind", Row("fast", {"torch": 2.0, "fast": 1.0}))
    assert late.keep("a kind", Row("torch", {"torch": 1.0})).kernel == "fast"
    late.keep("another", Row("torch", {"torch": 1.0}))
    assert set(Table(folder, "cpu").rows) == {"a kind", "another"}


def _sound(folder: Path) -> dict[str, Any]:
    asked_once(folder, Kernels(fast=50))
    found: dict[str, Any] = json.loads((folder / file_name("cpu")).read_text())
    return found


def _with(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], object]:
    def damage(folder: Path) -> object:
        content = _sound(folder)
        changed = change(content)
        return (folder / file_name("cpu")).write_text(json.dumps(content if changed is None else changed))

    return damage


def _row_of(content: dict[str, Any]) -> dict[str, Any]:
    ((_, row),) = content["choices"].items()
    found: dict[str, Any] = row
    return found


def _linked(folder: Path) -> None:
    _sound(folder)
    (folder / file_name("cpu")).rename(folder / "elsewhere")
    (folder / file_name("cpu")).symlink_to(folder / "elsewhere")


def _readable_by_others(folder: Path) -> None:
    _sound(folder)
    (folder / file_name("cpu")).chmod(0o644)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / file_name("cpu")).write_bytes(b"{\xff"), "cannot be read|can read it"),
        (_with(lambda content: []), "does not hold"),
        (_with(lambda content: content.update(torch="1.0")), "does not hold"),
        (_with(lambda content: content.update(device="another card")), "does not hold"),
        (_with(lambda content: content.update(choices=[])), "does not hold"),
        (_with(lambda content: _row_of(content).update(kernel="none of them")), "does not hold"),
        (_with(lambda content: _row_of(content).update(microseconds={"torch": "fast"})), "does not hold"),
        (_with(lambda content: _row_of(content)["microseconds"].update(fast=float("nan"))), "does not hold"),
        (_linked, "symbolic link"),
        (_readable_by_others, "mode 0644"),
    ],
    ids=["bytes", "list", "torch", "device", "choices", "kernel", "microseconds", "nan", "link", "mode"],
)
def test_a_file_that_is_not_sound_is_not_read_and_made_again(
    folder: Path, damage: Callable[[Path], object], reason: str
) -> None:
    damage(folder)
    if (folder / file_name("cpu")).exists() and damage is not _readable_by_others:
        (folder / file_name("cpu")).chmod(0o600)
    kernels = Kernels(fast=50)
    said = asked_once(folder, kernels)
    assert kernels.measured == 1
    assert re.search(f"is not read and is made again: .*({reason})", said), said
    again = Kernels(fast=50)
    assert "not read" not in asked_once(folder, again) and again.measured == 0


@pytest.mark.skipif(os.name != "posix", reason="modes are posix")
def test_a_folder_that_cannot_be_written_costs_the_memory_only(folder: Path) -> None:
    folder.chmod(0o755)  # others may look into it, so nothing is kept there
    kernels = Kernels(fast=50)
    said = asked_once(folder, kernels)
    assert "fast, 50 microseconds" in said and "is not remembered: " in said and "0755" in said
    assert not list(folder.iterdir())


def test_a_place_that_is_no_folder_costs_the_memory_only(folder: Path) -> None:
    (folder / "file").write_text("")
    assert "is not remembered: " in asked_once(folder / "file", Kernels(fast=50))


def test_a_kind_that_was_not_measured_is_not_on_disk(folder: Path) -> None:
    kernels = Kernels(fast=50)

    def fail(call: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernels.instead["fast"] = fail
    chooser = kernels.chooser()
    for _ in range(2):
        chooser.run(call_of(), ORDER, False, Told(folder, None))
    kernels.instead.clear()
    chooser.run(call_of(rows=100), ORDER, False, Told(folder, None))
    (file,) = folder.glob("attention-*")
    ((kind, _),) = json.loads(file.read_text())["choices"].items()
    assert "512 rows" in kind
    assert kernels.chooser().run(call_of(), ORDER, False, Told(folder, None)) is not None and kernels.measured == 2


def test_names_of_devices_make_names_of_files() -> None:
    assert tuning_cache.file_name("NVIDIA GeForce RTX 4090/x") == (
        f"attention-NVIDIA-GeForce-RTX-4090-x-torch-{torch.__version__}.json"
    )
