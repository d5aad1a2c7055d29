# SPDX-License-Identifier: Apache-2.0
"""How tensors of kernels lie in memory: the order of a result's dimensions, and strides as a kernel takes them.

An order has a tensor's dimensions from the outermost to the innermost in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def back(order: Sequence[int]) -> list[int]:
    """The order that undoes one: what was permuted by `order` and then by this is as it was."""
    return [list(order).index(i) for i in range(len(order))]


def laid_out(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """x without gaps, with its dimensions in this order in memory; itself where it lies so."""
    return x.permute(*order).contiguous().permute(*back(order))


def empty_laid_out(like: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A tensor of the sizes, dtype and device of `like` with nothing in it, which lies as what `laid_out` gives."""
    return like.new_empty([like.shape[i] for i in order]).permute(*back(order))


def settled(x: Any) -> Any:
    """x in memory, in Inductor's representation. Its strides are what they will be."""
    from torch._inductor import ir

    real = ir.ExternKernel.realize_input(x)
    made = real.data if isinstance(real, ir.StorageBox) else real
    if isinstance(made, ir.ComputedBuffer):
        made.decide_layout()  # as Inductor does later, with other strides than it tells until then
    return real if isinstance(real, ir.TensorBox) else ir.TensorBox(real)


def contiguous(x: Any) -> Any:
    """x in memory, without gaps, in Inductor's representation."""
    from torch._inductor import ir

    return ir.TensorBox(ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x)))


def side_by_side(x: Any) -> Any:
    """x in memory, its last dimension without gaps, as `settled` gives it."""
    from torch._inductor.virtualized import V

    real = settled(x)
    # `require_stride1` is content where any dimension has no gaps
    return real if V.graph.sizevars.statically_known_equals(real.get_stride()[-1], 1) else contiguous(real)


def aligned(x: Any) -> Any:
    """x, in memory and its last dimension without gaps, or a copy without any, where the card can copy it from.

    Such a tensor begins at a multiple of 16 bytes, of which views begin anywhere, and the strides of all dimensions but
    the last are such multiples, and none is 0.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    known, each = V.graph.sizevars, 16 // x.get_dtype().itemsize
    steps = x.get_stride()[:-1]
    lies = all(known.statically_known_multiple_of(place, each) for place in (x.get_layout().offset, *steps))
    if (
        lies
        and not any(known.statically_known_equals(step, 0) for step in steps)
        and x.get_name() not in V.graph.unaligned_buffers
    ):
        return x
    return contiguous(ir.ExternKernel.copy_input(x))


def strides(x: Any, *names: str) -> dict[str, Any]:
    """The strides of a tensor in Inductor's representation, by the names of a kernel's arguments."""
    return dict(zip(names, x.get_stride(), strict=False))
