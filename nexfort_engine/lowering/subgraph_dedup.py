# SPDX-License-Identifier: Apache-2.0
"""Folding: a graph that repeats itself cut into pieces, so that what is repeated is lowered once and called often.

A block of ten layers is lowered ten times as long as one of them, and is the last of a model to be ready. Its graph is
the same sequence of operators ten times, each time with other weights. `fold` finds such sequences, cuts the graph
there, and says in what order the pieces are called with what. A cut lies where it parts no two operators that one
kernel would do together: behind a product, not behind the sum that follows it, which belongs to the next norm.

The numbers are the same: the same operators on the same inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_arg

from ..graph.fx_builder import fill
from ..graph.repeated_sequences import Nodes, segments_of, tensors_of

LEAST_SAVED = 60  # operators that need not be lowered; one layer of a transformer has as many, and takes a second


@dataclass(frozen=True)
class Folded:
    """A graph in pieces.

    pieces: each takes tensors and then sizes. sizes: for each symbol that pieces are given, where a call has it: the
    number of an input, and of its dimension (-1: the input is a number itself). calls: piece, and of what values it is
    called; values are numbered: inputs, sizes, then what each call gives, in order. output: a value for each result.
    """

    pieces: list[GraphModule]
    sizes: list[tuple[int, int]]
    calls: list[tuple[int, list[int]]]
    output: list[int]

    def as_json(self) -> dict[str, Any]:
        """Plain data that says how to call the pieces."""
        return {"sizes": self.sizes, "calls": self.calls, "output": self.output, "pieces": len(self.pieces)}


def fold(module: GraphModule, least: int = LEAST_SAVED) -> Folded | None:
    """A graph in pieces, where that saves the lowering of `least` operators or more; the graph itself stays.

    None where it repeats nothing, or holds what can't be cut: in-place operators, results that are sizes.
    """
    if sum(node.op == "call_function" for node in module.graph.nodes) < least:
        return None
    fill(module.graph.nodes)
    nodes = operators_of(module.graph)
    if nodes is None:
        return None
    segments = segments_of(nodes)
    if sum(len(calls[0]) * (len(calls) - 1) for calls in segments) < least:
        return None
    return in_pieces(module.graph, segments)


def in_pieces(graph: Graph, segments: list[list[Nodes]]) -> Folded | None:
    """A graph in a piece for each of these stretches; None where a size is in no input by itself."""
    return _Cutter(graph, segments).folded()


# ---- what there is to cut ------------------------------------------------------------------------------------


def operators_of(graph: Graph, *, with_writes: bool = False) -> list[Node] | None:
    """The calls of a graph, those left out that compute sizes: each piece computes its own. None: it can't be cut.

    with_writes: also of one in which some write to what they are given.
    """
    found: list[Node] = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "output":
            results = [part.meta.get("val") for part in node.all_input_nodes]
            if not isinstance(node.args[0], (tuple, list)) or not all(isinstance(part, Node) for part in node.args[0]):
                return None
            if not all(isinstance(result, torch.Tensor) for result in results):
                return None
        elif node.op == "call_function":
            if isinstance(value, (torch.SymInt, int)):
                continue
            if not hasattr(node.target, "_schema") and node.target is not operator.getitem:
                return None
            if writes(node) and not with_writes:
                return None
            found.append(node)
        elif node.op != "placeholder":
            return None
    return found


def writes(node: Node) -> bool:
    """Whether a call writes to what it is given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


# ---- the pieces ---------------------------------------------------------------------------------------------


@dataclass
class _Cutter:
    """Makes the pieces of a graph. segments: as `segments_of` gives them."""

    graph: Graph
    segments: list[list[Nodes]]
    pieces: list[GraphModule] = field(default_factory=list)
    calls: list[tuple[int, list[int]]] = field(default_factory=list)

    def folded(self) -> Folded | None:
        """All pieces and how they are called; None where a size is in no input by itself."""
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        symbols = _symbols(inputs)
        if not _free_symbols((node for calls in self.segments for node in calls[0]), strides=False) <= symbols.keys():
            return None
        numbers = {node: i for i, node in enumerate(inputs)}  # of the values
        used = sorted(symbols, key=str)
        sizes = {symbol: len(inputs) + i for i, symbol in enumerate(used)}
        count = len(inputs) + len(used)
        for calls in self.segments:
            gives = _given(calls)
            if not gives and not any(map(writes, calls[0])):
                continue  # nobody reads it
            takes = _taken(calls)
            # strides of an input that is a part of another tensor have symbols of their own: nothing computes with them
            own = sorted(_free_symbols([*calls[0], *(parts[0] for parts in takes)]) & symbols.keys(), key=str)
            self.pieces.append(_piece(calls, takes, {symbol: symbols[symbol][2] for symbol in own}, gives))
            for time, nodes in enumerate(calls):
                taken = [numbers[given[time]] for given in takes] + [sizes[symbol] for symbol in own]
                self.calls.append((len(self.pieces) - 1, taken))
                for at in gives:
                    numbers[nodes[at]] = count
                    count += 1
        output = next(node for node in self.graph.nodes if node.op == "output")
        places = [symbols[symbol][:2] for symbol in used]
        return Folded(self.pieces, places, self.calls, [numbers[node] for node in output.args[0]])


def _given(calls: list[Nodes]) -> dict[int, bool]:
    """Places in the sequence of what somebody outside of one call of it uses, and whether another piece does."""
    found: dict[int, bool] = {}
    for nodes in calls:
        mine = set(nodes)
        for at, node in enumerate(nodes):
            for user in _readers(node):
                if user not in mine:
                    found[at] = found.get(at, False) or user.op != "output"
    return dict(sorted(found.items()))


def _rows(calls: list[Nodes]) -> Iterator[tuple[Node, list[tuple[Node, ...]]]]:
    """The operators of the first call, and what each takes: in every call."""
    for row in zip(*calls, strict=True):
        yield row[0], list(zip(*map(tensors_of, row), strict=True))


def _taken(calls: list[Nodes]) -> list[tuple[Node, ...]]:
    """What the calls take from outside, in one order: two that are the same in one call need not be in the next."""
    mine = set(calls[0])
    return list(dict.fromkeys(parts for _, takes in _rows(calls) for parts in takes if parts[0] not in mine))


def _readers(node: Node) -> Iterator[Node]:
    """Who uses a value; what computes a size of it does not."""
    return (user for user in node.users if not isinstance(user.meta.get("val"), (int, torch.SymInt)))


def _symbols(inputs: Nodes) -> dict[Any, tuple[int, int, torch.SymInt]]:
    """Symbol -> the input that has it as a size by itself, which one, and the size."""
    found: dict[Any, tuple[int, int, torch.SymInt]] = {}
    for number, node in enumerate(inputs):
        value = node.meta["val"]
        sizes = list(enumerate(value.shape)) if isinstance(value, torch.Tensor) else [(-1, value)]
        for dim, size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, (number, dim, size))
    return found


def _free_symbols(nodes: Any, *, strides: bool = True) -> set[Any]:
    """The symbols in sizes and strides of values, and in sizes that calls are given."""
    found: set[Any] = set()

    def look(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for part in value:
                look(part)
        elif isinstance(value, torch.Tensor):
            look([*value.shape, *((*value.stride(), value.storage_offset()) if strides else ())])
        elif isinstance(value, torch.SymInt):
            found.update(value.node.expr.free_symbols)

    for node in nodes:
        look(node.meta.get("val"))
        for part in node.all_input_nodes:
            if isinstance(part.meta.get("val"), torch.SymInt):
                look(part.meta["val"])
    return found


def _piece(
    calls: list[Nodes], takes: list[tuple[Node, ...]], symbols: dict[Any, torch.SymInt], gives: dict[int, bool]
) -> GraphModule:
    """A graph of its own of what is called. takes: what it is given from outside. gives: as `_given` has it."""
    graph, nodes, there = Graph(), calls[0], dict[Any, Node]()
    for number, parts in enumerate(takes):
        there[parts] = graph.placeholder(f"value_{number}")
        there[parts].meta["val"] = _of_its_own(parts[0].meta["val"])
    sizes = {}
    for symbol, size in symbols.items():
        place = graph.placeholder(f"size_{symbol}")
        place.meta["val"] = size
        sizes[symbol] = Proxy(place)
    for node, row in _rows(calls):
        left = iter(row)

        def of(part: Node, left: Iterator[tuple[Node, ...]] = left) -> Any:
            value = part.meta.get("val")
            if isinstance(value, torch.SymInt):
                return _computed(value.node.expr, sizes)
            if isinstance(value, int):
                return value
            parts = next(left)
            return there[parts] if parts in there else there[parts[0]]

        args, kwargs = map_arg((node.args, node.kwargs), of)
        there[node] = graph.create_node("call_function", node.target, args, kwargs, node.name)
        there[node].meta.update(node.meta)
    results = []
    for at, is_handed_on in gives.items():
        result = there[nodes[at]]
        if is_handed_on:
            # a trace of the piece may find an operator's result to lie otherwise; who takes it was promised a matrix
            result = graph.call_function(torch.ops.aten.contiguous.default, (result,))
            result.meta["val"] = nodes[at].meta["val"]
        results.append(result)
    graph.output(tuple(results))
    return GraphModule(torch.nn.Module(), graph)


def _of_its_own(value: torch.Tensor) -> torch.Tensor:
    """A value like this one that shares no memory with any: what is one in the first call need not be in the next.

    A result that is a look at an input is told by memory alone, and would be one at the wrong input.
    """
    with value.fake_mode if isinstance(value, FakeTensor) else nullcontext():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _computed(expression: Any, sizes: dict[Any, Proxy]) -> Any:
    """A size as calls on the sizes that a piece is given."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    found = sympy_interp(PythonReferenceAnalysis, sizes, expression)
    return found.node if isinstance(found, Proxy) else found
