# SPDX-License-Identifier: Apache-2.0
"""Attention in 8 bits by the kernel for compute capability 9.0, launched by Triton itself. No test here."""

from __future__ import annotations

import torch

from nexfort_engine.kernels.low_precision_attention import gluon_kernel
from nexfort_engine.kernels.low_precision_attention import op as low_precision_attention
from nexfort_engine.kernels.low_precision_attention import triton_kernel as kernels


def found(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """As `narrow_attention.reference`, of tensors on such a card."""
    n, m = low_precision_attention.KEYS, low_precision_attention.QUERIES_IN_GROUPS
    (batch, heads, queries, e), keys = q.shape, k.shape[2]
    w, blocks, rows = low_precision_attention.width(e), -(-keys // n), batch * heads
    k8, v8 = (torch.empty(rows, blocks, n * w, dtype=t, device="cuda") for t in (torch.int8, torch.float8_e4m3fn))
    scales = torch.empty(2, rows, blocks, device="cuda")
    kernels.narrow_keys_values[(2 * blocks * rows,)](
        k, v, k8, v8, *scales, keys, blocks, heads, *k.stride()[:3], *v.stride()[:3], E=e, W=w, N=n, SAMPLE=64
    )
    out = torch.empty_like(q)
    gluon_kernel.attend_in_groups[(-(-queries // m) * rows,)](
        q, k8, v8, *scales, out, queries, keys, blocks, heads, *q.stride()[:3], *out.stride()[:3],
        SCALE=scale, E=e, W=w, M=m, N=n, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
