# SPDX-License-Identifier: Apache-2.0
"""Convolutions of images, three by three places with stride 1, in the kernel that is faster than cuDNN's.

No operator of its own: it takes the place of cuDNN's call where Inductor lowers a convolution whose images have
channels innermost, so that all that decides how images lie goes by the convolution still.

Microseconds so, by cuDNN as torch calls it, and by the fastest of its algorithms (fp16, H200, torch 2.11, in a graph,
2026-11), for images, their sides and channels: 2 of 128 x 128, 320 to 320 84, 98 and 98, 960 to 320 237, 285 and 305;
2 of 64 x 64, 640 to 640 82, 117 and 101, 1920 to 640 234, 263 and 299; 2 of 32 x 32, 1280 to 1280 87, 110 and 90, 2560
to 1280 170, 174 and 174; 2 of 96 x 96, 320 67, 77 and 79; 2 of 48 x 48, 640 63, 92 and 92; 2 of 24 x 24, 1280 64, 90
and 90; a VAE's, 128 x 128, 512 102, 104 and 106; 512 x 512, 256 426, 448 and 482; 1024 x 1024, 128 480, 504 and 520.
Fewer results do not fill a card, where cuDNN divides sums too: 2 of 12 x 12, 1280 54 and 36.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from .launching import contiguous, descriptors_missing, empty, launch

log = logging.getLogger("nexfort")

MEASURED = ((9, 0),)  # compute capabilities of cards that have the kernel
DTYPES = (torch.float16, torch.bfloat16)
CHANNELS = 64  # of the images, a multiple of it
# Channels of a part by how many: in two products, and blocks in shared memory.
WIDTHS = {320: (256, 64, 3), 256: (256, 0, 4), 160: (128, 32, 5), 128: (128, 0, 6)}
_DOWN, _ACROSS = 8, 16  # results of a part
_BEGUN = 12  # channels that a part would compute in the time in which it begins and ends
_LEAST = 1 / 3  # of the card's multiplications that are wanted: with fewer cuDNN's is taken


def width(images: int, height: int, across: int, columns: int, programs: int) -> int | None:
    """How many channels of the results a part should have, one of WIDTHS; None where cuDNN is as fast or faster.

    programs: that a card runs at once.
    """
    tiles = images * math.ceil(height / _DOWN) * math.ceil(across / _ACROSS)
    found = {
        every: math.ceil(tiles * (columns // every) / programs) * (every + _BEGUN)
        for every in WIDTHS
        if columns % every == 0
    }
    if not found:
        return None
    best = min(found, key=lambda every: found[every])
    wanted = images * height * across * columns / (_DOWN * _ACROSS * programs)
    return best if wanted >= _LEAST * found[best] else None


def lowering(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """What Inductor lowers `aten.convolution` with: by this kernel where it is fit, otherwise as it does (`theirs`)."""

    def lower(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, *rest: Any) -> Any:
        plain = (list(stride), list(padding), list(dilation), *rest)
        if plain == ([1, 1], [1, 1], [1, 1], False, [0, 0], 1) and (every := _fit(x, weight, bias)):
            if (reason := descriptors_missing()) is None:
                return _lower(x, weight, bias, every)
            log.info("convolutions are cuDNN's: %s", reason)
        return theirs(x, weight, bias, stride, padding, dilation, *rest)

    return lower


def _fit(x: Any, weight: Any, bias: Any) -> int | None:
    """The channels of a part, or None where the kernel does not take a convolution."""
    from torch._inductor.virtualized import V

    values = [part for part in (x, weight, bias) if part is not None]
    if not V.graph.layout_opt or len(x.get_size()) != 4 or x.get_device().type != "cuda":
        return None
    if x.get_dtype() not in DTYPES or any(value.get_dtype() != x.get_dtype() for value in values):
        return None
    columns, channels, *places = V.graph.sizevars.guard_int_seq(weight.get_size())
    if places != [3, 3] or channels % CHANNELS:
        return None
    images, _, height, across = V.graph.sizevars.size_hints(x.get_size(), fallback=1)
    return width(images, height, across, columns, _programs(x))


def _programs(x: Any) -> int:
    from torch._inductor.runtime.hints import DeviceProperties

    return DeviceProperties.create(x.get_device()).multi_processor_count


def _lower(x: Any, weight: Any, bias: Any, every: int) -> Any:
    """The convolution with its bias (B, N, H, W), channels innermost, in Inductor's representation."""
    from torch._inductor.lowering import permute

    from . import triton_convolution as kernels
    from .gluon_convolution import SCRATCH, convolve_in_groups

    x, weight = (contiguous(permute(_innermost(part), [0, 2, 3, 1])) for part in (x, weight))
    images, height, across, channels = x.get_size()
    columns, programs = int(weight.get_size()[0]), _programs(x)
    n, rest, stages = WIDTHS[every]
    made = empty(x, [images, height, across, columns], x.get_dtype())
    launch(
        kernels.convolve,
        [programs, 1, 1],
        ["out"],
        {"x": x, "weight": weight, "bias": weight if bias is None else contiguous(bias), "out": made}
        | {"images": images, "height": height, "width": across}
        | {"scratch": empty(x, [programs * SCRATCH], torch.uint8), "BIASED": bias is not None}
        | {"CHANNELS": int(channels), "COLUMNS": columns, "N": n, "R": rest, "STAGES": stages, "PROGRAMS": programs},
        convolve_in_groups,
    )
    return permute(made, [0, 3, 1, 2])


def _innermost(x: Any) -> Any:
    """x in memory, its second dimension innermost, as Inductor's own convolution asks for it."""
    from torch._inductor import ir

    x.realize()
    return ir.ExternKernel.require_channels_last(x)
