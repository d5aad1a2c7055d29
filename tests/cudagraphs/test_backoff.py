# SPDX-License-Identifier: Apache-2.0
"""Steps of which no CUDA graph can be made: few of them are observed, because an observed step takes longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretended_graph import pretend
from torch import nn

import nexfort_engine
from nexfort_engine.capture.types import Captured
from nexfort_engine.cudagraphs.backoff import FACTOR, FIRST, MOST, PASSING, Backoff
from nexfort_engine.cudagraphs.step_graphs import StepGraphs
from nexfort_engine.lowering import inductor
from nexfort_engine.weights.residency import Residency

Steps = Callable[..., list[int]]


class Block(nn.Module):
    """One that runs eager where it takes a sine, because lowering one fails."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def lower(captured: Captured, *more: Any) -> None:
    if any(node.target is torch.ops.aten.sin.default for node in captured.graph.graph.nodes):
        raise inductor.LoweringFailed("no sine is known here")
    own_lower(captured, *more)


own_lower = inductor.lower


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, artefact_cache: object) -> Steps:
    """Runs some steps, compares each with eager, and gives which of them were observed."""
    pretend(monkeypatch)
    monkeypatch.setenv("NEXFORT_WORKERS", "0")
    monkeypatch.setattr(inductor, "lower", lower)
    torch.manual_seed(0)
    network = Network()
    compiled = nexfort_engine.compile(network)
    observed, now, own = list[int](), [0], StepGraphs._observe

    def observe(*given: Any) -> Any:
        observed.append(now[0])
        return own(*given)

    monkeypatch.setattr(StepGraphs, "_observe", observe)

    def run(count: int, rows: int = 6, function: Any = torch.sin, counts: bool = False) -> list[int]:
        observed.clear()
        network.last.function, network.counts = function, counts
        with torch.inference_mode():
            for now[0] in range(count):
                x = torch.randn(2, rows, 8, generator=torch.Generator().manual_seed(now[0]))
                assert torch.allclose(compiled(x), network(x), atol=1e-4)
        return list(observed)

    return run


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = Block(torch.sin)
        self.counts, self.calls = False, 0
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_a_block_that_stays_uncompiled_has_few_steps_observed(steps: Steps) -> None:
    assert steps(100) == [0, 1, 1 + FIRST + 1, 1 + FIRST + 1 + FACTOR * FIRST + 1]


def test_each_size_has_steps_of_its_own(steps: Steps) -> None:
    assert steps(10) == steps(10, rows=9) == [0, 1]


@pytest.mark.parametrize(("fails", "observed"), [(3, [0, 1, 2, 3]), (6, [0, 1, 2, 3, 20, 37, 54])])
def test_weights_that_are_fetched_for_some_steps_cost_the_graph_sixteen_at_a_time(
    fails: int, observed: list[int], steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, own = [fails], Residency.settle

    def settle(residency: Residency, device: torch.device) -> bool:
        left[0] -= 1
        return left[0] < 0 and own(residency, device)

    monkeypatch.setattr(Residency, "settle", settle)
    assert steps(60, function=torch.tanh) == observed


def test_a_network_that_changes_itself_in_each_step_has_few_steps_observed(steps: Steps) -> None:
    assert len(steps(100, function=torch.tanh, counts=True)) < 20


def passed(backoff: Backoff, *, passing: bool = False, times: int = 6) -> list[int]:
    """How many steps pass after each observation in vain."""
    found = []
    for _ in range(times):
        backoff.in_vain("size", passing=passing)
        found.append(0)
        while backoff.waits("size"):
            found[-1] += 1
    return found


def test_more_steps_pass_each_time_and_not_without_end() -> None:
    assert passed(Backoff(lambda: 0)) == [0, FIRST, FACTOR * FIRST, MOST, MOST, MOST] == [0, 16, 64, 256, 256, 256]
    assert passed(Backoff(lambda: 0), passing=True) == [*[0] * (PASSING - 1), FIRST, FIRST, FIRST]


def test_another_artefact_and_a_replayed_graph_begin_anew() -> None:
    artefacts = [0]
    backoff = Backoff(lambda: artefacts[0])
    for _ in range(2):
        backoff.in_vain("size")
    assert backoff.waits("size") and not backoff.waits("another")
    artefacts[0] += 1
    assert not backoff.waits("size")
    for _ in range(2):
        backoff.in_vain("size")
    backoff.ended("size", replayed=True)
    assert not backoff.waits("size")
    backoff.in_vain("size")
    assert not backoff.waits("size")
    backoff.in_vain("size")
    assert backoff.waits("size")
