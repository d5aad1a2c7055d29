# SPDX-License-Identifier: Apache-2.0
"""The kernels beside their reference, on sizes and layouts of all kinds; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from interpreting import with_numbers, with_rounding

from nexfort_engine.kernels.low_precision_attention import op as low_precision_attention
from nexfort_engine.kernels.low_precision_attention import triton_kernel as kernels

with_numbers()
with_rounding()
KEYS, QUERIES = low_precision_attention.KEYS, low_precision_attention.QUERIES


def found(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    batch, heads, queries, e = q.shape
    keys, w = k.shape[2], low_precision_attention.width(e)
    blocks, rows = -(-keys // KEYS), batch * heads
    k8 = torch.full((rows, blocks, KEYS * w), 77, dtype=torch.int8)
    # memory that nobody wrote to is not a number
    v8 = torch.full((rows, blocks, KEYS * w), float("nan")).to(torch.float8_e4m3fn)
    scales = torch.full((2, rows, blocks), float("nan"))
    sizes = {"keys": keys, "blocks": blocks, "heads": heads, "E": e, "W": w, "N": KEYS}
    kernels.narrow_keys_values[(2 * blocks * rows,)](
        k, v, k8, v8, *scales, kb=k.stride(0), kh=k.stride(1), kn=k.stride(2),
        vb=v.stride(0), vh=v.stride(1), vn=v.stride(2), SAMPLE=64, **sizes,
    )  # fmt: skip
    out = torch.full((batch, queries, heads, e), float("nan"), dtype=q.dtype).transpose(1, 2)
    kernels.attend[(-(-queries // QUERIES) * rows,)](
        q, k8, v8, *scales, out, queries=queries, qb=q.stride(0), qh=q.stride(1), ql=q.stride(2),
        ob=out.stride(0), oh=out.stride(1), ol=out.stride(2), SCALE=scale, M=QUERIES, **sizes,
    )  # fmt: skip
    return out


def check(batch: int, heads: int, queries: int, keys: int, e: int, dtype: torch.dtype) -> None:
    joined = torch.randn(batch, keys, 2, heads, e)  # keys and values as parts of one tensor
    joined[:, :, 0] += torch.randn(heads, e) * 3  # what all keys have in common
    joined[:, :, 1, 0] *= 1e-3  # small values, and with some far larger ones
    joined[:, ::50, 1, -1] *= 100
    k, v = joined.to(dtype).permute(2, 0, 3, 1, 4)
    q = torch.randn(batch, heads, queries, e).to(dtype)
    truth = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.2)
    ours = found(q, k, v, 0.2)
    assert ours.dtype == dtype and bool(ours.isfinite().all())
    plain = low_precision_attention.reference(q, k, v, 0.2, (0, 1, 2, 3))
    for head in range(heads):
        one, other, right = (x[:, head].double() for x in (ours, plain, truth))
        far, near = ((x - right).norm() / right.norm() for x in (one, other))
        # the exponentials are rounded relative to the largest until then, here to the largest of all
        assert far <= 1.15 * near + 2e-3, (batch, heads, queries, keys, e, dtype, head, float(far), float(near))
        assert near < 0.06, (head, float(near))


torch.manual_seed(0)
for case in (
    (1, 2, 64, 128, 64, torch.float16),
    (2, 1, 70, 300, 64, torch.bfloat16),
    (1, 2, 5, 7, 72, torch.float16),
    (1, 1, 130, 257, 128, torch.bfloat16),
    (2, 2, 1, 129, 40, torch.float16),
):
    check(*case)
