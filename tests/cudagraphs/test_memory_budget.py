# SPDX-License-Identifier: Apache-2.0
"""What a plan takes of a device stays within the budget of what eager takes, or less is planned, which the report says.

The memory is that of all tensors that operators make, counted here as an allocator counts it on a GPU.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretended_graph
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from subjects import graphs_as_they_are
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nexfort_engine.api import wrap_methods
from nexfort_engine.cache.store import Store
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.cudagraphs import memory_budget, step_graphs
from nexfort_engine.engine import Engine

pytestmark = pytest.mark.usefixtures("threads")
T = torch.Tensor


class Allocator(TorchDispatchMode):
    """Counts what tensors take that operators make inside the block, beside those that are there."""

    def __init__(self, *there: T) -> None:
        super().__init__()
        self.now = self.peak = self.all_of_it = 0
        self._known: dict[int, Any] = {}
        for tensor in there:
            self._made(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                self._made(tensor.untyped_storage())
        return result

    def _made(self, storage: Any) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self._known or not size:
            return

        def gone(_: Any) -> None:
            del self._known[place]
            self.now -= size

        self._known[place] = weakref.ref(storage, gone)
        self.now, self.all_of_it = self.now + size, self.all_of_it + size
        self.peak = max(self.peak, self.now)


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16 * width), nn.Linear(16 * width, width)

    def forward(self, h: T) -> T:
        return h + self.down(torch.tanh(self.up(h)))


class Net(nn.Module):
    batches: list[int]  # on the class: a plan puts back what is on a module

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        type(self).batches = []

    def forward(self, h: T) -> T:
        self.batches.append(h.shape[0])
        for block in self.blocks:
            h = block(h)
        return h


def counted(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator(*net.parameters())
    monkeypatch.setattr(memory_budget, "figures", lambda device: (found.now, found.all_of_it))
    monkeypatch.setattr(
        "nexfort_engine.system.torch_modes._is_own", lambda mode: True
    )  # another dispatch mode makes calls eager
    monkeypatch.setattr("nexfort_engine.dispatch.region.unwatched", contextlib.nullcontext)  # an allocator sees all
    return found


def compiled(net: nn.Module, folder: Path) -> Any:
    net = net.eval().requires_grad_(False)
    return wrap_methods(net, Engine(net, CompileConfig.parse(None), Store(folder)), ("forward",))


@pytest.mark.parametrize(("tokens", "planned"), [(2, [1, 2]), (1024, [1])])
def test_a_plan_takes_a_twentieth_more_than_eager_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, planned: list[int]
) -> None:
    net = Net()
    ours, x = compiled(net, tmp_path), torch.randn(1, tokens, 128)
    with torch.no_grad():
        with counted(net, monkeypatch) as eager:
            wanted = net(x)
        with counted(net, monkeypatch) as twice:
            net(torch.cat([x, x]))
        assert (twice.peak > 1.05 * eager.peak) == (planned == [1]), "twice the batch is not what is varied here"
        type(net).batches = []
        with counted(net, monkeypatch) as taken:
            result = ours(x)
        assert torch.allclose(result, wanted, atol=1e-5) and net.batches == [1, *planned]
        assert taken.peak <= 1.05 * eager.peak
        told = ours.report.as_dict()
        assert any("planned at batch 1" in note for note in told["notes"]) == (planned == [1])
        pair = torch.randn(2, tokens, 128)
        assert torch.allclose(ours(pair), net(pair), atol=1e-5)
    told = ours.report.as_dict()
    assert told["artefacts_compiled"] == len({1, 2}) - len(planned) + 1 and not told["eager"]


def test_weights_that_the_host_keeps_in_pages_count_as_eager_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    ours = compiled(net, tmp_path)
    ours._nexfort_engine.state.room = lambda device: 1 << 30
    with torch.no_grad(), counted(net, monkeypatch):
        ours(torch.randn(1, 1024, 128))
    assert net.batches == [1, 1, 2]


def test_where_nobody_counts_twice_the_batch_is_planned_at_once(tmp_path: Path) -> None:
    net = Net()
    ours = compiled(net, tmp_path)
    with torch.no_grad():
        ours(torch.randn(1, 1024, 128))
    assert net.batches == [1, 2] and not ours.report.as_dict()["notes"]


def test_what_an_operator_takes_on_its_way_counts_as_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([(100, 500), (100, 500), (110, 580), (110, 580), (130, 600)])
    monkeypatch.setattr(memory_budget, "figures", lambda device: next(figures))
    with memory_budget.Measured(torch.device("cpu")) as taken:
        torch.ones(1)
        torch.ones(1)
    assert (taken.base, taken.least, taken.most, taken.twice()) == (100, 130, 180, 260)


class Pool:
    """Memory of graphs. A smaller one may fit into what a larger one has left; a larger one takes its own."""

    def __init__(self, reuses: bool) -> None:
        self.bytes, self.reuses = 0, reuses

    def captured(self, size: int) -> None:
        """A graph that takes so much was captured."""
        self.bytes = max(self.bytes, size) if self.reuses and self.bytes >= size else self.bytes + size


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """Graphs on the CPU, each of a hundred thousand bytes a token."""
    pretended_graph.pretend(monkeypatch)
    found, captured, release = Pool(True), step_graphs.captured, step_graphs.StepGraphs.release

    def capture(memory: Any, run: Any, **given: Any) -> Any:
        result = captured(memory, run, **given)
        found.captured(100_000 * found.tokens)  # type: ignore[attr-defined]
        return result

    def released(steps: Any) -> bool:
        found.bytes = 0
        return release(steps)

    monkeypatch.setattr(step_graphs, "captured", capture)
    monkeypatch.setattr(step_graphs.StepGraphs, "release", released)
    monkeypatch.setattr(step_graphs, "pool_bytes", lambda memory: found.bytes)
    return found


def _steps(ours: Any, pool: Pool, tokens: int, count: int = 3) -> None:
    x = torch.randn(2, tokens, 128)
    pool.tokens = tokens  # type: ignore[attr-defined]
    with torch.no_grad():
        for _ in range(count):
            assert torch.allclose(ours(x), ours.uncompiled()(x), atol=1e-5)


def test_graphs_of_several_sizes_hold_what_the_largest_needs(tmp_path: Path, pool: Pool) -> None:
    ours = compiled(Net(), tmp_path)
    graphs = ours._nexfort_engine.graphs
    _steps(ours, pool, 20)
    _steps(ours, pool, 40)
    is_graph = [step.graph is not None for step in graphs._steps.values()]
    assert not pool.bytes and not any(is_graph), "the small one came first, and its memory was no good for the other"
    _steps(ours, pool, 40)
    _steps(ours, pool, 20)
    assert pool.bytes == 100_000 * 40 and len(graphs._steps) == 2
    assert not ours.report.as_dict()["notes"]


def test_where_graphs_find_no_room_in_each_other_s_memory_one_is_none(tmp_path: Path, pool: Pool) -> None:
    ours, pool.reuses = compiled(Net(), tmp_path), False
    for _ in range(3):
        for tokens in (20, 40):
            _steps(ours, pool, tokens)
            assert pool.bytes <= 1.05 * (100_000 * 40 + sum(weight.nbytes for weight in ours.parameters()))
    assert any("more of the GPU than an uncompiled step takes" in note for note in ours.report.as_dict()["notes"])
    made = len(pretended_graph.Graph.made)
    for tokens in (20, 40, 20, 40):
        _steps(ours, pool, tokens)
    assert len(pretended_graph.Graph.made) == made, "graphs are captured again and again"


def test_what_is_made_of_a_prompt_is_kept_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert memory_budget.beside(device) > 1 << 60
    monkeypatch.setattr(memory_budget, "figures", lambda device: (1000, 5000))
    assert memory_budget.beside(device) == 50


@given(some.integers(0, 10**12), some.integers(0, 10**12))
def test_a_peak_is_allowed_exactly_within_a_twentieth(peak: int, eager: int) -> None:
    assert memory_budget.allows(peak, eager) == (20 * peak <= 21 * eager)
