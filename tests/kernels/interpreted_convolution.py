# SPDX-License-Identifier: Apache-2.0
"""The kernels in Triton's language beside torch's convolution; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools

import torch
from interpreting import some, with_bfloat16, with_numbers, with_rounding
from torch.nn.functional import conv2d, interpolate

from nexfort_engine.kernels.conv3x3 import op as conv3x3
from nexfort_engine.kernels.conv3x3 import triton_kernel as kernels

with_numbers()
with_bfloat16()
with_rounding()


def summed(weight: torch.Tensor) -> torch.Tensor:
    """What `sum_places` gives for a weight (N, 3, 3, C)."""
    columns, *_, channels = weight.shape
    sums = torch.full((4, columns, 2, 2, channels), float("nan"), dtype=weight.dtype)
    kernels.sum_places[(-(-channels // 48), columns)](weight, sums, columns, channels, BLOCK=64)
    return sums


def by_phases(weight: torch.Tensor) -> torch.Tensor:
    """The same, written as the definition has it: of an upsampled image's three lines, which two of the small one's."""
    lines = (torch.tensor([[1, 0, 0], [0, 1, 1]]), torch.tensor([[1, 1, 0], [0, 0, 1]]))
    each = [
        torch.einsum("ay,bx,nyxc->nabc", lines[down].double(), lines[across].double(), weight.double())
        for down, across in itertools.product(range(2), repeat=2)
    ]
    return torch.stack(each)


def check(
    sizes: tuple[int, int, int], channels: int, columns: int, biased: bool, side: int, dtype: torch.dtype
) -> None:
    images, height, width = sizes
    x = torch.randn(images, channels, height, width).to(dtype)
    weight = (torch.randn(columns, channels, 3, 3) * (9 * channels) ** -0.5).to(dtype)
    bias = torch.randn(columns).to(dtype) if biased else None
    scale = 1 if side == 3 else 2
    out = torch.full((images, scale * height, scale * width, columns), float("nan"), dtype=dtype)
    given, whole = (part.permute(0, 2, 3, 1).contiguous() for part in (x, weight))
    taken = whole if side == 3 else summed(whole)
    if side == 2:
        near = (taken.double() - by_phases(whole)).abs().max() / whole.double().abs().max()
        assert near < 4 * torch.finfo(dtype).eps, near
    blocks = {"N": columns, "R": 0, "STAGES": 3, "PROGRAMS": 3}
    kernels.convolve[(3,)](
        *(given, taken, whole if bias is None else bias, whole, out, *sizes, channels, columns, out),
        BIASED=biased, SIDE=side, **blocks,
    )  # fmt: skip
    seen = interpolate(x, scale_factor=scale, mode="nearest")
    plain = conv2d(seen, weight, bias, padding=1).double()
    truth = conv2d(seen.double(), weight.double(), bias if bias is None else bias.double(), padding=1)
    far, near = (out.permute(0, 3, 1, 2).double() - truth).norm(), (plain - truth).norm()
    # sums of weights are rounded as results are: two roundings of one size are 1.41 times as far as one
    assert far <= (1.1 if side == 3 else 1.6) * near, (sizes, channels, columns, side, dtype, far, near)


torch.manual_seed(0)
SIZES = [((1, 2, 1), 64, 64), ((2, 5, 7), 64, 64), ((1, 3, 11), 128, 32)]
for (sizes, channels, columns), biased, side, dtype in some(
    itertools.product(SIZES, (False, True), (3, 2), conv3x3.DTYPES)
):
    check(sizes, channels, columns, biased, side, dtype)
