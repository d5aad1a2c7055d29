# SPDX-License-Identifier: Apache-2.0
"""Networks whose own code, between the blocks, changes what it reaches by name: no step of theirs is a CUDA graph."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_graph import Graph, pretend
from torch import nn

import nexfort_engine

T = torch.Tensor
SEEN: list[T] = []
STATE = SimpleNamespace(total=0, last=None)
NUMBERS: Iterator[int] = itertools.count(1)
TABLE: dict[torch.dtype, T] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: T) -> T:
        return torch.tanh(self.linear(x))


class Network(nn.Module):
    """Two blocks, and code of its own between them."""

    def __init__(self, own: Callable[[T], T]) -> None:
        super().__init__()
        self.first, self.second, self.own = Block(), Block(), own

    def forward(self, x: T) -> T:
        return self.second(self.own(self.first(x)))


def notes(x: T) -> T:
    SEEN.append(x.detach())
    return x * 2


def counts(x: T) -> T:
    STATE.total += 1
    return x * STATE.total


def goes_on(x: T) -> T:
    STATE.last = x if STATE.last is None else STATE.last * 0.5 + x
    return STATE.last * 1.0


def draws(x: T) -> T:
    return x * (1 + random.random())


def takes(x: T) -> T:
    return x * next(NUMBERS)


def looks_up(x: T) -> T:
    if x.dtype not in TABLE:
        TABLE[x.dtype] = torch.arange(8.0)
    return x + TABLE[x.dtype]


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = random.getstate()
    pretend(monkeypatch)
    yield
    random.setstate(before)


def _steps(own: Callable[[T], T], compiled: bool) -> tuple[list[T], Any, str]:
    """The results of six steps, what they left, and the notes of the report."""
    global NUMBERS
    SEEN.clear()
    TABLE.clear()
    STATE.total, STATE.last, NUMBERS = 0, None, itertools.count(1)
    random.seed(0)
    torch.manual_seed(0)
    net: Any = Network(own).eval().requires_grad_(False)
    if compiled:
        net = nexfort_engine.compile(net)
    numbers = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        results = [net(torch.randn(3, 8, generator=numbers)) for _ in range(6)]
    left = [float(x.sum()) for x in SEEN], STATE.total, float(STATE.last.sum()) if STATE.last is not None else None
    return results, left, "; ".join(net.report.as_dict()["notes"]) if compiled else ""


@pytest.mark.parametrize("own", [notes, counts, goes_on, draws, takes])
def test_what_a_replay_would_leave_out_is_no_graph(own: Callable[[T], T]) -> None:
    wanted, left, _ = _steps(own, False)
    found, now, said = _steps(own, True)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    for one, other in zip(now, left, strict=True):
        assert one is other or one == pytest.approx(other, rel=1e-3)
    assert not Graph.made and "no CUDA graph" in said, said


def test_a_table_that_is_made_once_is_no_hindrance() -> None:
    wanted, _, _ = _steps(looks_up, False)
    found, _, said = _steps(looks_up, True)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert Graph.made and "no CUDA graph" not in said, said
