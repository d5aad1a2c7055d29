# SPDX-License-Identifier: Apache-2.0
"""Parting: a large graph that does not repeat itself cut in parts, which are lowered at once.

A block with two streams has one kernel after another to be written, and is the last of a model to be ready. Its graph
is cut where nothing crosses but what is in memory anyway: what a library's kernel gave or took. What only looks at such
a value is looked at again behind the cut. So both parts make the kernels that the whole would.

The numbers are the same: the same operators on the same inputs, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .folding import Folded, in_pieces, operators_of, writes
from .passes.writing import fill
from .repeats import Nodes, is_library, looked_at, may_cross, tensors_of

# operators, but for looks
LARGE = 64  # of a part that is cut; a smaller one is lowered in four seconds, and each part more is called in each step
LEAST_SAVED = 20  # that need not be waited for; about a second of lowering


def part(module: GraphModule, large: int = LARGE, least: int = LEAST_SAVED) -> Folded | None:
    """A graph in parts, where it has `large` operators or more, and `least` less in the larger part of a cut.

    So is each part. The graph itself stays. None where there is no place to cut it at, or it holds what can't be cut:
    results that are sizes.
    """
    if sum(node.op == "call_function" for node in module.graph.nodes) < large:
        return None
    fill(module.graph.nodes)
    graph = _copied(module.graph)
    parts = _parts(graph, large, least)
    return in_pieces(graph, [[nodes] for nodes in parts]) if len(parts) > 1 else None


def _copied(old: Graph) -> Graph:
    """The same graph once more, of the same values."""
    new, there = Graph(), dict[Node, Node]()
    for node in old.nodes:
        there[node] = new.node_copy(node, there.__getitem__)
    return new


def _parts(graph: Graph, large: int, least: int) -> list[Nodes]:
    """The operators of a graph in parts, the largest of which was cut as long as that helps."""
    nodes = operators_of(graph, with_writes=True)
    parts: list[Nodes] = [] if nodes is None else [nodes]
    while parts and _work(parts[0]) >= large:
        cut = _Places(parts[0]).best()
        if cut is None or _work(parts[0]) - max(map(_work, (parts[0][:cut], parts[0][cut:]))) < least:
            break
        parts[:1] = _cut(graph, parts[0], cut)
        parts.sort(key=_work, reverse=True)
    order = {node: at for at, node in enumerate(graph.nodes)}
    return sorted(parts, key=lambda nodes: order[nodes[0]])


def _work(nodes: Nodes) -> int:
    """How many operators are more than a look at something."""
    return sum(looked_at(node) is None for node in nodes)


class _Places:
    """Where the operators of a part may be cut."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._places = {node: at for at, node in enumerate(nodes)}
        self._written = {_root(node.all_input_nodes[0]): node for node in nodes if writes(node)}

    def best(self) -> int | None:
        """How many operators are before the cut that leaves the least in the larger part; None: there is no place."""
        total = _work(self._nodes)
        found: list[tuple[int, int]] = []
        before = 0
        for at in range(1, len(self._nodes)):
            before += _work(self._nodes[at - 1 : at])
            larger = max(before, total - before)
            if larger < total and (not found or larger < found[0][0]) and self._may_be(at):
                found = [(larger, at)]
        return found[0][1] if found else None

    def _may_be(self, cut: int) -> bool:
        """Whether all that is read behind a cut may be handed over it, or is there without."""
        if any(self._parts_writing(root, node, cut) for root, node in self._written.items()):
            return False
        return all(self._crosses(value, cut) for node in self._nodes[cut:] for value in self._read(node, cut))

    def _parts_writing(self, root: Node, node: Node, cut: int) -> bool:
        """Whether a cut parts what is written to from who writes; an input is everybody's."""
        return root in self._places and (self._places[root] < cut) != (self._places[node] < cut)

    def _read(self, node: Node, cut: int) -> Iterator[Node]:
        return (value for value in tensors_of(node) if self._places.get(value, cut) < cut)

    def _crosses(self, value: Node, cut: int) -> bool:
        root = _root(value)
        if root in self._written or writes(root):
            return False  # a look may be a copy of what it was then
        value = handed(value)
        if value.op == "placeholder":
            return True
        if not may_cross(value.meta.get("val")):
            return False
        if root not in self._places:  # handed to this part already
            return True
        return is_library(root) or any(is_library(user) for user in value.users if self._places.get(user, cut) < cut)


def handed(value: Node) -> Node:
    """What is handed over a cut for a value: an input that it is a look at, or the nearest that may be; or itself."""
    root = _root(value)
    if root.op == "placeholder":
        return root
    seen: Node | None = value
    while seen is not None and not may_cross(seen.meta.get("val")):
        seen = looked_at(seen)
    return value if seen is None else seen


def _root(value: Node) -> Node:
    """Where the numbers come from that a value is a look at, through whoever wrote to them."""
    while value.op != "placeholder":
        behind = value.all_input_nodes[0] if writes(value) else looked_at(value)
        if behind is None:
            break
        value = behind
    return value


def _cut(graph: Graph, nodes: Nodes, cut: int) -> list[Nodes]:
    """Both parts of a part; what only looks at something before the cut is looked at again behind it."""
    before, after = nodes[:cut], nodes[cut:]
    mine = set(before)
    again: dict[Node, Node] = {}
    looks: list[Node] = []

    def of(value: Node) -> Node:
        if value not in mine or handed(value) is value:
            return value
        if value not in again:
            behind = map_arg((value.args, value.kwargs), _only(looked_at(value), of))
            with graph.inserting_before(after[0]):
                again[value] = graph.node_copy(value)
            again[value].args, again[value].kwargs = behind
            looks.append(again[value])
        return again[value]

    for node in after:
        node.args, node.kwargs = map_arg((node.args, node.kwargs), of)
    return [before, [*looks, *after]]


def _only(one: Node | None, change: Callable[[Node], Node]) -> Callable[[Node], Any]:
    return lambda value: change(value) if value is one else value
