# SPDX-License-Identifier: Apache-2.0
"""Convolutions of images, three by three places with stride 1, by a kernel where it is faster than cuDNN's.

No operator of its own: it takes the place of cuDNN's call where Inductor lowers a convolution whose images have
channels innermost, so that all that decides how images lie goes by the convolution still. An artefact serves images of
any size, and blocks of one structure at several, so each call decides by its own (`part_of`) who convolves.

Microseconds so and by cuDNN as torch calls it (fp16, H200, torch 2.11, in a graph, 2026-11-26), for two images, their
channels and side: 320 to 320 128 x 128 82 and 97, 96 x 96 67 and 77; 640 to 320 128 x 128 178 and 212; 640 to 640 64 x
64 84 and 111, 48 x 48 64 and 96; 1920 to 640 48 x 48 185 and 259; 1280 to 1280 32 x 32 88 and 100, 24 x 24 64 and 91;
2560 to 1280 24 x 24 127 and 173. Fewer results do not fill a card, where cuDNN divides sums too: 12 x 12, 1280 60 and
38. Of 128, 256 or 512 channels to as many, as in a VAE, cuDNN's are as fast: 512 x 512, 256 495 and 475.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..inductor_launch import Forms, empty, launch
from ..layouts import aligned, contiguous

DTYPES = (torch.float16, torch.bfloat16)
CHANNELS = 64  # of the images, a multiple of it
# Channels of a part by how many: in two products, and blocks in shared memory.
WIDTHS = {320: (256, 64, 3), 256: (256, 0, 4), 160: (128, 32, 5), 128: (128, 0, 6)}
_FLAGS = (  # benchmark, deterministic, TF32
    "torch.backends.cudnn.benchmark, "
    "torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(), False"
)
_CUDNN = (  # the call that torch's own convolution makes, for tensors that lie as the kernel's
    "torch.ops.aten.cudnn_convolution.out({seen}, {unread}.permute(0, 3, 1, 2), [1, 1], [1, 1], [1, 1], 1, "
    f"{_FLAGS}, out={{out}}.permute(0, 3, 1, 2))"
)
_BIAS = ".add_({bias}.view(-1, 1, 1))"


def widths(columns: int) -> tuple[int, ...]:
    """Which of WIDTHS parts may have for so many channels of the results: two at most, each is a kernel to compile."""
    for multiple, found in ((1280, (160, 128)), (640, (320, 128)), (320, (320, 160)), (256, (256,)), (128, (128,))):
        if columns % multiple == 0:
            return found
    return ()


def part_of(
    images: int, height: int, across: int, columns: int, phases: int, programs: int, widths: tuple[int, ...]
) -> int:
    """How many channels of the results parts of 8 x 16 pixels should have, one of `widths`; 0 where cuDNN is faster.

    height, across: of the images. phases: 4 of upsampled ones, 1 otherwise. programs: that a card runs at once. It is
    a count of rounds: in one each program computes a part, in the time of its channels and of 12 for begin and end.
    """
    tiles = images * -(-height // 8) * -(-across // 16)
    # cuDNN is faster where less than 6 of 10 multiplications are wanted; upsampled it has 9 where these are 4
    most = images * height * across * columns * phases / (128 * programs) / (0.6 if phases == 1 else 0.27)
    found = 0
    for width in widths:
        time = -(-tiles * phases * (columns // width) // programs) * (width + 12)
        if time < most:
            found, most = width, time
    return found


def lowering(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """What Inductor lowers `aten.convolution` with: by this kernel where it is fit, otherwise as it does (`theirs`)."""

    def lower(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, *rest: Any) -> Any:
        plain = [list(stride), list(padding), list(dilation), *rest] == [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
        if not plain or not _is_fit(x, weight):
            return theirs(x, weight, bias, stride, padding, dilation, *rest)
        from torch._inductor.lowering import add, view

        made = _lower(x, weight)
        # beside it, as `theirs` adds it: rounded once more, and part of what follows
        return made if bias is None else add(made, view(bias, [-1, 1, 1]))

    return lower


def _is_fit(x: Any, weight: Any) -> bool:
    """Whether the kernel takes a convolution, and is the faster one at some size."""
    from torch._inductor.virtualized import V

    if not V.graph.layout_opt or len(x.get_size()) != 4 or x.get_device().type != "cuda":
        return False
    if x.get_dtype() not in DTYPES or weight.get_dtype() != x.get_dtype():
        return False
    columns, channels, *places = V.graph.sizevars.guard_int_seq(weight.get_size())
    return places == [3, 3] and channels % CHANNELS == 0 and columns % 160 == 0 and bool(widths(columns))


def _lower(x: Any, weight: Any) -> Any:
    """The convolution (B, N, H, W), channels innermost, in Inductor's representation."""
    from torch._inductor.lowering import permute

    x, weight = innermost(x), innermost(weight)
    made = empty(x, [*x.get_size()[:3], weight.get_size()[0]], x.get_dtype())
    convolve(x, weight, weight, made, 3)
    return permute(made, [0, 3, 1, 2])


def convolve(
    x: Any,
    weight: Any,
    whole: Any,
    made: Any,
    side: int,
    bias: Any = None,
    seen: str = "{x}.permute(0, 3, 1, 2)",
    unless: str = "False",
    **given: Any,
) -> None:
    """Have the kernel write to `made` (B, H, W, N), or where it is slower, or `unless` holds, cuDNN.

    x (B, h, w, C), weight, side and bias: as `triton_kernel.convolve` takes them; whole (N, 3, 3, C). All
    contiguous. seen: what cuDNN convolves, in code; `unless` and `given`: as in Forms.
    """
    from torch._inductor.runtime.hints import DeviceProperties

    from . import triton_kernel as kernels
    from .gluon_kernel import SCRATCH, convolve_in_groups

    images, height, across, _ = x.get_size()
    channels = int(weight.get_size()[-1])
    columns, phases = int(made.get_size()[3]), 4 if side == 2 else 1
    programs = DeviceProperties.create(x.get_device()).multi_processor_count
    constants = {width: dict(zip(("N", "R", "STAGES"), WIDTHS[width], strict=True)) for width in widths(columns)}
    sizes = (images, height, across, columns, phases, programs, tuple(constants))
    forms = Forms(
        part_of, sizes, constants, (_CUDNN + (_BIAS if bias is not None else "")).replace("{seen}", seen), unless, given
    )
    launch(
        kernels.convolve,
        [programs, 1, 1],
        ["out"],
        {"x": x, "weight": weight, "bias": whole if bias is None else bias, "unread": whole, "out": made}
        | {"images": images, "height": height, "width": across, "channels": channels, "columns": columns}
        | {"scratch": empty(x, [programs * SCRATCH], torch.uint8), "PROGRAMS": programs}
        | {"BIASED": bias is not None, "SIDE": side}
        | next(iter(constants.values())),
        convolve_in_groups,
        forms,
    )


def innermost(x: Any) -> Any:
    """x (B, C, H, W) in memory as (B, H, W, C), where the card can copy it from."""
    from torch._inductor import ir
    from torch._inductor.lowering import permute

    x.realize()
    return aligned(contiguous(permute(ir.ExternKernel.require_channels_last(x), [0, 2, 3, 1])))
