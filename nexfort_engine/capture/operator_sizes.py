# SPDX-License-Identifier: Apache-2.0
"""What operators of a captured graph take for granted of the sizes of what they are given, and the trace does not ask.

Torch takes a size that may vary for at least 2. So nothing is asked where eager takes another kernel for an empty
tensor, or raises: attention, pooling, a convolution, the greatest of a row. Lowered code has that kernel left out, and
may divide by such a size. The sizes of inputs are at least 1 by the ranges of their symbols; here are sizes that follow
from them.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten
# They move numbers or make some, as views and what computes number by number do: an empty part has none.
_MOVING = {
    *(aten.cat.default, aten.stack.default, aten.repeat.default, aten.copy_.default, aten._to_copy.default),
    *(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
    *(aten.pad.default, aten.constant_pad_nd.default),
}


def taken_for_granted(program: torch.export.ExportedProgram, env: Any) -> list[Any]:
    """Relations of a shape environment's symbols, which are at least 1."""
    found: list[Any] = []
    for node in program.graph.nodes:
        if node.target is aten.select.int:
            found += _inside(node, env)
        elif _computes(node):
            tensors = [*node.all_input_nodes, node]
            found += [_filled(size, env) for given in tensors for size in _sizes(given.meta.get("val"))]
    return list(dict.fromkeys(relation for relation in found if relation is not None))


def _inside(node: Node, env: Any) -> list[Any]:
    """That a single index lies within the size."""
    import sympy

    tensor, dim, index = node.args
    size = tensor.meta["val"].shape[dim]  # type: ignore[union-attr,index]
    index = index.meta["val"] if isinstance(index, Node) else index
    size, index = (v.node.expr if isinstance(v, torch.SymInt) else sympy.Integer(v) for v in (size, index))
    return [env.replace(index < size), env.replace(index >= -size)]


def _computes(node: Node) -> bool:
    """Whether an operator looks at how many numbers it is given, or how many it gives."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload) or operator in _MOVING or operator.is_view:
        return False
    return torch.Tag.pointwise not in operator.tags and any(
        _sizes(given.meta.get("val")) for given in node.all_input_nodes
    )


def _sizes(value: Any) -> list[Any]:
    """The sizes of a tensor, or of all that are in a list."""
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    return [size for one in value for size in _sizes(one)] if isinstance(value, (list, tuple)) else []


def _filled(size: Any, env: Any) -> Any:
    """That a size is at least 1, or what it was; None where its symbols say so."""
    import sympy
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if not isinstance(size, torch.SymInt):
        return None
    expr = env.replace(size.node.expr)
    if expr.is_number or expr.is_positive or free_unbacked_symbols(expr):
        return None
    return sympy.Eq(expr, 0) if size.node.hint == 0 else sympy.Ge(expr, 1)


def chosen_for_two(program: torch.export.ExportedProgram, env: Any, noted: list[Any]) -> list[Any]:
    """That sizes are at least 2, where it is this that tells which of two is the greater. noted: what was asked.

    `max(0, 2 - h.shape[2])` is 0 to torch, and lowered code leaves out what so many frames would hold.
    """
    from torch.utils._sympy.functions import Max, Min

    exprs = [size.node.expr for node in program.graph.nodes for size in _symbolic(node.meta.get("val"))]
    exprs += [expr for expr in noted if hasattr(expr, "atoms")]  # a question may be a plain bool
    atoms = {atom: None for expr in exprs for atom in sorted(expr.atoms(Max, Min), key=str)}
    pairs = [env.replace(one - other) for atom in atoms for one, other in combinations(atom.args, 2)]
    return [relation for pair in pairs for relation in _two_for(pair, env)]


def _two_for(difference: Any, env: Any) -> list[Any]:
    """That its symbols are as large as torch takes them for, where that alone says which sign it has."""
    import sympy
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    taken = {symbol: env.var_to_range[symbol] for symbol in difference.free_symbols if symbol in env.var_to_range}
    ours = {symbol: ValueRanges(1, r.upper) if r.lower > 1 else r for symbol, r in taken.items()}
    by_torch, by_us = (bound_sympy(difference, ranges) for ranges in (taken, ours))
    if not (by_torch.lower >= 0 or by_torch.upper <= 0) or by_us.lower >= 0 or by_us.upper <= 0:
        return []
    return [sympy.Ge(symbol, r.lower) for symbol, r in sorted(taken.items(), key=str) if r.lower > 1]


def _symbolic(value: Any) -> list[torch.SymInt]:
    """The sizes of a value that are symbols, or the value itself."""
    return [size for size in (value, *_sizes(value)) if isinstance(size, torch.SymInt)]
