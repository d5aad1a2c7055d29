# SPDX-License-Identifier: Apache-2.0
"""A convolution's weight copied so that its channels lie innermost in memory, as its kernel reads it.

That is a matrix (I, H * W) transposed for each of O. Inductor's kernel reads or writes it across memory; here it is
read in one piece, put in order inside a multiprocessor, and written in pieces of BLOCK channels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..inductor_launch import empty, launch
from ..layouts import contiguous
from ..op_registry import registered

_NUMBERS = 2048  # that one program holds, among them those that are there for a power of 2 alone
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def reference(weight: torch.Tensor) -> torch.Tensor:
    """A copy of the weight (O, I, H, W) that lies in memory as (O, H, W, I)."""
    return weight.clone(memory_format=torch.channels_last)


@functools.cache
def operator() -> Any:
    """The operator `nexfort::innermost_weight`, as `reference` is."""
    return registered(
        "innermost_weight(Tensor weight) -> Tensor",
        reference,
        lambda weight: torch.empty_like(weight, memory_format=torch.channels_last),
    )


def lowerings() -> dict[Any, Any]:
    """The operator and what Inductor calls for it."""
    return {operator(): _lower}


def blocks(places: int) -> dict[str, int]:
    """Sizes of the kernel for weights of so many places: those numbers of each channel, and channels at once."""
    wide = 1 << (places - 1).bit_length()
    return {"PLACES": places, "WIDE": wide, "BLOCK": max(16, _NUMBERS // wide)}


def _lower(weight: Any) -> Any:
    """As `reference`, in Inductor's representation."""
    from torch._inductor.lowering import permute

    from . import triton_kernel as kernels

    weight = contiguous(weight)
    rows, channels, height, width = map(int, weight.get_size())
    laid = empty(weight, [rows, height, width, channels], weight.get_dtype())
    sizes = blocks(height * width)
    launch(
        kernels.lay_innermost,
        [-(-channels // sizes["BLOCK"]), rows, 1],
        ["laid"],
        {"weight": weight, "laid": laid, "channels": channels, **sizes},
    )
    return permute(laid, [0, 3, 1, 2])
