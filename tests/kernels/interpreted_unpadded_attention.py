# SPDX-License-Identifier: Apache-2.0
"""The kernel that Inductor reads beside its reference; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools

import torch
from interpreting import with_bfloat16, with_numbers, with_rounding

from nexfort_engine.kernels.odd_head_dim_attention import op as odd_head_dim_attention
from nexfort_engine.kernels.odd_head_dim_attention.triton_kernel import attend_unpadded

PLAIN, BEHIND, OUTERMOST = (0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)  # heads before and behind tokens; tokens before all
Order = tuple[int, ...]


def empty(sizes: tuple[int, int, int], order: Order, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor (B, H, L, width) that lies so. Behind its tokens and heads is more, which is no numbers."""
    batch, heads, length = sizes
    whole = torch.empty_permuted((batch, heads, length + 3, width + 8), order, dtype=dtype).fill_(float("nan"))
    return whole[:, :, :length, :width]


def check(
    sizes: tuple[int, int, int, int], orders: tuple[Order, ...], width: int, dtype: torch.dtype, programs: int
) -> None:
    """orders: of the queries, of keys and values, and of the result."""
    batch, heads, queries, keys = sizes
    q, out = (empty((batch, heads, queries), order, width, dtype) for order in orders[::2])
    k, v = (empty((batch, heads, keys), orders[1], width, dtype) for _ in range(2))
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape))
    k *= torch.linspace(0.5, 2, keys)[:, None].to(dtype)  # the largest scores are not among the first
    attend_unpadded[(programs,)](
        q, k, v, out, batch, heads, queries, keys,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], None,
        SCALE=0.3, E=width, PROGRAMS=programs,
    )  # fmt: skip
    whole = out.as_strided((batch, heads, queries + 3, width + 8), out.stride())
    assert bool(whole[:, :, queries:].isnan().all() & whole[..., width:].isnan().all()), "more was written"
    with torch.backends.mkldnn.flags(enabled=False):  # torch 2.11 may refuse keys in bfloat16, see conftest.py
        plain = odd_head_dim_attention.reference(q, k, v, 0.3, PLAIN).double()
    truth = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.3)
    far, near = (out.double() - truth).norm(), (plain - truth).norm()
    assert far <= 1.1 * near, (sizes, orders, width, dtype, float(far), float(near))


with_numbers()
with_bfloat16()
with_rounding()
torch.manual_seed(0)
LAYOUTS = ((BEHIND, BEHIND, BEHIND), (PLAIN, BEHIND, OUTERMOST), (OUTERMOST, PLAIN, PLAIN))
SIZES = ((3, 3, 1, 77), (2, 3, 65, 1), (2, 2, 64, 128), (1, 2, 65, 231))
for (number, sizes), dtype in itertools.product(enumerate(SIZES), (torch.float16, torch.bfloat16)):
    check(sizes, LAYOUTS[number % 3], 72, dtype, programs=2)
    check(sizes, LAYOUTS[(number + 1) % 3], 80, dtype, programs=5)
