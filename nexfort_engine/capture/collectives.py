# SPDX-License-Identifier: Apache-2.0
"""Collectives of a captured graph, brought into the form in which artefacts hold them.

torch records a functional collective with the group's name, and a wait for it. In its place comes one operator of ours
(guards/collectives.py) that knows the group by its number. All that speaks with other processes, or runs code of
others, is put in a chain, so that no compiler changes its order.
"""

from __future__ import annotations

from operator import getitem

from torch.fx import GraphModule, Node

from ..graph.fx_builder import fill
from ..guards import callbacks
from ..guards.collectives import number_of, operator, taken_apart
from ..guards.option_recorder import Refused

_FUNCTIONAL = "_c10d_functional"
_OTHERS = ("c10d", "c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
_AFTER = {"collective": 6, "substitute": 7}  # the place of `after` among an operator's arguments


def take_over(graph: GraphModule, held: list[str]) -> list[int]:
    """Rewrite a graph's collectives; the numbers of their groups. held: names of groups that the block holds.

    Raises Refused for what is no functional collective, and for groups that the block does not hold.
    """
    numbers = []
    for node in list(graph.graph.nodes):
        namespace, name = getattr(node.target, "namespace", ""), str(node.target)
        if namespace in _OTHERS:
            raise Refused(f"it speaks with other processes by {name}, which is no functional collective")
        if node.op != "call_function" or namespace != _FUNCTIONAL:
            continue
        kind = name.split(".")[1]
        if kind == "wait_tensor":
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
            continue
        numbers.append(_rewritten(node, kind, held))
    if numbers:
        _chain(graph)
        fill(graph.graph.nodes)
        graph.recompile()
    return numbers


def _rewritten(node: Node, kind: str, held: list[str]) -> int:
    parts = taken_apart(kind, node.args)
    if parts is None:
        raise Refused(f"it speaks with other processes by {kind}, which compiled code cannot follow")
    number = number_of(str(node.args[-1]), held)
    if number is None:
        raise Refused("it speaks in a process group that it holds nowhere, so that no other process could find it")
    if not node.users:
        raise Refused(f"it does not use what {kind} gives, which a graph would leave out")
    with node.graph.inserting_before(node):
        made = node.graph.call_function(operator(), (node.args[0], kind, *parts, number, []))
        result = node.graph.call_function(getitem, (made, 0))
    result.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return number


def _chain(graph: GraphModule) -> None:
    """Have each call that speaks with others, or runs code of others, come after the one before it."""
    before: Node | None = None
    kinds = {operator(): _AFTER["collective"], callbacks.operator(): _AFTER["substitute"]}
    for node in [node for node in graph.graph.nodes if node.op == "call_function" and node.target in kinds]:
        if before is not None:
            last = 1 if before.target is operator() else len(before.args[3])  # type: ignore[arg-type]
            with graph.graph.inserting_before(node):
                token = graph.graph.call_function(getitem, (before, last))
            node.update_arg(kinds[node.target], [token])
        before = node
