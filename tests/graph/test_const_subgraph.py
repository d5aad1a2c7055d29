# SPDX-License-Identifier: Apache-2.0
"""What a graph computes of its weights alone is taken out of it, and the rest computes what it did."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from prepared_weights import WIDE, Normed, x
from probe import Probe, block_of
from torch import nn
from torch.fx import Graph, GraphModule

from nexfort_engine.graph.const_subgraph import LEAST, take_out

aten = torch.ops.aten


def test_what_is_made_of_large_weights_alone_is_taken_out() -> None:
    probe = Probe(Normed(), x())
    graph, weights = probe.captured.graph, len(probe.captured.weights)
    taken = take_out(graph, [True] * weights)
    assert taken is not None and taken.gives == 1, "one weight, which is used in two ways; that of the norm is small"
    assert len(taken.takes) == 2 and len(taken.keeps) == weights - 2
    assert not [n for n in graph.graph.nodes if n.target is aten.div.Tensor]
    graph.graph.lint()
    assert take_out(graph, [True] * len(taken.keeps)) is None, "nothing else is worth it"


class Unpacking(nn.Module):
    """A layer whose weight is kept in one byte a number, or in as many as it is computed in."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = nn.Buffer(torch.ones(WIDE, WIDE).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.packed.to(x.dtype) * 2)


@pytest.mark.parametrize(("dtype", "gives"), [(torch.int8, None), (torch.float32, 1)])
def test_what_takes_more_memory_than_what_it_is_made_of_is_kept_if_that_is_asked_for(
    dtype: torch.dtype, gives: int | None
) -> None:
    probe = Probe(Unpacking(dtype), x())
    taken = take_out(probe.captured.graph, [True] * len(probe.captured.weights), larger=False)
    assert (taken.gives if taken is not None else None) == gives
    assert take_out(Probe(Unpacking(dtype), x()).captured.graph, [True] * len(probe.captured.weights)) is not None


def test_a_graph_that_uses_its_weights_as_they_are_stays_as_it_is() -> None:
    probe = Probe(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)).eval().requires_grad_(False), x())
    before = str(probe.captured.graph.graph)
    assert take_out(probe.captured.graph, probe.captured.lasting) is None
    assert str(probe.captured.graph.graph) == before


def changed(self: Any, x: torch.Tensor) -> Any:
    weight = self.one * 2
    weight.add_(self.two)
    return x @ weight


def changed_by_a_look(self: Any, x: torch.Tensor) -> Any:
    weight = self.one * 2
    weight.t()[0].mul_(x.mean())
    return x @ weight


def changed_after_dropout(self: Any, x: torch.Tensor) -> Any:
    weight = nn.functional.dropout(self.one * 2, 0.5, self.training)
    return x @ weight.mul_(x.mean()) + x @ (self.one + self.two)


def given_away(self: Any, x: torch.Tensor) -> Any:
    weight = self.one * 2
    return x @ weight, weight.t()[:8]


def of_a_buffer(self: Any, x: torch.Tensor) -> Any:
    return x @ (self.large * 2) + x @ (self.one + self.large)


def as_it_is(self: Any, x: torch.Tensor) -> Any:
    return x @ self.one.to(x.dtype) + x @ self.two.contiguous() + x @ torch.cat(self.one.chunk(2))[:, :WIDE].relu()


def in_pieces(self: Any, x: torch.Tensor) -> Any:
    left, right = (self.one * 2).chunk(2)
    return x @ torch.cat([left, right * x.mean()])


def written_in_a_region(self: Any, x: torch.Tensor) -> Any:
    """In a graph within the graph, of which nobody uses a result."""
    x = x.clone()
    with torch.autocast("cpu", enabled=False):
        x[:, :2] += 3.0
    return x @ (self.one * self.two)


def several_at_once(self: Any, x: torch.Tensor) -> Any:
    values, places = torch.maximum(self.one, self.two).max(dim=0)
    return x * values + places


@pytest.mark.parametrize(
    ("function", "gives"),
    [
        *((changed, 0), (changed_by_a_look, 0), (changed_after_dropout, 1), (given_away, 0), (of_a_buffer, 0)),
        *((as_it_is, 1), (in_pieces, 1), (several_at_once, 2), (written_in_a_region, 1)),
    ],
)
def test_what_is_taken_out_stays_what_it_is_in_every_call(function: Any, gives: int) -> None:
    """Whatever the graph does with it, and whatever the caller does with results and the network with buffers."""
    weights = {name: nn.Parameter(torch.randn(WIDE, WIDE) / 16, requires_grad=False) for name in ("one", "two")}
    block = block_of(function, **weights)
    block.register_buffer("large", torch.randn(WIDE, WIDE) / 16)
    probe = Probe(block, x())
    graph, captured = probe.captured.graph, probe.captured
    taken = take_out(graph, captured.lasting)
    assert (taken.gives if taken is not None else 0) == gives
    given = probe.weights
    prepared = taken.graph(*[given[i] for i in taken.takes]) if taken is not None else []
    keeps = taken.keeps if taken is not None else range(len(given))
    for seed in range(3):
        found = graph(*[given[i] for i in keeps], *prepared, x(seed=seed))
        wanted = block(x(seed=seed))
        for result, other in zip(found, wanted if isinstance(wanted, tuple) else [wanted], strict=True):
            assert torch.allclose(result, other, atol=1e-5)
            result.zero_()
        block.large.mul_(2.0)


# ---- any graph ---------------------------------------------------------------------------------------------

OPERATORS = [aten.add.Tensor, aten.mul.Tensor, aten.mm.default]
LOOKS = [lambda g, n: g.call_function(aten.t.default, (n,)), lambda g, n: g.call_function(aten.relu.default, (n,))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=14))
def test_any_graph_computes_what_it_did(program: list[tuple[int, int, int]]) -> None:
    """Random programs over two weights and an input: every value that nothing uses is a result."""
    side, graph = int(LEAST**0.5), Graph()
    nodes = [graph.placeholder(name) for name in ("one", "two", "x")]
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(side, side, generator=generator) / side**0.5 for _ in nodes]
    for operator, left, right in program:
        a, b = nodes[left % len(nodes)], nodes[right % len(nodes)]
        if operator < len(OPERATORS):
            nodes.append(graph.call_function(OPERATORS[operator], (a, b)))
        else:
            nodes.append(LOOKS[operator - len(OPERATORS)](graph, a))
    graph.output(tuple(node for node in nodes if not node.users and node.op != "placeholder"))
    module = GraphModule(nn.Module(), graph)
    wanted = module(*values)
    with torch._subclasses.FakeTensorMode() as mode:
        for node, value in zip(nodes, values, strict=False):
            node.meta["val"] = mode.from_tensor(value)
    taken = take_out(module, [True, True])
    if taken is None:
        assert all(torch.equal(a, b) for a, b in zip(module(*values), wanted, strict=True))
        return
    prepared = taken.graph(*[values[i] for i in taken.takes])
    found = module(*[values[i] for i in taken.keeps], *prepared, values[2])
    assert len(prepared) == taken.gives
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
