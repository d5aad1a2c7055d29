# SPDX-License-Identifier: Apache-2.0
"""Parting: a large graph that does not repeat itself cut in parts, which are lowered at once.

A block with two streams has one kernel after another to be written, and is the last of a model to be ready. Its graph
is cut where nothing crosses but what is in memory anyway: what a library's kernel gave or took. What only looks at such
a value is looked at again behind the cut. So both parts make the kernels that the whole would.

The numbers are the same: the same operators on the same inputs, in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..graph.fx_builder import fill
from ..graph.repeated_sequences import Nodes, is_library, looked_at, may_cross
from .subgraph_dedup import Folded, in_pieces, operators_of, writes

# operators, but for looks
LARGE = 64  # of a part that is cut; a smaller one is lowered in four seconds, and each part more is called in each step
LEAST_SAVED = 20  # that need not be waited for; about a second of lowering
MOST_PARTS = 6  # each of which is lowered in a process of its own


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
    if nodes is None or any(_writes_elsewhere(node) for node in nodes):
        return []
    parts: list[Nodes] = [nodes]
    while _work(parts[0]) >= large and len(parts) < MOST_PARTS:
        cut = _best(parts[0], least)
        if cut is None:
            break
        parts[:1] = _cut(graph, parts[0], cut)
        parts.sort(key=_work, reverse=True)
    order = {node: at for at, node in enumerate(graph.nodes)}
    return sorted(parts, key=lambda nodes: order[nodes[0]])


def _writes_elsewhere(node: Node) -> bool:
    """Whether a call writes to more than the first tensor that it is given, or to another."""
    schema: Any = getattr(node.target, "_schema", None)
    if not writes(node):
        return False
    changed = [i for i, declared in enumerate(schema.arguments) if declared.alias_info and declared.alias_info.is_write]
    return changed != [0] or not isinstance(node.args[0], Node)


def _work(nodes: Nodes) -> int:
    """How many operators are more than a look at something."""
    return sum(looked_at(node) is None for node in nodes)


def _best(nodes: Nodes, least: int) -> int | None:
    """How many operators are before the cut that leaves the least in the larger part; None: none saves `least`."""
    before = itertools.accumulate((looked_at(node) is None for node in nodes), initial=0)
    total = _work(nodes)
    saved = [min(work, total - work) for work in before]
    hindered = itertools.accumulate(_hindrances(nodes))
    places = [cut for cut, many in enumerate(hindered) if not many and saved[cut] >= least]
    return max(places, key=saved.__getitem__, default=None)


def _hindrances(nodes: Nodes) -> list[int]:
    """How many more values than at the cut before keep operators from being cut at each place."""
    places = {node: at for at, node in enumerate(nodes)}
    written = [(_root(node.args[0]), node) for node in nodes if writes(node)]
    found = [0] * (len(nodes) + 2)

    def hinder(first: int, last: int) -> None:
        if first <= last:
            found[first] += 1
            found[last + 1] -= 1

    changed = {root for root, _ in written}
    for root, node in written:  # an input is everybody's, another value has to stay with who writes to it
        if root in places:
            hinder(places[root] + 1, places[node])
    for at, value in enumerate(nodes):
        last = max((places[user] for user in value.users if user in places), default=at)
        fine = _crosses_from(value, places)
        # a look may be a copy of what it was before somebody wrote
        hinder(at + 1, last if fine is None or _root(value) in changed else min(last, fine - 1))
    return found[: len(nodes)]


def _crosses_from(value: Node, places: Mapping[Node, int]) -> int | None:
    """The first cut over which a value may be handed, or what it is a look at; None: there is none."""
    root, value = _root(value), _handed(value)
    if value.op == "placeholder" or (root not in places and may_cross(value.meta.get("val"))):
        return 0  # there is nothing to hand over, or it was handed to this part already
    if not may_cross(value.meta.get("val")):
        return None
    if is_library(root):
        return 0
    return min((places[user] + 1 for user in value.users if user in places and is_library(user)), default=None)


def _handed(value: Node) -> Node:
    """What is handed over a cut for a value: an input that it is a look at, or the nearest that may be; or itself."""
    root = _root(value)
    if root.op == "placeholder":
        return root
    seen: Node | None = value
    while seen is not None and not may_cross(seen.meta.get("val")):
        seen = looked_at(seen)
    return value if seen is None else seen


def _root(value: Any) -> Node:
    """Where the numbers come from that a value is a look at, through whoever wrote to them."""
    while value.op != "placeholder":
        behind = value.args[0] if writes(value) else looked_at(value)
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
        if value not in mine or _handed(value) is value:
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
