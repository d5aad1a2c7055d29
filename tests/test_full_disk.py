# SPDX-License-Identifier: Apache-2.0
"""What the engine writes and the system refuses, at each write: the step goes on, and the report says why.

Real compiled code, of a network that takes a second to lower: made, stored, loaded again by an engine that has nothing.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refusing import CODES, refused, small_disk
from torch import nn

import nexfort_engine
from nexfort_engine import api as compiled
from nexfort_engine.compilation import lookup
from nexfort_engine.lowering import vec_isa_cache, worker_pool
from nexfort_engine.system import torch_modes

pytestmark = pytest.mark.usefixtures("threads")
TOLERANCE = 1e-5
STEPS = 2
FEW = (errno.ENOSPC, errno.EMFILE, errno.EROFS)  # no room, no descriptor, no right


class Products(nn.Module):
    """Two products, which Inductor hands to torch: no compiler is started."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 8)
        for weight in self.parameters():
            nn.init.normal_(weight, generator=generator)
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory, for this test alone."""
    folder = tmp_path / "system"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("NEXFORT_WORKERS", "0")
    return folder


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(vec_isa_cache, "_folder", None)
    yield
    _forget()


def _forget() -> None:
    """As a new process: no store and no loaded code is known."""
    compiled._stores.clear()
    gc.collect()
    lookup._loaded.clear()


def steps(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Some steps in a process that knows nothing, each compared with eager; the report."""
    _forget()
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(cache))
    plain = Products()
    module = nexfort_engine.compile(plain)
    for step in range(STEPS):
        x = torch.randn(2 + step, 16, generator=torch.Generator().manual_seed(step))
        with torch.inference_mode():
            wanted, found = plain(x), module(x)
        assert float((found - wanted).norm() / wanted.norm()) < TOLERANCE
    return module.report


def says(report: Any, code: int) -> None:
    """The reason is there in the system's words, each line once, and no line is a mere assertion."""
    told = [row["reason"] for row in report.as_dict()["eager"]] + report.as_dict()["notes"]
    assert any(os.strerror(code) in text for text in told), told
    assert len(told) == len(set(told)) and not any("AssertionError" in text for text in told), told


def what_is_asked(cache: Path, system: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> int:
    with refused(1 << 30, code, (cache, system)) as asked:
        assert not steps(cache, monkeypatch).as_dict()["eager"]
        report = steps(cache, monkeypatch).as_dict()
    assert report["artefacts_loaded"] == 1 and not report["artefacts_compiled"] and not report["notes"]
    return len(asked)


def each_refused(
    folder: Path, system: Path, monkeypatch: pytest.MonkeyPatch, code: int, lasting: bool, every: int
) -> None:
    count = what_is_asked(folder / "sound", system, monkeypatch, code)
    assert count > 40
    for number in range(1, count + 1, every):
        cache = folder / f"cache-{number}"
        with refused(number, code, (cache, system), lasting) as asked:
            first = steps(cache, monkeypatch)
            second = steps(cache, monkeypatch)
        if lasting and len(asked) >= number:  # one run asks once more or less than another
            texts = str(first) + str(second)
            assert os.strerror(code) in texts, f"{number} of {count}, {asked[number - 1]}: {texts}"
            says(first if os.strerror(code) in str(first) else second, code)
        sound = steps(cache, monkeypatch).as_dict()  # the disk takes everything again
        assert not sound["eager"] and not sound["notes"] and len(sound["artefacts"]) == 1, (number, sound)


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, id=errno.errorcode[code], marks=() if code in FEW else pytest.mark.large) for code in CODES],
)
def test_a_system_that_refuses_from_some_write_on(
    tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    each_refused(tmp_path, system, monkeypatch, code, lasting=True, every=23)


def test_a_system_that_refuses_one_write(tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each_refused(tmp_path, system, monkeypatch, errno.ENOSPC, lasting=False, every=29)


@pytest.mark.large
@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("code", CODES, ids=lambda code: errno.errorcode[code])
def test_a_system_that_refuses_at_every_write(
    tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch, code: int, lasting: bool
) -> None:
    each_refused(tmp_path, system, monkeypatch, code, lasting, every=1)


def full_disks(options: Callable[[int], str], sizes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache and temporary directory on one disk of each size, workers or not: whatever fits is kept, the rest told."""
    whole, refusing = 0, 0
    for size in sizes:
        with small_disk(tmp_path / f"disk-{size}", options(size)) as disk:
            monkeypatch.setattr(tempfile, "tempdir", str(disk))
            monkeypatch.setenv("TMPDIR", str(disk))
            reports = [steps(disk / "cache", monkeypatch) for _ in range(2)]
            full = os.strerror(errno.ENOSPC)
            if any(full in str(report) for report in reports):
                refusing += 1
                says(next(report for report in reports if full in str(report)), errno.ENOSPC)
            else:
                whole += 1
                assert reports[1].as_dict()["artefacts_loaded"] == 1 and not reports[1].as_dict()["notes"]
            _forget()
    assert refusing and whole, "some were too small, and some large enough"


def test_disks_that_become_full(tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disks(lambda size: f"size={size}k", (4, 16, 40, 72, 120, 4096), tmp_path, monkeypatch)


def test_disks_without_inodes(tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disks(lambda count: f"size=8m,nr_inodes={count}", (2, 7, 15, 30, 4096), tmp_path, monkeypatch)


@pytest.mark.large
def test_a_disk_that_is_full_at_every_page(tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disks(lambda size: f"size={size}k", (*range(4, 400, 4), 4096), tmp_path, monkeypatch)
    full_disks(lambda count: f"size=8m,nr_inodes={count}", (*range(2, 80), 4096), tmp_path, monkeypatch)


def test_a_directory_whose_name_is_too_long(tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(steps(tmp_path / ("n" * 300), monkeypatch), errno.ENAMETOOLONG)
    deep = tmp_path
    while len(str(deep)) < 3700:
        deep = deep / ("d" * 200)
    report = steps(deep / ("e" * (4096 - 60 - len(str(deep)) - 2)), monkeypatch)
    says(report, errno.ENAMETOOLONG)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_cache_that_somebody_empties_while_an_artefact_is_made(
    tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setenv("NEXFORT_WORKERS", workers)
    cache, emptied = tmp_path / "cache", []
    kind, name = (worker_pool.Pool, "submit") if workers == "1" else (torch_modes, "applied")  # what a graph comes to

    def at_lowering(*args: Any) -> Any:
        given = real(*args)
        if not emptied and list(cache.glob("staging/*")):
            emptied.append(cache)
            shutil.rmtree(cache)
        return given

    real = getattr(kind, name)
    monkeypatch.setattr(kind, name, at_lowering)
    report = steps(cache, monkeypatch).as_dict()
    assert emptied and report["artefacts_compiled"] == 1 and not report["eager"] and not report["notes"], report
    assert steps(cache, monkeypatch).as_dict()["artefacts_loaded"] == 1


def test_what_is_refused_is_not_held_against_an_entry(
    tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    assert steps(cache, monkeypatch).as_dict()["artefacts_compiled"] == 1
    with refused(1, errno.ENOSPC, (cache, system)), caplog.at_level(logging.WARNING):
        report = steps(cache, monkeypatch)
    says(report, errno.ENOSPC)
    assert not list((cache / "broken").iterdir())
    assert steps(cache, monkeypatch).as_dict()["artefacts_loaded"] == 1
