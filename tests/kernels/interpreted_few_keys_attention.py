# SPDX-License-Identifier: Apache-2.0
"""The kernel beside its reference, on sizes and layouts of all kinds; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools

import torch
from interpreting import some, with_bfloat16, with_numbers, with_rounding

from nexfort_engine.kernels.short_kv_attention import op as short_kv_attention
from nexfort_engine.kernels.short_kv_attention.op import KEYS, QUERIES, WIDTH
from nexfort_engine.kernels.short_kv_attention.triton_kernel import attend_few

PLAIN, BEHIND, OUTERMOST = (0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)  # heads before and behind tokens; tokens before all
Order = tuple[int, ...]


def empty(sizes: tuple[int, int, int], order: Order, parts: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors (B, H, L, WIDTH) side by side in one that lies so. Behind its tokens are more, which are no numbers."""
    batch, heads, length = sizes
    whole = torch.empty_permuted((batch, heads, length + 3, WIDTH * parts), order, dtype=dtype).fill_(float("nan"))
    return list(whole[:, :, :length].chunk(parts, -1))


def check(
    sizes: tuple[int, int, int, int], orders: tuple[Order, ...], scale: float, dtype: torch.dtype, shared: bool
) -> None:
    """orders: of the queries, of keys and values, and of the result. shared: all heads have the same keys.

    Otherwise those and the values are parts of one tensor.
    """
    batch, heads, queries, keys = sizes
    (q,) = empty((batch, heads, queries), orders[0], 1, dtype)
    k, v = empty((batch, heads, keys), orders[1], 2, dtype)
    if shared:
        (k,) = empty((batch, 1, keys), orders[0], 1, dtype)
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape))
    k *= torch.linspace(0.5, 2, keys)[:, None].to(dtype)  # the largest scores are not among the first
    k = k.expand(-1, heads, -1, -1)
    (out,) = empty((batch, heads, queries), orders[2], 1, dtype)
    attend_few[(-(-queries // QUERIES) * batch * heads,)](
        q, k, v, out, queries, keys, heads, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        SCALE=scale, E=WIDTH, M=QUERIES, N=KEYS,
    )  # fmt: skip
    whole = out.as_strided((batch, heads, queries + 3, WIDTH), out.stride())
    assert bool(whole[:, :, queries:].isnan().all()), "what is behind the queries was written to"
    with torch.backends.mkldnn.flags(enabled=False):  # torch 2.11 may refuse keys in bfloat16, see conftest.py
        plain = short_kv_attention.reference(q, k, v, scale, PLAIN).double()
    truth = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    far, near = (out.double() - truth).norm(), (plain - truth).norm()
    assert far <= 1.1 * near, (sizes, orders, scale, dtype, float(far), float(near))


with_numbers()
with_bfloat16()
with_rounding()
torch.manual_seed(0)
LAYOUTS = ((BEHIND, BEHIND, BEHIND), (PLAIN, BEHIND, OUTERMOST), (OUTERMOST, PLAIN, PLAIN))
SIZES = ((3, 7, 1, 77), (2, 3, 65, 1), (2, 2, 64, 128), (1, 2, 65, 231), (2, 1, 130, 32))
for (number, sizes), dtype, shared in some(
    itertools.product(enumerate(SIZES), (torch.float16, torch.bfloat16), (False, True))
):
    check(sizes, LAYOUTS[(number + shared) % 3], 0.5 if shared else 0.125, dtype, shared)
