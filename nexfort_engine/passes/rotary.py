# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings by products and a sum that fuse, in the place of operators that nothing fuses with.

ComfyUI turns queries and keys by operators of a package of its own. Each reads them from memory and writes them there
again, between the norm before it and attention. As plain code it is part of the norm's kernel. Operators are known by
name, because versions of the package have some of them, and the process that lowers a graph without any has imported
none. `plan` says which stay as they are, and why.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.proxy import GraphAppendingTracer

from ..graph.alias_analysis import Aliases
from ..graph.fx_builder import fill, fixed, replace
from ..graph.layouts import memory_order
from ..graph.sizes import hint

aten = torch.ops.aten
log = logging.getLogger("nexfort")

_HALVES, _NORMED = "_split_half", "rms_rope"
_NAMES = {
    f"comfy_kitchen::{kind}{halves}{one}"
    for kind in ("apply_rope", _NORMED)
    for halves in ("", _HALVES)
    for one in ("", "1")
}
_TABLE, _TURNED, _SCALES = "freqs_cis", ("xq", "xk", "q", "k", "x"), ("q_scale", "k_scale", "scale")
_KNOWN = {_TABLE, *_TURNED, *_SCALES, "epsilon", "rot_dim"}


@dataclass(frozen=True)
class Turn:
    """One operator of a graph. given: its arguments by name. reason: why it stays as it is."""

    node: Node
    given: dict[str, Any]
    reason: str | None = None

    @property
    def turned(self) -> list[Node]:
        """The tensors that it turns, in the order of its results."""
        return [self.given[name] for name in _TURNED if name in self.given]

    @property
    def scales(self) -> list[Node]:
        """What norms before it are multiplied with, one for each tensor; empty where it has no norm."""
        found = [self.given[name] for name in _SCALES if name in self.given]
        return [found[0] if scale is None else scale for scale in found]  # without one of its own a key has the query's

    @property
    def by_halves(self) -> bool:
        """Whether a number's partner is half a head away, and not beside it."""
        return _HALVES in _name(self.node)


def plan(module: GraphModule) -> list[Turn]:
    """The rotary operators of a graph, with a reason for those that stay."""
    found, alone = [], _symbols_of_inputs(module)
    for node in module.graph.nodes:
        if _name(node) in _NAMES:
            turn = Turn(node, _given(node))
            found.append(Turn(node, turn.given, _odd(turn) or _unfit(turn, alone)))
        elif _name(node).removesuffix("_") in _NAMES:
            found.append(Turn(node, {}, "it writes to the tensor that it turns"))
    return found


def left(module: GraphModule) -> list[str]:
    """Of the rotary operators that stay as they are, what people are told."""
    stay = [turn for turn in plan(module) if turn.reason is not None]
    return list(dict.fromkeys(f"{_name(turn.node)} is not fused: {turn.reason}" for turn in stay))


def rotaries(module: GraphModule) -> int:
    """Write the rotary operators of the plan as `turned` has it; gives how many.

    Sizes of table and tensor that are equal at the captured call are taken to be so from here on, which the operators
    do not: the shape environment has each as a guard, and `lowering/inductor.py` makes it a condition of the artefact.
    """
    found = 0
    for seen in plan(module):
        if seen.reason is not None:
            log.debug("Nexfort: %s is not fused: %s", _name(seen.node), seen.reason)
            continue
        turn = Turn(seen.node, _given(seen.node))  # what another operator gave it is what was written for that by now
        table = turn.given[_TABLE].meta["val"]
        sizes = [pair for x in turn.turned for pair in _equal(x.meta["val"], table)]
        if all(one == other for one, other in sizes):  # asked, and so guarded
            _put(turn.node, [_written(turn, number) for number in range(len(turn.turned))])
            found += 1
            for x in dict.fromkeys(turn.turned):
                if not x.users and x.target is aten.cat.default:  # its parts were turned
                    module.graph.erase_node(x)
    return found


# ---- what there is, and what can be written ------------------------------------------------------------------


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return schema.name if schema is not None else ""


def _given(node: Node) -> dict[str, Any]:
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    return {**defaults, **dict(zip((a.name for a in declared), node.args, strict=False)), **node.kwargs}


def _symbols_of_inputs(module: GraphModule) -> set[Any]:
    """The symbols that are a size of an input by themselves: those that a condition can be about."""
    values = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    sizes = [size for v in values for size in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    return {size.node.expr for size in sizes if isinstance(size, torch.SymInt) and size.node.expr.is_symbol}


def _odd(turn: Turn) -> str | None:
    """Why an operator is called as none of those that are known, or None."""
    given, tensors = turn.given, [*turn.turned, turn.given.get(_TABLE), *turn.scales]
    if not given.keys() <= _KNOWN or len(turn.scales) != (len(turn.turned) if _NORMED in _name(turn.node) else 0):
        return f"its arguments are {', '.join(given)}; expected some of {', '.join(sorted(_KNOWN))}"
    if not all(isinstance(t, Node) and isinstance(t.meta.get("val"), torch.Tensor) for t in tensors):
        return "not all that it computes with are tensors of the graph"
    if not all(isinstance(given.get(name, 0), (int, float)) for name in ("epsilon", "rot_dim")):
        return "its epsilon or the numbers to turn are known in a call alone"
    values = [t.meta["val"] for t in tensors if t is not None]
    if any(hint(size) is None for value in values for size in value.shape):
        return "a size is not known before the call"
    if not all(value.is_floating_point() and value.device == values[0].device for value in values):
        return f"it computes with {', '.join(sorted({f'{v.dtype} on {v.device}' for v in values}))}"
    if len(turn.turned) > 1 and any(user.target is not operator.getitem for user in turn.node.users):
        return "something reads both of its results as one"
    return None


def _unfit(turn: Turn, alone: set[Any]) -> str | None:
    """Why sizes or dtypes of an operator's tensors do not fit `turned`, or None. alone: as `_symbols_of_inputs`."""
    table = turn.given[_TABLE].meta["val"]
    for x in (node.meta["val"] for node in turn.turned):
        width = fixed(x.shape[-1]) if x.dim() else 0
        if width == 0 or turn.given.get("rot_dim", 0) not in (0, width):
            return f"it turns not all numbers of each head, of a tensor of {list(x.shape)}"
        if width is None and (turn.scales or table.dim() < 3 or not _is_of_all(table, x)):
            return f"how many numbers a head has is known in a call alone, of a tensor of {list(x.shape)}"
        if (reason := _unlike(x, table, alone)) is not None:
            return f"a table of {list(table.shape)} for a tensor of {list(x.shape)}; {reason}"
        for scale in (node.meta["val"] for node in turn.scales):
            if scale.dim() != 1 or fixed(scale.shape[0]) != width or scale.dtype != x.dtype:
                return f"a norm's scale of {list(scale.shape)} in {scale.dtype}; expected {width} in {x.dtype}"
    return None


def _is_of_all(table: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a table (..., E, 2, 2) has a matrix for each pair of numbers of x (..., 2 E), whatever E is."""
    return bool(statically_known_true(x.shape[-1] == 2 * table.shape[-3]))


def _equal(x: torch.Tensor, table: torch.Tensor) -> list[tuple[Any, Any]]:
    """What has to be equal: sizes of x, or numbers, and the table's; those of its matrices are symbols too.

    A table's size of 1 is for any of x.
    """
    beside = zip(x.shape[:-1], table.shape[:-3], strict=True)
    matrices = zip((x.shape[-1] // 2, 2, 2), table.shape[-3:], strict=True)
    return [*((one, other) for one, other in beside if fixed(other) != 1), *matrices]


def _unlike(x: torch.Tensor, table: torch.Tensor, alone: set[Any]) -> str | None:
    """Why a table (..., E/2, 2, 2) may be none for x (..., E), or None."""
    if table.dim() != x.dim() + 2:
        return "expected two dimensions more"
    if [hint(size) for size in table.shape[-3:]] != [(hint(x.shape[-1]) or 0) / 2, 2, 2]:
        return "expected a matrix of 2x2 for each pair of numbers"
    for one, other in _equal(x, table):
        if statically_known_true(one == other):
            continue
        # a number of the table's alone would hold the tensor to it, where the operator takes any
        if fixed(other) is not None or hint(one) != hint(other):
            return f"{one} and {other} are not equal in every call"
        if not _symbols(one) | _symbols(other) <= alone:
            return f"no input has all of {one} and {other} alone, so that nothing could check that they are equal"
    return None


def _symbols(size: Any) -> set[Any]:
    return set() if isinstance(size, int) else size.node.expr.free_symbols


# ---- what is written -----------------------------------------------------------------------------------------


def turned(x: Any, table: Any, *, like: torch.Tensor, table_like: torch.Tensor, by_halves: bool = False) -> Any:
    """x (..., E) with each pair of numbers multiplied by its matrix of the table (..., E/2, 2, 2), in x's dtype.

    Computed in the table's dtype, as the operators do, but in fp32 at least, and rounded once. by_halves: a pair is a
    number and that half a head further. Each number times the diagonal, plus its partner times what is beside the
    diagonal: so the kernel of a norm reads a number where it reads it anyway. like, table_like: as both are.
    """
    dtype = torch.promote_types(table_like.dtype, torch.float32)
    partner = -2 if by_halves else -1
    wide = aten.unflatten.int(aten.to.dtype(x, dtype), -1, [2, -1] if by_halves else [-1, 2])
    matrices = aten.to.dtype(table, dtype)
    along = aten.diagonal.default(matrices, 0, -2, -1)
    across = aten.diagonal.default(aten.flip.default(matrices, [-1]), 0, -2, -1)
    if by_halves:
        along, across = (aten.transpose.int(part, -2, -1) for part in (along, across))
    own, other = aten.mul.Tensor(wide, along), aten.mul.Tensor(aten.flip.default(wide, [partner]), across)
    return aten.to.dtype(aten.flatten.using_ints(aten.add.Tensor(own, other), -2, -1), like.dtype)


def _written(turn: Turn, number: int) -> Node:
    """One result of an operator, before its place, with values without numbers: later passes look at those.

    What is joined of parts (text and image) is turned before, or the parts' norms would be kernels by themselves and
    the join one more: a double block of Flux is 11 launches so, 14 otherwise and with the operator (O2, lowered for
    compute capability 9.0, torch 2.11, 2026-11).
    """
    graph, before, table = turn.node.graph, turn.node.prev, turn.given[_TABLE]
    tracer, table_like = GraphAppendingTracer(graph), table.meta["val"]

    def one(part: Node, turns: Any) -> Any:
        like, given = part.meta["val"], Proxy(part, tracer)
        if turn.scales:
            scale = Proxy(turn.scales[number], tracer)
            given = aten.rms_norm.default(given, [like.shape[-1]], scale, turn.given["epsilon"])
        return turned(given, turns, like=like, table_like=table_like, by_halves=turn.by_halves)

    with graph.inserting_before(turn.node):
        parts, dim = _parts(turn.turned[number])
        if len(parts) == 1:
            written = one(parts[0], Proxy(table, tracer))
        else:
            tables = _split(Proxy(table, tracer), table_like, parts, dim)
            written = aten.cat.default([one(*pair) for pair in zip(parts, tables, strict=True)], dim)
        fill(_between(before, turn.node))
        result = turn.node.meta["val"]
        written = _as_laid(written, result if isinstance(result, torch.Tensor) else result[number])
        fill(_between(before, turn.node))
    return written.node


def _parts(x: Node) -> tuple[Sequence[Node], int]:
    """What x is joined of and along which dimension, where nobody else reads x; x alone otherwise."""
    like = x.meta["val"]
    if x.target is not aten.cat.default or len(x.users) != 1:
        return [x], 0
    parts: Any = x.args[0]
    dim: Any = (x.args[1] if len(x.args) > 1 else x.kwargs.get("dim", 0)) % like.dim()  # type: ignore[operator]
    alike = all(part.meta["val"].dim() == like.dim() and part.meta["val"].dtype == like.dtype for part in parts)
    # what is written to between the join and here is another tensor by now
    if not alike or dim == like.dim() - 1 or any(map(Aliases(x.graph).is_written, parts)):
        return [x], 0
    return parts, dim


def _split(table: Any, like: torch.Tensor, parts: Sequence[Node], dim: int) -> list[Any]:
    """The table's part for each part of what is joined along a dimension."""
    if fixed(like.shape[dim]) == 1:
        return [table] * len(parts)

    def size(part: Node) -> Any:
        known = fixed(part.meta["val"].shape[dim])
        return aten.sym_size.int(Proxy(part, table.tracer), dim) if known is None else known

    split = aten.split_with_sizes.default(table, list(map(size, parts)), dim)
    return [split[i] for i in range(len(parts))]


def _between(first: Node, last: Node) -> Iterator[Node]:
    while (first := first.next) is not last:
        yield first


def _as_laid(written: Proxy, like: torch.Tensor) -> Any:
    """What was written, as the operator's result lies in memory: what follows may look at it so."""
    lies = zip(like.shape, written.node.meta["val"].stride(), like.stride(), strict=True)
    if all(fixed(size) == 1 or statically_known_true(one == other) for size, one, other in lies):
        return written
    order = memory_order([hint(n) or 0 for n in like.shape], [hint(n) or 0 for n in like.stride()])
    laid = aten.clone.default(aten.permute.default(written, order), memory_format=torch.contiguous_format)
    return aten.permute.default(laid, sorted(range(len(order)), key=order.__getitem__))


def _put(node: Node, results: list[Node]) -> None:
    """Put the results of an operator in its place."""
    if isinstance(node.meta["val"], torch.Tensor):
        replace(node, Proxy(results[0]))
        return
    for user in list(node.users):
        replace(user, Proxy(results[user.args[1]]))  # type: ignore[index]
    node.graph.erase_node(node)
