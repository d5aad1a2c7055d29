# SPDX-License-Identifier: Apache-2.0
"""The first result of a new artefact is compared with eager's: what a capture did not see makes no picture."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import reached_state
import torch
from reached_state import Block, Net, apart, given, made
from torch import nn

import nexfort_engine
from nexfort_engine.dispatch import first_result

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
NEAR = 1e-4


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that no other test fills: what is loaded from one was compared by who made it."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))


def reasons(compiled: Any) -> list[str]:
    return [row["reason"] for row in compiled.report.as_dict()["eager"]]


@pytest.mark.parametrize("kind", reached_state.ANSWERED)
@torch.no_grad()
def test_what_a_trace_answers_otherwise_than_a_call_makes_no_other_picture(kind: type[Block]) -> None:
    net = made(kind)
    compiled = nexfort_engine.compile(net)
    for rows in (5, 5, 7):
        assert apart(compiled(given(rows)), net(given(rows))) < NEAR
    assert any("of its norm away from the uncompiled one" in reason for reason in reasons(compiled))
    again = nexfort_engine.compile(made(kind))
    assert apart(again(given(5)), net(given(5))) < NEAR, "nor is it taken from the store"


@torch.no_grad()
def test_what_a_block_counts_is_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    net = made(reached_state.OfACounter)
    compiled = nexfort_engine.compile(net)
    compiled(given(5))
    for _ in range(3):
        monkeypatch.setitem(reached_state.COUNTER, "calls", 10)
        wanted = net(given(5))
        monkeypatch.setitem(reached_state.COUNTER, "calls", 10)
        assert apart(compiled(given(5)), wanted) < NEAR


@torch.no_grad()
def test_numbers_of_python_s_own_are_drawn_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    net = made(reached_state.OfChance)
    compiled = nexfort_engine.compile(net)
    drawn = iter((2.0, 20.0, 200.0, 2000.0) * 100)
    monkeypatch.setattr(random, "choice", lambda values: next(drawn))
    results = [compiled(given(5)) for _ in range(6)]
    assert min(apart(one, other) for one, other in itertools.pairwise(results[1:])) > NEAR


class OfDraws(Block):
    """A block that draws from the generators of a process."""

    def factor(self, x: torch.Tensor) -> Any:
        return random.random() + numpy.random.rand() + torch.rand(()).item()


@torch.no_grad()
def test_numbers_are_drawn_in_eager_s_order() -> None:
    results = []
    for network in (made(OfDraws), nexfort_engine.compile(made(OfDraws))):
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        results.append([network(given(rows)) for rows in (5, 5, 7)])
    assert max(map(apart, *results)) < NEAR


class Counted(Block):
    """A block that notes each of its own calls."""

    calls = 0

    def factor(self, x: torch.Tensor) -> Any:
        return 1.0


@pytest.mark.usefixtures("empty_cache")
@torch.no_grad()
def test_a_right_artefact_is_compared_once_for_all_blocks_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[float] = []
    distance = first_result.distance

    def noted(found: Any, wanted: Any) -> float:
        compared.append(distance(found, wanted))
        return compared[-1]

    monkeypatch.setattr(first_result, "distance", noted)
    net = made(Counted)
    compiled = nexfort_engine.compile(net)
    for rows in (5, 7, 9):
        assert apart(compiled(given(rows)), net(given(rows))) < NEAR
    assert len(compared) == 1 and compared[0] < NEAR and not reasons(compiled)
    again = nexfort_engine.compile(made(Counted))
    again(given(5))
    assert len(compared) == 1, "one from the store was compared by who made it"


class Short(Counted):
    """One of another class, so that its artefact is new."""


class Small(nn.Module):
    """Next to nothing, as a difference of large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * 1e3 + x) - self.layer(x) * 1e3 - x


@torch.no_grad()
def test_rounding_of_a_difference_is_no_other_result() -> None:
    net = Net(Small).eval().requires_grad_(False)  # type: ignore[arg-type]
    compiled = nexfort_engine.compile(net)
    compiled(given(5))
    assert not reasons(compiled)


@pytest.mark.usefixtures("empty_cache")
@torch.no_grad()
def test_a_step_has_its_result_where_eager_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(found: Any, wanted: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(first_result, "distance", short)
    net = made(Short)
    compiled = nexfort_engine.compile(net)
    for rows in (5, 7):
        assert apart(compiled(given(rows)), net(given(rows))) < NEAR
    assert not reasons(compiled) and compiled.report.as_dict()["artefacts_compiled"] == 1


class Raises(Counted):
    """One whose code fails where it is called for the second time in a step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            raise RuntimeError("the second one fails")
        return x + self.layer(x)


@torch.no_grad()
def test_an_error_of_the_uncompiled_code_is_told() -> None:
    net = made(Raises)
    with pytest.raises(RuntimeError, match="the second one fails"):
        net(given(5))
    compiled = nexfort_engine.compile(net)
    compiled(given(5))
    notes = compiled.report.as_dict()["notes"]
    assert any("its uncompiled code raised RuntimeError: the second one fails" in note for note in notes)
