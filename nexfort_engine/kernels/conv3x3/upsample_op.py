# SPDX-License-Identifier: Apache-2.0
"""Convolutions of images that were upsampled to the double, without those in memory and with 4 of 9 multiplications.

Of three by three places of such an image two lines and two columns, or one, are the same pixel, so their weights can be
added first (sub-pixel convolution; Shi et al., 2016): the results, by the parity of their line and column, are four
convolutions of the small image with two by two places. The sums of weights are rounded to the weights' dtype; one
convolution is then 1.41 times as far from the truth as with them apart, as if its result were rounded twice.

Microseconds so, and by cuDNN from the upsampled image on (fp16, H200, torch 2.11, in a graph, 2026-11-26): 2 of 32 x
32, 1280 to 1280 channels 157 and 328; 2 of 64 x 64, 640 164 and 343; 2 of 12 x 12, 1280 43 and 112; 2 of 24 x 24 121
and 191; 2 of 48 x 48, 640 97 and 197; 256 x 256, 512 894 and 1836; 512 x 512, 256 953 and 1963.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..inductor_launch import empty, launch
from ..layouts import contiguous
from ..op_registry import registered
from .op import convolve, innermost

_BLOCK = 256  # channels of a program that adds weights


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, height: int, width: int
) -> torch.Tensor:
    """The convolution (B, N, height, width) of x (B, C, h, w), upsampled to these sizes by its nearest pixels.

    weight (N, C, 3, 3) and bias (N), with stride 1 and one line of zeros around. The result's channels lie innermost.
    """
    upsampled = torch.nn.functional.interpolate(x, size=(height, width), mode="nearest")
    made = torch.nn.functional.conv2d(upsampled, weight, bias, padding=1)
    return made.contiguous(memory_format=torch.channels_last)


def _empty(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, height: int, width: int) -> torch.Tensor:
    sizes = [x.shape[0], weight.shape[0], height, width]
    return torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@functools.cache
def operator() -> Any:
    """The operator `nexfort::upsampled_convolution`, as `reference` is."""
    schema = "upsampled_convolution(Tensor x, Tensor weight, Tensor? bias, SymInt height, SymInt width) -> Tensor"
    return registered(schema, reference, _empty)


def lowerings() -> dict[Any, Any]:
    """The operator and what Inductor calls for it."""
    return {operator(): _lower}


def _lower(x: Any, weight: Any, bias: Any, height: Any, width: Any) -> Any:
    """As `reference`, in Inductor's representation. Sizes that are no double are cuDNN's, of an upsampled image."""
    from torch._inductor.lowering import permute

    from . import triton_kernel as kernels

    x, weight = innermost(x), innermost(weight)
    images, (columns, *_, channels) = x.get_size()[0], map(int, weight.get_size())
    sums = empty(x, [4, columns, 2, 2, channels], x.get_dtype())
    launch(
        kernels.sum_places,
        [-(-channels // _BLOCK), columns, 1],
        ["sums"],
        {"weight": weight, "sums": sums, "rows": columns, "channels": channels, "BLOCK": _BLOCK},
    )
    made = empty(x, [images, height, width, columns], x.get_dtype())
    convolve(
        *(x, sums, weight, made, 2, None if bias is None else contiguous(bias)),
        "torch.ops.aten.upsample_nearest2d.default({x}.permute(0, 3, 1, 2), [{tall}, {wide}])",
        "({tall}, {wide}) != (2 * {height}, 2 * {width})",
        tall=height,
        wide=width,
    )
    return permute(made, [0, 3, 1, 2])
