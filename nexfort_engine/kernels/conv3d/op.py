# SPDX-License-Identifier: Apache-2.0
"""A convolution of a video with channels innermost by torch's own kernel, which is cuDNN's on NVIDIA GPUs.

Inductor has torch's operator take and give videos with channels outermost, because torch's rule for its result without
numbers knows images alone (torch 2.11). So this one takes and gives tensors without gaps, in the order in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

INNERMOST, SECOND = [0, 2, 3, 4, 1], [0, 4, 1, 2, 3]  # where channels are


def convolve(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """x (N, T, H, W, I) convolved with weight (O, t, h, w, I) of its dtype, as (N, T', H', W', O).

    All lie without gaps. The rest as torch.nn.functional.conv3d takes it. Raises what that raises.
    """
    by_frames = (stride[0], padding[0], dilation[0]) == (1, 0, 1)
    if by_frames and weight.shape[1] == 1 <= x.shape[1]:  # images, one after another
        each = x.flatten(0, 1).permute(0, 3, 1, 2), weight.squeeze(1).permute(0, 3, 1, 2)
        images = torch.ops.aten.convolution.default(
            *each, None, stride[1:], padding[1:], dilation[1:], False, [0, 0], 1
        )
        return images.permute(0, 2, 3, 1).contiguous().unflatten(0, x.shape[:2])
    given = x.permute(SECOND), weight.permute(SECOND)
    found = torch.ops.aten.convolution.default(*given, None, stride, padding, dilation, False, [0, 0, 0], 1)
    return found.permute(INNERMOST).contiguous()


def _fake(x: Any, weight: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Any:
    sizes = [
        (size + 2 * around - apart * (wide - 1) - 1) // step + 1
        for size, wide, step, around, apart in zip(
            x.shape[1:4], weight.shape[1:4], stride, padding, dilation, strict=True
        )
    ]
    return x.new_empty((x.shape[0], *sizes, weight.shape[0]))


_libraries: list[torch.library.Library] = []  # an operator goes with its library


@functools.cache
def operator() -> Any:
    """The operator `nexfort::conv3d`, as `convolve` is. What loads code that calls it asks for it first."""
    library = torch.library.Library("nexfort", "FRAGMENT")
    library.define(
        "conv3d(Tensor x, Tensor weight, int[3] stride, int[3] padding, int[3] dilation) -> Tensor",
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    library.impl("conv3d", convolve, "CompositeExplicitAutograd")
    library.impl("conv3d", _fake, "Meta")  # register_fake looks for its caller's file, a quarter second
    _libraries.append(library)
    return torch.ops.nexfort.conv3d.default
