# SPDX-License-Identifier: Apache-2.0
"""Writes to several slices of one tensor, such as modulation by segments, as selections over all of its rows.

    h[a:b].mul_(s)  ->  h.copy_(torch.where((a <= i) & (i < b), h * s, h)), where i counts the rows

torch makes a `slice_scatter` of each such write, and Inductor computes each of them twice for the next one: for the
rows that are written and for the others. Three segments that are scaled and shifted so read every tensor of a row up to
64 times. MiniMax-H3's norm with modulation took 6.1 ms, where what it moves takes 0.1 (rows of 5376, int8 base,
bfloat16, H200, torch 2.11, 2026-11). A selection reads each tensor once. What is given for one segment is read for the
rows of that segment alone.

A table of what is given for segments, such as a layer's result that is seen as a row for each, is in memory before its
rows are picked. Inductor would find the place of each number by a division otherwise: 3.2 ms of the 6.1 above.

A tensor of which one slice is written stays as it is. So does one of whole numbers, whose division by zero fails, one
some of whose numbers are there once for several places, and one that is given another shape in place.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.proxy import GraphAppendingTracer

from ..graph.alias_analysis import Aliases
from ..graph.fx_builder import fill, fixed, keep, lies_as_its_copy, sizes_of
from ..graph.layouts import memory_order
from ..graph.sizes import hint

aten = torch.ops.aten
_FEWEST = 2  # slices of a tensor that are written


@dataclass(frozen=True)
class _Slice:
    """Rows of a tensor along a dimension, from `first` to before `end`, each a number or a node of one."""

    whole: Node
    dim: int
    first: Any
    end: Any

    def has_rows_of(self, other: _Slice) -> bool:
        """Whether both are the same rows of tensors of equal length."""
        equal = (self.dim, self.first, self.end) == (other.dim, other.first, other.end)
        lengths = [part.whole.meta["val"].shape[part.dim] for part in (self, other)] if equal else []
        dims = {part.whole.meta["val"].dim() for part in (self, other)}
        return equal and len(dims) == 1 and statically_known_true(lengths[0] == lengths[1])


@dataclass(frozen=True)
class _Write:
    """An in-place pointwise operator on a slice. functional: the operator that gives what it writes."""

    node: Node
    view: Node
    rows: _Slice
    functional: Any


def segment_writes(module: GraphModule) -> int:
    """Write such operators as selections; gives how many."""
    fill(module.graph.nodes)  # with what passes before put in
    found: dict[Node, _Write] = {}
    for node in module.graph.nodes:
        if (write := _write(node, found)) is not None:
            found[node] = write
    slices: dict[tuple[Node, int], set[_Slice]] = {}
    for write in found.values():
        slices.setdefault((write.rows.whole, write.rows.dim), set()).add(write.rows)
    several = [write for write in found.values() if len(slices[write.rows.whole, write.rows.dim]) >= _FEWEST]
    aliases, masks = Aliases(module.graph), dict[Any, Node]()
    for table in dict.fromkeys(table for write in several for table in _tables(write)):
        if lies_as_its_copy(table.meta["val"]) and not aliases.is_written(table):
            keep(table)
    for write in several:
        _select(write, masks)
    fill(module.graph.nodes)
    return len(several)


def _write(node: Node, found: dict[Node, _Write]) -> _Write | None:
    """What a node writes to a slice, which may be what another in-place operator on it gave; None for other nodes."""
    functional = _functional(node)
    to = node.args[0] if functional is not None else None
    if not isinstance(to, Node):
        return None
    view = found[to].view if to in found else to
    rows = _slice(view)
    if rows is None or not _may_be_written(rows.whole) or _is_selection(node):
        return None
    given = (*node.args[1:], *node.kwargs.values())
    fits = all(_fits(part, view.meta["val"], rows.dim) for part in given)
    named = any(_is_tensor(part) for part in node.kwargs.values())
    return _Write(node, view, rows, functional) if fits and not named else None


def _may_be_written(whole: Node) -> bool:
    """Whether all of a tensor may be written where a slice of it is."""
    value = whole.meta["val"]
    turned = any(torch.Tag.inplace_view in getattr(user.target, "tags", ()) for user in whole.users)
    return value.is_floating_point() and not turned and _has_places_of_its_own(value)


def _has_places_of_its_own(value: torch.Tensor) -> bool:
    """Whether no two numbers of a tensor are at one place in memory, as far as that is known for all sizes."""
    sizes, strides = ([hint(number) for number in numbers] for numbers in (value.shape, value.stride()))
    if None in sizes or None in strides:
        return False
    order = memory_order(sizes, strides)  # type: ignore[arg-type]
    inner: Any = 1
    for dim in reversed(order):
        if fixed(value.shape[dim]) == 1:
            continue
        if not statically_known_true(value.stride(dim) >= inner):
            return False
        inner = value.stride(dim) * value.shape[dim]
    return True


def _is_selection(node: Node) -> bool:
    """Whether a node is what was written here for a slice of a slice."""
    made = node.args[1] if node.target is aten.copy_.default else None
    return isinstance(made, Node) and made.target is aten.where.self and made.args[2] is node.args[0]


def _functional(node: Node) -> Any:
    """The operator that gives what an in-place pointwise one writes; None for other nodes."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target is aten.copy_.default:
        return aten.copy.default
    namespace, _, name = node.target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None) if name.endswith("_") else None
    overload = getattr(packet, node.target._schema.overload_name or "default", None)
    if overload is None or _arguments(overload) != _arguments(node.target):
        return None  # such as `pow_` of a tensor and a number, beside `pow` of a number and a tensor
    tags = overload.tags
    return overload if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags else None


def _arguments(operator: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in operator._schema.arguments]


def _slice(node: Node) -> _Slice | None:
    """Which rows a node looks at; None for other nodes, and where rows are skipped or count from the end."""
    if node.target is not aten.slice.Tensor or node.kwargs:
        return None
    given: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    whole, dim, first, end, step = given
    first, end = 0 if first is None else first, sys.maxsize if end is None else end
    bounds = [part.meta["val"] if isinstance(part, Node) else part for part in (first, end)]
    if step != 1 or not all(statically_known_true(bound >= 0) for bound in bounds):
        return None
    return _Slice(whole, dim % whole.meta["val"].dim(), first, end)


def _is_tensor(part: Any) -> bool:
    return isinstance(part, Node) and isinstance(part.meta.get("val"), torch.Tensor)


def _fits(part: Any, like: torch.Tensor, dim: int) -> bool:
    """Whether what an operator is given for a slice can be had for all rows."""
    if not _is_tensor(part):
        return isinstance(part, (Node, int, float, bool))
    value = part.meta["val"]
    if value.dim() == 0:
        return True
    size = _rows_of(value, like, dim)
    lies = value.device == like.device and value.dim() <= like.dim()
    return lies and (fixed(size) == 1 or statically_known_true(size == like.shape[dim]))


def _tables(write: _Write) -> Iterator[Node]:
    """What an operator is given the same of for all rows of its slice, before it is looked at in another way."""
    for part in write.node.args[1:]:
        if not _is_tensor(part) or fixed(_rows_of(part.meta["val"], write.view.meta["val"], write.rows.dim)) != 1:  # type: ignore[union-attr]
            continue
        table, looked = part, False
        while isinstance(table, Node) and table.op == "call_function":
            inputs = [one for one in table.all_input_nodes if not isinstance(one.meta.get("val"), (int, torch.SymInt))]
            looks = table.target is operator.getitem or getattr(table.target, "is_view", False)
            looked |= looks
            if len(inputs) != 1 or not (looks or torch.Tag.pointwise in getattr(table.target, "tags", ())):
                break
            (table,) = inputs
        if looked and isinstance(table, Node) and table.op == "call_function" and _is_tensor(table):
            yield table


def _rows_of(value: torch.Tensor, like: torch.Tensor, dim: int) -> Any:
    """The size of what goes with another tensor along a dimension of that."""
    behind = like.dim() - dim
    return value.shape[-behind] if value.dim() >= behind else 1


def _select(write: _Write, masks: dict[Any, Node]) -> None:
    """Put a selection in the place of an operator that writes to a slice."""
    graph, rows = write.node.graph, write.rows
    tracer, like = GraphAppendingTracer(graph), rows.whole.meta["val"]
    with graph.inserting_before(write.node):
        base = Proxy(rows.whole, tracer)
        key = like.device, like.dim(), str(like.shape[rows.dim]), rows.dim, rows.first, rows.end
        if key not in masks:
            masks[key] = _mask(base, rows, like, tracer).node
        given = [_for_all_rows(part, write, tracer) for part in write.node.args[1:]]
        named = {name: _given(part, tracer) for name, part in write.node.kwargs.items()}
        made = write.functional(base, *given, **named)
        made = aten.to.dtype(made, like.dtype)
        aten.copy_.default(base, aten.where.self(Proxy(masks[key], tracer), made, base))
    write.node.replace_all_uses_with(write.view)
    graph.erase_node(write.node)


def _mask(base: Proxy, rows: _Slice, like: torch.Tensor, tracer: Any) -> Any:
    """Which rows are written, of sizes that go with all of the tensor's."""
    places = aten.arange.default(aten.sym_size.int(base, rows.dim), device=like.device)
    first, end = (_given(part, tracer) for part in (rows.first, rows.end))
    within = aten.logical_and.default(aten.ge.Scalar(places, first), aten.lt.Scalar(places, end))
    return aten.view.default(within, [-1, *[1] * (like.dim() - rows.dim - 1)])


def _given(part: Any, tracer: Any) -> Any:
    return Proxy(part, tracer) if isinstance(part, Node) else part


def _for_all_rows(part: Any, write: _Write, tracer: Any) -> Any:
    """What an operator is given for a slice, for all rows of the tensor. In rows that are not written it is zero."""
    if not _is_tensor(part) or part.meta["val"].dim() == 0:
        return _given(part, tracer)
    rows, like = write.rows, write.rows.whole.meta["val"]
    source = _slice(part)
    if source is not None and source.has_rows_of(rows):
        return Proxy(source.whole, tracer)
    view, base = Proxy(write.view, tracer), Proxy(rows.whole, tracer)
    repeated = aten.expand.default(Proxy(part, tracer), sizes_of(view, write.view.meta["val"].shape))
    value = part.meta["val"]
    numbers = {"dtype": value.dtype, "device": value.device}
    # by the tracer: torch looks at a list's first item alone, which may be a plain number
    zeros = tracer.create_proxy("call_function", aten.full.default, (sizes_of(base, like.shape), 0), numbers)
    return aten.slice_scatter.default(
        zeros, repeated, rows.dim, *(_given(bound, tracer) for bound in (rows.first, rows.end))
    )
