# SPDX-License-Identifier: Apache-2.0
"""Functions that others replace are seen, and torch's autocast: in lowered code, in one process and across two.

`make test` has four backbones of different build or two of them, `make test-large` all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from backbones import BACKBONES, make
from changes import CHANGES
from large_rows import few
from subjects import (
    MOVES,
    TOLERANCE,
    Subject,
    distance,
    equal_bits,
    every,
    graph_subject,
    graphs_as_they_are,
    installed,
    names,
    new_since,
    subject,
)

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
TWO = ("torch_dit", "comfy_unet")
two = pytest.mark.parametrize("name", names(few=TWO))


def _seen(tiny: Subject, change: str) -> None:
    before, wanted = tiny.run(), tiny.eager()
    with CHANGES[change](tiny.module):
        changed = tiny.eager()
        assert distance(changed, wanted) > MOVES, "the change does not matter to the network"
        assert distance(tiny.run(), changed) < TOLERANCE
    mark = tiny.report.mark()
    assert equal_bits(tiny.run(), before)
    with CHANGES[change](tiny.module):
        assert distance(tiny.run(), changed) < TOLERANCE
    assert not new_since(tiny, mark), "both were there already"


@every
def test_a_replaced_function_is_seen_and_so_is_the_way_back(host: str) -> None:
    _seen(subject(host).again(), "attention")


@two
def test_a_replaced_forward_of_a_class_is_seen_and_so_is_the_way_back(host: str) -> None:
    _seen(subject(host).again(), "block")


@pytest.mark.parametrize("change", few(list(CHANGES), ["attention"]))
@two
def test_a_replaced_function_changes_the_graph(host: str, change: str) -> None:
    with graphs_as_they_are():
        _seen(graph_subject(host), change)


@every
def test_autocast_is_followed(host: str) -> None:
    tiny = subject(host).again()
    before, wanted = tiny.run(), tiny.eager()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            changed = tiny.eager()
            assert not equal_bits(changed, wanted), "autocast does not matter to the network"
            assert equal_bits(tiny.run(), changed)
        assert equal_bits(tiny.run(), before)
    assert "autocast" in tiny.report.as_dict()["eager"][-1]["reason"]


def _in_another(folder: Path, states: str, names: list[str], comfyui: Path | None) -> dict[str, list[dict[str, Any]]]:
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here.parent, here, here / "support")))
    environment = {**os.environ, "NEXFORT_CACHE_DIR": str(folder), "PYTHONPATH": path}
    if comfyui is not None:
        environment["COMFYUI_PATH"] = str(comfyui)
    command = [sys.executable, str(here / "support" / "changed_process.py"), states, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    assert max(row["distance"] for rows in found.values() for row in rows) < TOLERANCE
    return found


@pytest.mark.large  # below two networks are found by another process
@pytest.mark.slow
def test_the_store_is_asked_for_what_is_there_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with one store: one after a change, one before it and after. What comes then is asked below."""
    os.chmod(tmp_path, 0o700)
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    tiny = make("torch_dit")
    with CHANGES["attention"](tiny.module):
        first = Subject(tiny)
        assert first.same() < TOLERANCE
    assert first.report.as_dict()["artefacts_compiled"] > 0
    (second,) = _in_another(tmp_path, "plain,attention", ["torch_dit"], None).values()
    assert second[0]["compiled"] == 1 and second[0]["loaded"] > 0, "but for the block all is as it was"
    assert (second[1]["compiled"], second[1]["loaded"]) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.large)], ids=["two", "the others"])
def test_another_process_finds_both_in_either_order(
    few: bool, artefact_cache: Path, request: pytest.FixtureRequest
) -> None:
    here = [name for name in installed(request) if (name in TWO) == few]
    for name in here:
        tiny = subject(name).again()
        with CHANGES["attention"](tiny.module):
            tiny.run()
    hosts = {BACKBONES[name].host for name in here}
    comfyui = request.getfixturevalue("comfyui") if "comfy" in hosts else None
    for states in ("plain,attention", "attention,plain"):
        found = _in_another(artefact_cache, states, here, comfyui)
        assert list(found) == here
        for name, rows in found.items():
            assert [row["compiled"] for row in rows] == [0, 0], (name, states)
            assert rows[0]["loaded"] > 0 and rows[1]["loaded"] > 0, (name, states)
