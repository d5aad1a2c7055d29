# SPDX-License-Identifier: Apache-2.0
"""What each thread has of its own: seen where the thread that captures has the same, eager with a reason otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from subjects import MOVES, TOLERANCE, graphs_as_they_are
from torch import nn

import nexfort_engine

STATE = threading.local()


class Registry:
    """An object that keeps something for each thread, as a registry of back ends does."""

    def __init__(self) -> None:
        self.chosen = threading.local()

    def factor(self) -> float:
        return float(getattr(self.chosen, "factor", 1.0))


REGISTRY = Registry()


class ByGlobal(nn.Module):
    """Reads one by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * getattr(STATE, "scale", 1.0)


class ByObject(ByGlobal):
    """Asks an object that has one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * REGISTRY.factor()


WAYS = {ByGlobal: (STATE, "scale"), ByObject: (REGISTRY.chosen, "factor")}


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    with graphs_as_they_are(), torch.no_grad():
        yield
    for holder, _ in WAYS.values():
        vars(holder).clear()


def network(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(3))).eval().requires_grad_(False)


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", WAYS)
def test_what_no_thread_has_set_is_compiled_and_seen_once_one_does(kind: type[nn.Module]) -> None:
    net, x = network(kind), torch.randn(2, 5, 8)
    compiled = nexfort_engine.compile(net)
    before = net(x)
    assert far(compiled(x), before) < TOLERANCE
    assert not compiled.report.as_dict()["eager"]
    holder, name = WAYS[kind]
    setattr(holder, name, 5.0)
    assert far(net(x), before) > MOVES
    assert far(compiled(x), net(x)) < TOLERANCE
    delattr(holder, name)
    assert far(compiled(x), before) < TOLERANCE


@pytest.mark.parametrize("kind", WAYS)
def test_what_this_thread_alone_has_runs_eager(kind: type[nn.Module]) -> None:
    holder, name = WAYS[kind]
    setattr(holder, name, 2.0)
    net, x = network(kind), torch.randn(2, 5, 8)
    compiled = nexfort_engine.compile(net)
    for value in (2.0, 5.0):
        setattr(holder, name, value)
        assert far(compiled(x), net(x)) < TOLERANCE
    assert "threading.local" in compiled.report.as_dict()["eager"][0]["reason"]


@pytest.mark.parametrize("kind", WAYS)
def test_threads_with_other_values_get_each_its_own(kind: type[nn.Module]) -> None:
    net, x = network(kind), torch.randn(2, 5, 8)
    compiled = nexfort_engine.compile(net)
    assert far(compiled(x), net(x)) < TOLERANCE
    found: list[float] = []

    def other() -> None:
        with torch.no_grad():
            setattr(WAYS[kind][0], WAYS[kind][1], 4.0)
            found.append(far(compiled(x), net(x)))

    for _ in range(2):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        found.append(far(compiled(x), net(x)))
    assert len(found) == 4 and max(found) < TOLERANCE
