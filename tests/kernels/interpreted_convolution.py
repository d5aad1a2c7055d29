# SPDX-License-Identifier: Apache-2.0
"""The kernel in Triton's language beside torch's convolution; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools

import torch
from interpreting import with_bfloat16, with_numbers

from nexfort_engine.kernels import convolution
from nexfort_engine.kernels import triton_convolution as kernels

with_numbers()
with_bfloat16()


def check(sizes: tuple[int, int, int], channels: int, columns: int, biased: bool, dtype: torch.dtype) -> None:
    images, height, width = sizes
    x = torch.randn(images, channels, height, width).to(dtype)
    weight = (torch.randn(columns, channels, 3, 3) * (9 * channels) ** -0.5).to(dtype)
    bias = torch.randn(columns).to(dtype) if biased else None
    out = torch.full((images, height, width, columns), float("nan"), dtype=dtype)
    laid = [part.permute(0, 2, 3, 1).contiguous() for part in (x, weight)]
    blocks = {"N": columns, "R": 0, "STAGES": 3, "PROGRAMS": 3}
    kernels.convolve[(3,)](
        *laid, laid[1] if bias is None else bias, out, *sizes, out, BIASED=biased, CHANNELS=channels, COLUMNS=columns,
        **blocks,
    )  # fmt: skip
    plain = torch.nn.functional.conv2d(x, weight, bias, padding=1).double()
    truth = torch.nn.functional.conv2d(x.double(), weight.double(), bias if bias is None else bias.double(), padding=1)
    far, near = (out.permute(0, 3, 1, 2).double() - truth).norm(), (plain - truth).norm()
    # Triton's interpreter cuts fp32 off to bfloat16 where a card rounds
    assert far <= (1.1 if dtype == torch.float16 else 2.2) * near, (sizes, channels, columns, dtype, far, near)


torch.manual_seed(0)
for (sizes, channels, columns), biased, dtype in itertools.product(
    [((1, 2, 1), 64, 512), ((2, 5, 7), 64, 64), ((1, 3, 11), 128, 32)], (False, True), convolution.DTYPES
):
    check(sizes, channels, columns, biased, dtype)
