# SPDX-License-Identifier: Apache-2.0
"""Kernels are compared by the device's own clock, by one process at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from probe import Probe
from torch import nn
from torch._inductor.runtime.benchmarking import benchmarker

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.lowering import inductor, worker
from nexfort_engine.system import device_timer


def test_the_clock_of_a_cpu_tells_slow_from_fast() -> None:
    small, large = torch.randn(8, 8), torch.randn(512, 512)
    fast, slow = device_timer.clocked([lambda: small @ small, lambda: large @ large], torch.device("cpu"))
    assert 0 < fast < slow


def _time_something(folder: Path, notes: Path) -> None:
    """As a worker does it, with a clock that notes when it is used."""

    def clock(runs: Any, _device: Any) -> list[float]:
        runs[0]()
        began = time.monotonic()
        time.sleep(0.1)
        with notes.open("a") as file:
            file.write(f"{began} {time.monotonic()}\n")
        return [2000.0]

    # of a process that ends
    device_timer.clocked, torch.cuda.current_device, torch.cuda.is_available = clock, lambda: 0, lambda: True
    ran: list[int] = []
    with device_timer.taking_turns(folder), device_timer.by_the_device():
        for _ in range(3):
            assert benchmarker.benchmark(lambda: ran.append(1), device="cuda", rep=40) == 2.0
    assert len(ran) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_processes_that_share_a_folder_time_one_after_another(tmp_path: Path) -> None:
    notes, children = tmp_path / "notes", []
    for _ in range(4):
        child = os.fork()
        if not child:
            try:
                _time_something(tmp_path, notes)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    spans = sorted(tuple(map(float, line.split())) for line in notes.read_text().splitlines())
    assert len(spans) == 12
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_inductor_times_in_its_own_way_outside_and_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    before = type(benchmarker).benchmark_gpu
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        with device_timer.by_the_device():
            assert (type(benchmarker).benchmark_gpu is not before) == there
        assert type(benchmarker).benchmark_gpu is before


def test_where_no_file_can_be_locked_nobody_waits(tmp_path: Path) -> None:
    with device_timer.taking_turns(tmp_path / "missing"), device_timer._turn():
        assert not (tmp_path / "missing").exists()
    with device_timer.taking_turns(tmp_path), device_timer._turn():
        assert (tmp_path / "timing.lock").exists()
    assert device_timer._turn is contextlib.nullcontext


@pytest.mark.parametrize("mode", ["O2", "max-autotune"])
def test_a_worker_that_searches_takes_turns(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        turns.append(device_timer._turn)
        yield

    monkeypatch.setattr(inductor, "by_the_device", noted)
    (tmp_path / "graph").write_bytes(worker.pack(Probe(nn.Tanh(), torch.randn(2, 8)).captured))
    places = {"file": str(tmp_path / "graph"), "payload": str(tmp_path / "payload"), "kernels": str(tmp_path)}
    job = {"modules": [], "probes": None, "device": "cpu", "spread": False}
    worker.work({**job, **places, "options": CompileConfig.parse(mode).inductor_options("cpu")})
    assert len(turns) == (mode == "max-autotune") and contextlib.nullcontext not in turns


@pytest.mark.gpu
def test_a_slow_launch_is_no_part_of_a_kernels_time() -> None:
    a = torch.randn(64, 64, device="cuda")

    def launched_slowly() -> None:
        time.sleep(3e-4)
        torch.mm(a, a)

    with device_timer.by_the_device():
        slow, fast = benchmarker.benchmark_gpu(launched_slowly), benchmarker.benchmark_gpu(lambda: torch.mm(a, a))
    assert slow < 0.1 and fast < 0.1  # milliseconds
