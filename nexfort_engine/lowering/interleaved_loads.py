# SPDX-License-Identifier: Apache-2.0
"""Pairs: how a kernel of Inductor's reads numbers that lie in pairs, as rotary embeddings turn them.

As code each number reads its partner, and its own two numbers of the pair's matrix. Inductor makes of that reads whose
neighbours are not side by side: a warp's one read of such a table is in 16 lines of memory, and of a partner in 4. Here
a partner is taken from what was read in order, and a matrix is read in one piece and taken apart in registers.
Microseconds so and otherwise for norms and rotary embeddings of queries and keys: 2 x 14040 tokens of 12 x 128 numbers
95 and 228; 4096 tokens of 24 x 128 43 and 61 (bfloat16, H200, torch 2.11, 2026-11).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy

from ..system.process_settings import replaced


@dataclass(frozen=True)
class _Pairs:
    """Places base + step * (i // 2) + (even or odd), for an index i of so many along a kernel's last dimension."""

    length: int
    base: sympy.Expr
    step: int
    even: int
    odd: int


@contextmanager
def pairs_read_once() -> Iterator[None]:
    """Inside the block kernels read pairs as this module says, where an index shows that it reads such."""
    from torch._inductor.codegen.triton import TritonKernel

    theirs = TritonKernel.load

    def load(kernel: Any, name: str, index: sympy.Expr) -> Any:
        # what is fused with a template, or reduced in parts, has its numbers elsewhere
        plain = type(kernel) is TritonKernel and not kernel.cooperative_reduction and not kernel.mix_order_reduction
        settled = kernel._load_mask is None and not kernel.is_indirect_indexing(index)
        found = _pairs(kernel, index) if plain and settled else None
        if found is None:
            return theirs(kernel, name, index)
        if (found.even, found.odd) == (found.step // 2, 0):
            return _partner(kernel, theirs(kernel, name, _in_order(kernel, found)))
        return _of_piece(kernel, name, found)

    with replaced(TritonKernel, "load", load):
        yield


def _pairs(kernel: Any, index: sympy.Expr) -> _Pairs | None:
    """What an index reads, if a partner or a number of a piece of a power of 2 of numbers."""
    index = kernel.prepare_indexing(index)
    h, p = sympy.Dummy("h", integer=True), sympy.Dummy("p", integer=True)
    for length, half, parity in _halved(kernel, index):
        rest = sympy.expand(index.xreplace({half: h, parity: p}))
        step, across = rest.coeff(h, 1), rest.coeff(p, 1)
        base = sympy.expand(rest - step * h - across * p)
        if (
            not (step.is_Integer and across.is_Integer and step > 0)
            or base.has(h, p)
            or not _is_above(kernel, base, length)
        ):
            continue
        step, across = int(step), int(across)
        if 2 * across == -step:  # the number itself is at an even place, its partner a place on
            return _Pairs(length, base + across, step, -across, 0)
        even = int(base.as_coeff_Add()[0]) % step
        found = _Pairs(length, base - even, step, even, even + across)
        return found if _is_piece(kernel, found) else None
    return None


def _halved(kernel: Any, index: sympy.Expr) -> Iterator[tuple[int, sympy.Expr, sympy.Expr]]:
    """Ranges that an index has by halves: how many numbers, the expressions of i // 2 and of i % 2."""
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    along = _along_last(kernel, index)
    found = [(i.length, FloorDiv(i.symbol(), 2), ModularIndexing(i.symbol(), 1, 2)) for i in along if i.divisor == 1]
    parities = [i.symbol() for i in along if i.divisor == 1 and i.length == 2]
    found += [(2 * i.length, i.symbol(), parity) for i in along if i.divisor == 2 for parity in parities]
    for length, half, parity in found:
        if _is_even(length) and index.has(half) and index.has(parity):
            yield int(length), half, parity


def _along_last(kernel: Any, index: sympy.Expr) -> list[Any]:
    """The ranges along a kernel's last dimension that an index has."""
    entries = [kernel.range_tree_nodes[symbol] for symbol in index.free_symbols if symbol in kernel.range_tree_nodes]
    return [entry for entry in entries if entry.root is _last(kernel)]


def _last(kernel: Any) -> Any:
    """The range that is the last dimension of a kernel's tensors."""
    found = [tree for tree in kernel.active_range_trees() if tree.tensor_dim == kernel.triton_tensor_ndim() - 1]
    return found[0] if len(found) == 1 else None


def _is_even(length: Any) -> bool:
    return bool(getattr(length, "is_Integer", False)) and int(length) % 2 == 0


def _is_above(kernel: Any, base: sympy.Expr, length: int) -> bool:
    """Whether what an index has besides is the same for all of so many numbers."""
    return all(i.divisor % length == 0 for i in _along_last(kernel, base))


def _is_piece(kernel: Any, pairs: _Pairs) -> bool:
    """Whether both numbers of a pair are in one piece of `step` numbers, which begins at a multiple of it."""
    step, terms = pairs.step, sympy.Add.make_args(pairs.base)
    fits = step in (4, 8) and 0 <= pairs.even < step and 0 <= pairs.odd < step
    begins = all(term.as_coeff_Mul()[0] % step == 0 for term in terms)
    return fits and begins and kernel.triton_tensor_ndim() <= 2


def _in_order(kernel: Any, pairs: _Pairs) -> sympy.Expr:
    """The place of the number itself, of which a partner's is told by `pairs`."""
    root, each = _last(kernel), pairs.step // 2
    for further in _along_last(kernel, pairs.base):  # heads: with those the whole row is in order
        whole = further.divisor == pairs.length and further.divisor * further.length == root.numel
        if whole and pairs.base.coeff(further.symbol(), 1) == each * pairs.length:
            along = root.lookup(sympy.S.One, root.numel).symbol()
            return pairs.base - each * pairs.length * further.symbol() + each * along
    return pairs.base + each * root.lookup(sympy.S.One, sympy.Integer(pairs.length)).symbol()


def _partner(kernel: Any, own: Any) -> Any:
    """Each number's partner, from the numbers themselves."""
    *rows, last = own.shape
    taken = [*map(str, rows), f"{last} // 2", "2"]
    halves = _said(kernel, f"tl.split(tl.reshape({own}, [{', '.join(taken)}]))", own)
    return _said(kernel, f"tl.reshape(tl.join({halves}[1], {halves}[0]), [{', '.join(map(str, own.shape))}])", own)


def _of_piece(kernel: Any, name: str, pairs: _Pairs) -> Any:
    """The number of each, from pieces of memory that a pair has in common."""
    import torch
    from torch._inductor import config
    from torch._inductor.virtualized import V

    shape, root = kernel.dense_size_list(), _last(kernel)
    *rows, last = shape
    place = "[None, :]" if rows else ""
    first = f"({root.prefix}offset + 2 * tl.arange(0, {last} // 2){place})"

    def of_pairs(divisor: Any, length: Any) -> sympy.Symbol:
        """A range along the last dimension as one number for each pair."""
        line = first if divisor == 1 else f"{first} // ({kernel.index_to_str(divisor)})"
        line = line if divisor * length == root.numel else f"{line} % ({kernel.index_to_str(length)})"
        found = kernel.cse.generate(kernel.loads, line, dtype=torch.int32, shape=(*rows, f"{last} // 2"))
        return sympy.Symbol(str(found), integer=True, nonnegative=True)

    further = {i.symbol(): of_pairs(i.divisor, i.length) for i in _along_last(kernel, pairs.base)}
    begins = pairs.base.xreplace(further) + pairs.step // 2 * of_pairs(sympy.S.One, sympy.Integer(pairs.length))
    at = kernel.index_to_str(begins)
    kept = " & ".join([f"({first} < {root.prefix}numel)", *(f"{tree.prefix}mask" for tree in _others(kernel))])
    deep = f"[{', '.join([*rows, f'{last} // 2'])}]"
    numbers = f"tl.arange(0, {pairs.step})[{'None, ' * len(shape)}:]"
    dtype = V.graph.get_dtype(name)
    line = (
        f"tl.load({kernel.args.input(name)} + (tl.broadcast_to({at}, {deep}){_deeper(shape)} + {numbers}), "
        f"tl.broadcast_to({kept}, {deep}){_deeper(shape)}, other=0.0)"
    )
    if dtype in (torch.float16, torch.bfloat16) and config.triton.codegen_upcast_to_fp32:
        line, dtype = f"{line}.to(tl.float32)", torch.float32
    piece = kernel.cse.generate(kernel.loads, line, dtype=dtype, shape=(*rows, f"{last} // 2", str(pairs.step)))
    even, odd = (_number(kernel, piece, pairs.step, at, rows, last) for at in (pairs.even, pairs.odd))
    whole = f"[{', '.join(shape)}]"
    found = kernel.cse.generate(
        kernel.loads, f"tl.reshape(tl.join({even}, {odd}), {whole})", dtype=dtype, shape=tuple(shape)
    )
    found.mask_vars = {f"{tree.prefix}mask" for tree in (*_others(kernel), root)}
    return found


def _others(kernel: Any) -> list[Any]:
    return [tree for tree in kernel.active_range_trees() if tree is not _last(kernel) and tree.tensor_dim is not None]


def _deeper(shape: list[str]) -> str:
    return f"[{':, ' * len(shape)}None]"


def _number(kernel: Any, piece: Any, length: int, at: int, rows: list[str], last: str) -> str:
    """Number `at` of each piece: halves of pieces until one is left."""
    dtype = piece.dtype
    while length > 1:
        length //= 2  # of a piece written as `length` rows of 2 the columns are what is at even and at odd places
        shape = ", ".join([*rows, f"{last} // 2", *([str(length)] if length > 1 else []), "2"])
        halves = f"tl.split(tl.reshape({piece}, [{shape}]))"
        piece = f"{kernel.cse.generate(kernel.loads, halves, dtype=dtype, shape=(shape,))}[{at % 2}]"
        at //= 2
    return str(piece)


def _said(kernel: Any, line: str, like: Any) -> Any:
    """A variable for a line of a kernel; the same one for the same line."""
    found = kernel.cse.generate(kernel.loads, line, dtype=like.dtype, shape=like.shape)
    found.mask_vars = like.mask_vars
    return found
