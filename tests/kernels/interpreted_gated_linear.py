# SPDX-License-Identifier: Apache-2.0
"""The kernel in Triton's language beside its reference, for odd numbers of rows; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools

import torch
from interpreting import with_bfloat16, with_numbers, with_rounding

from nexfort_engine.kernels.geglu_linear import fp8_op as geglu_linear_fp8
from nexfort_engine.kernels.geglu_linear import op as geglu_linear
from nexfort_engine.kernels.geglu_linear import triton_kernel as kernels
from nexfort_engine.quant.matmul import FP8, narrowed

with_numbers()
with_bfloat16()
with_rounding()


def check(rows: int, columns: int, inner: int, biased: bool, dtype: torch.dtype, narrow: bool) -> None:
    x, weight = (torch.randn(size, inner).to(dtype) for size in (rows, 2 * columns))
    weight, bias = weight * inner**-0.5, torch.randn(2 * columns).to(dtype) if biased else None
    out = torch.full((rows, columns), float("nan"), dtype=dtype)
    scales = [torch.ones(()), torch.ones(())]
    if narrow:
        (x, scales[0]), (weight, scales[1]) = narrowed(x, FP8), narrowed(weight, FP8)
        plain = geglu_linear_fp8.reference(x, weight, *scales, bias, dtype).double()
    else:
        plain = geglu_linear.reference(x, weight, bias).double()
    given = weight if bias is None else bias
    options = {"BIASED": biased, "SCALED": narrow, "COLUMNS": columns, "INNER": inner, "PROGRAMS": 3}
    kernels.multiply_gated[(3,)](x, weight, given, *scales, out, rows, out, **options)
    factors = [factor.double() * scale.double() for factor, scale in zip((x, weight), scales, strict=True)]
    truth = geglu_linear.reference(*factors, None if bias is None else bias.double())
    far, near = (out.double() - truth).norm(), (plain - truth).norm()
    assert far <= 1.1 * near, (rows, columns, inner, biased, dtype, narrow, far, near)


torch.manual_seed(0)
for (rows, columns, inner), *options in itertools.product(
    [(1, 128, 64), (65, 128, 192), (130, 256, 64)], (False, True), geglu_linear.DTYPES, (False, True)
):
    check(rows, columns, inner, *options)
