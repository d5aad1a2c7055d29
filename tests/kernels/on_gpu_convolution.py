# SPDX-License-Identifier: Apache-2.0
"""Convolutions by each form of the kernel for compute capability 9.0, launched by Triton itself. No test here."""

from __future__ import annotations

import torch
import triton

from nexfort_engine.kernels.conv3x3.gluon_kernel import convolve_in_groups
from nexfort_engine.kernels.conv3x3.op import WIDTHS
from nexfort_engine.kernels.conv3x3.triton_kernel import sum_places


def found(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, side: int, width: int) -> torch.Tensor:
    """The convolution (B, N, H, W) of x (B, C, H, W), of its double if side is 2, in parts of so many channels."""
    images, channels, height, across = x.shape
    columns, (n, rest, stages) = weight.shape[0], WIDTHS[width]
    given, whole = (part.permute(0, 2, 3, 1).contiguous() for part in (x, weight))
    scale, taken = 1, whole
    if side == 2:
        scale, taken = 2, torch.full((4, columns, 2, 2, channels), float("nan"), dtype=x.dtype, device="cuda")
        sum_places[(-(-channels // 256), columns)](whole, taken, columns, channels, BLOCK=256)
    out = torch.full((images, scale * height, scale * across, columns), float("nan"), dtype=x.dtype, device="cuda")
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device="cuda"))
    convolve_in_groups[(132,)](
        *(given, taken, whole if bias is None else bias, whole, out, images, height, across, channels, columns, None),
        BIASED=bias is not None, SIDE=side, N=n, R=rest, STAGES=stages, PROGRAMS=132, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)
