# SPDX-License-Identifier: Apache-2.0
"""The kernels beside their reference, on images of odd sizes and layouts; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools

import torch
from interpreting import some, with_numbers

from nexfort_engine.kernels.group_norm_scale import op as group_norm_scale
from nexfort_engine.kernels.group_norm_scale import triton_kernel as kernels

Given = tuple[torch.Tensor | None, ...]


with_numbers()


def found(x: torch.Tensor, given: Given, groups: int, chunks: int) -> torch.Tensor:
    batch, channels, *rest = x.shape
    places = torch.Size(rest).numel()
    inner = x.stride(1) == 1
    block = group_norm_scale._INNER if inner else group_norm_scale._OUTER
    # memory that nobody wrote to is not a number
    moments = torch.full((batch, chunks, 2, channels), float("nan"))
    factors = torch.full((batch, 2, channels), float("nan"))
    chunk = -(-places // (16 * chunks)) * 16
    kernels.moments_of_chunks[(-(-channels // block["C_BLOCK"]), chunks, batch)](
        x, moments, channels, places, chunk, x.stride(0), x.stride(1), x.stride(-1), CHUNKS=chunks, **block
    )
    blocks = group_norm_scale._blocks(channels // groups, chunks)
    kernels.factors_of_groups[(batch * groups,)](
        moments, *given, factors, channels, places, chunk,
        EPS=1e-5, GROUPS=groups, EACH=channels // groups, CHUNKS=chunks, **blocks,
    )  # fmt: skip
    return factors


def check(shape: tuple[int, ...], groups: int, chunks: int, dtype: torch.dtype, last: bool, apart: float) -> None:
    x = (torch.randn(shape) * torch.rand(shape[1]).reshape(-1, *[1] * (len(shape) - 2)) + apart).to(dtype)
    x[0, 0].reshape(-1)[0] = apart + 200  # one number far from the others, where a chunk begins
    if last:
        x = x.to(memory_format=torch.channels_last)
    weight, bias, offset = torch.randn(3, shape[1]).to(dtype)
    offsets = torch.randn(shape[:2]).to(dtype)
    for w, b, *added in ((weight, bias, offset, offsets), (None, None, None, None), (weight, None, offset, None)):
        ours = found(x, (w, b, *added), groups, chunks).double()
        plain = group_norm_scale.reference(x, w, b, groups, 1e-5, *added).double()
        truth = group_norm_scale.reference(x.double(), w, b, groups, 1e-5, *added, torch.float64)
        far, near = (ours - truth).norm(), (plain - truth).norm()
        assert far <= 1.1 * near + 3e-6 * truth.norm(), (shape, groups, chunks, dtype, far, near)


torch.manual_seed(0)
shapes = [((2, 64, 9, 7), 8), ((1, 70, 33, 5), 7), ((3, 6, 1, 1), 2), ((2, 24, 600), 3), ((1, 96, 16, 41), 3)]
parts = ((1, torch.float16), (3, torch.bfloat16), (5, torch.float32))
for (shape, groups), last, (chunks, dtype) in some(
    case for case in itertools.product(shapes, (False, True), parts) if len(case[0][0]) == 4 or not case[1]
):
    check(shape, groups, chunks, dtype, last, apart=5.0)
