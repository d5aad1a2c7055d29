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
from nexfort_engine.cudagraphs.backoff import FACTOR, FIRST, MOST, Backoff
from nexfort_engine.cudagraphs.step_graphs import StepGraphs
from nexfort_engine.lowering import inductor

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

    def run(count: int, rows: int = 6) -> list[int]:
        observed.clear()
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
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_a_block_that_stays_uncompiled_has_few_steps_observed(steps: Steps) -> None:
    assert steps(100) == [0, 1, 1 + FIRST + 1, 1 + FIRST + 1 + FACTOR * FIRST + 1]


def test_each_size_has_steps_of_its_own(steps: Steps) -> None:
    assert steps(10) == steps(10, rows=9) == [0, 1]


def test_more_steps_pass_each_time_and_not_without_end() -> None:
    blocks = [0]
    backoff, passed = Backoff(lambda: blocks[0]), list[int]()
    for _ in range(8):
        backoff.in_vain("size")
        passed.append(0)
        while backoff.waits("size"):
            passed[-1] += 1
    assert passed == [0, FIRST, *(min(FIRST * FACTOR**n, MOST) for n in range(1, 7))] and passed[-1] == MOST
    backoff.in_vain("size")
    assert backoff.waits("size") and not backoff.waits("another")
    blocks[0] += 1
    assert not backoff.waits("size"), "there is an artefact more"
    backoff.in_vain("size")
    assert not backoff.waits("size"), "and it begins anew"


def test_what_led_to_a_graph_begins_anew() -> None:
    backoff = Backoff(lambda: 0)
    for _ in range(2):
        backoff.in_vain("size")
    backoff.led_to_one("size")
    assert not backoff.waits("size")
    backoff.in_vain("size")
    assert not backoff.waits("size")
