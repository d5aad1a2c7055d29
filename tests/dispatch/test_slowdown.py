# SPDX-License-Identifier: Apache-2.0
"""The engine tells of its own steps that are slower than eager's, from what it sees and nothing that it runs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import graphs_as_they_are
from torch import nn

from nexfort_engine.api import wrap_methods
from nexfort_engine.cache.store import Store
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.dispatch import slowdown
from nexfort_engine.dispatch.step_times import STEPS
from nexfort_engine.engine import Engine
from nexfort_engine.reporting.report import slower

pytestmark = pytest.mark.usefixtures("threads")
T = torch.Tensor


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


class Clock:
    """How long steps take that begin from now on, and how many did."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.1, 0

    def begin(self, device: torch.device) -> Callable[[], Callable[[], float]]:
        self.steps += 1
        seconds = self.seconds
        return lambda: lambda: seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(slowdown, "begin", found.begin)
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h: T, draws: bool = False) -> T:
        return self.linear(h) + (torch.rand_like(h) if draws else 0)


class Net(nn.Module):
    runs = 0

    def __init__(self, draws: bool = False) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([Block(), Block()]), nn.Linear(8, 8)
        self.draws = draws

    def forward(self, h: T) -> T:
        type(self).runs += 1
        for block in self.blocks:
            h = block(h, self.draws)
        return self.last(h)


def compiled(folder: Path, net: nn.Module) -> Any:
    net = net.eval().requires_grad_(False)
    return wrap_methods(net, Engine(net, CompileConfig.parse(None), Store(folder)), ("forward",))


def warned(ours: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in slower(ours.report.as_dict()["pace"])]


@torch.no_grad()
def test_steps_slower_than_a_run_without_the_engine_are_told_of(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, x = compiled(tmp_path, Net(draws=True)), torch.randn(2, 8)
    Net.runs, clock.seconds = 0, 0.2
    for _ in range(STEPS + 2):
        ours(x)
    with monkeypatch.context() as without:
        without.setenv("NEXFORT_DISABLE", "1")
        clock.seconds = 0.1
        for _ in range(3):
            assert not warned(ours)
            ours(x)
    (row,) = warned(ours)
    assert (row["compiled_ms"], row["eager_ms"], row["sizes"]) == (pytest.approx(200), pytest.approx(100), [[2, 8]])
    assert row["source"] == slowdown.WITHOUT and row["reason"] == "2 of its blocks run uncompiled"
    assert "slower than eager: a step takes 200.0 ms, eager 100.0 ms (at 2x8); 2 of its blocks" in str(ours.report)
    assert Net.runs == STEPS + 2 + 3 + 1, "a step was run that nobody asked for, besides the plan"
    clock.seconds = 0.1
    for _ in range(STEPS):
        ours(x)
    assert not warned(ours) and "slower than eager" not in str(ours.report)


@torch.no_grad()
def test_a_verification_tells_how_long_eager_takes(tmp_path: Path, clock: Clock) -> None:
    ours, x = compiled(tmp_path, Net()), torch.randn(2, 8)
    clock.seconds = 1000.0
    for _ in range(STEPS + 1):
        ours(x)
    assert not warned(ours)
    ours.verify_next()
    ours(x)
    (row,) = warned(ours)
    assert row["source"] == "verification" and row["eager_ms"] < row["compiled_ms"]


@torch.no_grad()
def test_a_step_that_makes_artefacts_says_nothing(tmp_path: Path, clock: Clock) -> None:
    ours, x = compiled(tmp_path, Net()), torch.randn(2, 8)
    ours._nexfort_engine.promise.pace.verified(1e-9, ours._nexfort_engine.promise._kind((x,), {}))
    for _ in range(STEPS):
        ours(x)
    assert not warned(ours)
    ours(x)
    assert warned(ours)


@torch.no_grad()
def test_another_size_and_other_weights_are_other_steps(tmp_path: Path, clock: Clock) -> None:
    ours, x = compiled(tmp_path, Net()), torch.randn(2, 8)
    engine = ours._nexfort_engine
    kinds = {engine.promise._kind((given,), {}) for given in (x, torch.randn(3, 8), torch.randn(1, 2, 8))}
    assert len(kinds) == 3 and engine.promise._kind((torch.randn(2, 8),), {}) in kinds
    engine.state.version = lambda: "a LoRA"
    assert engine.promise._kind((x,), {}) not in kinds
    assert engine.promise._kind((x, {"on": print}), {}) != engine.promise._kind((x, {"on": 1}), {})
