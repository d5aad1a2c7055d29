# SPDX-License-Identifier: Apache-2.0
"""Aliases: which values of a captured graph may lie in the same memory, and what becomes of that memory.

A captured graph holds in-place operators as the block's code has them. Whoever keeps a value beyond the call, or reads
it at another place in the graph than the code does, has to know that nothing writes to it: under its own name, through
a view of it, or as a result in the hands of the caller.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
# of the operators that are made of others, those that give memory of their own and are between most values of a block
_FRESH = {
    *(aten.linear.default, aten.matmul.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
    *(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding),
    *(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
    *(aten.layer_norm.default, aten.rms_norm.default, aten.group_norm.default, aten.softmax.int),
    aten.scaled_dot_product_attention.default,
}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Aliases:
    """Sets of values that may share memory. In doubt they do."""

    def __init__(self, graph: Graph) -> None:
        self._above: dict[Node, Node] = {}
        written: list[tuple[Node, Node]] = []  # what writes, and to what
        given: list[Node] = []
        for node in graph.nodes:
            if node.op == "output":
                given += node.all_input_nodes
            elif node.op == "call_function":
                for other in _may_be(node):
                    self._above[self._set_of(node)] = self._set_of(other)
                written += [(node, given_to) for given_to in _written_by(node)]
        self._written = {self._set_of(node) for _, node in written}
        self._writers = [(writer, self._set_of(node)) for writer, node in written]
        self._given = {self._set_of(node) for node in given}

    def _set_of(self, node: Node) -> Node:
        while (above := self._above.get(node, node)) is not node:
            node = above
        return node

    def is_written(self, node: Node) -> bool:
        """Whether an operator of the graph writes to the value's memory."""
        return self._set_of(node) in self._written

    def is_written_between(self, node: Node, first: Node, last: Node) -> bool:
        """Whether an operator of the graph that stands between two others writes to the value's memory."""
        own = self._set_of(node)
        return any(written is own and first < writer < last for writer, written in self._writers)

    def is_given(self, node: Node) -> bool:
        """Whether the value's memory is among the graph's results, so that its caller may write to it."""
        return self._set_of(node) in self._given


def _may_be(node: Node) -> list[Node]:
    """The inputs of a call whose memory its result may have."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # items of a list; a graph within the graph, of which nothing is known; numbers otherwise
        whole = node.target is operator.getitem or isinstance(node.target, torch._ops.HigherOrderOperator)
        return node.all_input_nodes if whole else []
    if node.target in _FRESH:
        return []
    if isinstance(node.target, torch._ops.OpOverload) and node.target.has_kernel_for_dispatch_key(_COMPOSITE):
        return node.all_input_nodes  # made of other operators: dropout gives its input itself, and does not say so
    return [part for value, declared in _arguments(node) if declared.alias_info for part in _nodes(value)]


def _written_by(node: Node) -> list[Node]:
    """The inputs of a call that it writes to."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return node.all_input_nodes
    said = ((value, declared.alias_info) for value, declared in _arguments(node))
    return [part for value, alias in said if alias is not None and alias.is_write for part in _nodes(value)]


def _arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    """What a call is given, and what its operator declares about that."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        yield from zip(node.args, schema.arguments, strict=False)
        named = {declared.name: declared for declared in schema.arguments}
        yield from ((value, named[name]) for name, value in node.kwargs.items() if name in named)


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(value, found.append)
    return found
