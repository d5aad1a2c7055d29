# SPDX-License-Identifier: Apache-2.0
"""Pictures of few steps: none of them is both observed and captured, and the first of its sizes is neither."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pretended_graph import pretend
from subjects import ask_instead
from torch import nn

import nexfort_engine
from nexfort_engine.cudagraphs import few_steps
from nexfort_engine.cudagraphs.step_graph import StepGraph
from nexfort_engine.cudagraphs.step_graphs import StepGraphs
from nexfort_engine.runtime.engine_state import Picture

pytestmark = pytest.mark.usefixtures("artefact_cache")
FEW, MANY = 4, 20
Looks = Callable[..., list[str]]


class Name:
    """Of a picture."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Runs a picture, compares each step with eager, and gives what was done with its steps."""
    pretend(monkeypatch)
    monkeypatch.setattr(few_steps, "MANY", 12)
    torch.manual_seed(0)
    module = nn.Sequential(*(Block() for _ in range(3))).eval().requires_grad_(False)
    compiled, now, done = nexfort_engine.compile(module), list[Picture](), list[str]()
    ask_instead(monkeypatch, compiled._nexfort_engine, picture=lambda args, kwargs: now[-1])
    for owner, name in ((StepGraphs, "_observe"), (StepGraphs, "_capture"), (StepGraph, "replay")):
        own = getattr(owner, name)

        def noted(*given: object, own: Callable[..., object] = own, name: str = name) -> object:
            done.append(name.strip("_"))
            return own(*given)

        monkeypatch.setattr(owner, name, noted)

    def picture(steps: int, rows: int = 6) -> list[str]:
        done.clear()
        now[:] = [Picture(Name(), steps)]
        with torch.inference_mode():
            for seed in range(steps):
                x = torch.randn(2, rows, 8, generator=torch.Generator().manual_seed(seed))
                assert torch.allclose(compiled(x), module(x), atol=1e-4)
        return list(done)

    return picture


def test_short_pictures_share_what_a_graph_costs(looks: Looks) -> None:
    assert looks(FEW) == []
    assert looks(FEW) == ["observe"]
    assert looks(FEW) == ["capture", *["replay"] * FEW]
    assert looks(FEW) == ["replay"] * FEW


def test_each_size_has_pictures_of_its_own(looks: Looks) -> None:
    found = [looks(FEW, rows) for _ in range(3) for rows in (6, 9)]
    assert found == [[], [], ["observe"], ["observe"], *[["capture", *["replay"] * FEW]] * 2]


def test_a_long_picture_has_its_graph_at_once(looks: Looks) -> None:
    assert looks(FEW) == []
    assert looks(MANY) == ["observe", "capture", *["replay"] * (MANY - 1)]
    assert looks(FEW) == ["replay"] * FEW
