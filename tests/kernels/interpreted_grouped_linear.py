# SPDX-License-Identifier: Apache-2.0
"""The kernel beside its reference, for odd numbers of rows and of weights; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools

import torch
from interpreting import with_bfloat16, with_numbers, with_rounding

from nexfort_engine.kernels.grouped_gemm import op as grouped_gemm
from nexfort_engine.kernels.grouped_gemm import triton_kernel as kernels

with_numbers()
with_bfloat16()
with_rounding()


def check(rows: int, count: int, columns: int, inner: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, inner).to(dtype)
    weights = [torch.randn(columns, inner).to(dtype) for _ in range(count)]
    out = torch.full((count, rows, columns), float("nan"), dtype=dtype)
    blocks = grouped_gemm.blocks(count, columns, inner)
    given = [*weights, *weights[:1] * (grouped_gemm.MOST - count)]
    grid = -(-rows // blocks["M_BLOCK"]) * (columns // blocks["N_BLOCK"]) * count
    kernels.multiply_rows[(grid,)](x, *given, out, rows, P=count, COLUMNS=columns, INNER=inner, **blocks)
    plain = torch.stack(grouped_gemm.reference(x, weights)).double()
    truth = torch.stack([x.double() @ weight.double().T for weight in weights])
    far, near = (out.double() - truth).norm(), (plain - truth).norm()
    assert far <= 1.1 * near, (rows, count, columns, inner, dtype, far, near)


torch.manual_seed(0)
for (rows, count, columns, inner), dtype in itertools.product(
    [(1, 2, 64, 256), (77, 3, 128, 192), (154, 5, 64, 192), (65, grouped_gemm.MOST, 512, 64)], grouped_gemm.DTYPES
):
    check(rows, count, columns, inner, dtype)
