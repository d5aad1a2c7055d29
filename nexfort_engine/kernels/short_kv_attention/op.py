# SPDX-License-Identifier: Apache-2.0
"""Attention to few keys, such as those of a prompt: scores and exponentials in fp32, products as they are given.

A program computes 64 queries of a head and goes through all of its keys, which are few enough for that to be over soon.
Microseconds so and by torch's own choice, cuDNN, which also has a memset before it (fp16, H200, torch 2.11, in a graph,
2026-11), for heads of 64: 2 x 20 heads of 1024 queries and 77 keys 7.2 and 10.9, 154 keys 9.8 and 15.3, 231 keys 13.0
and 14.8, 512 keys 23.5 and 20.4; 77 keys of 2 x 10 heads of 4096 queries 13.8 and 15.7, 2 x 5 of 9216 15.5 and 17.7,
2 x 10 of 2304 8.9 and 10.9, 2 x 20 of 576 5.2 and 8.8. Heads of 40, 72 and 128 were slower: 16.8 and 14.0, 66 and 30,
108 and 60.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..inductor_launch import empty_result, launch
from ..layouts import laid_out, side_by_side, strides
from ..op_registry import registered_attention

WIDTH = 64  # numbers of a head
QUERIES, KEYS = 64, 32  # of a program, and of a block that it looks at at once


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, order: Sequence[int]) -> torch.Tensor:
    """softmax(scale * q @ k.T) @ v for q (B, H, L, 64), k and v (B, H, S, 64), as q is.

    order: of the result's dimensions in memory, the outermost first. Raises ValueError for heads of other sizes.
    """
    _check(q, k, v)
    return laid_out(torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale), order)


def _check(*given: torch.Tensor) -> None:
    widths = [x.shape[-1] for x in given]
    if any(width != WIDTH for width in widths):
        raise ValueError(f"heads of query, key and value have {widths} numbers; expected {WIDTH} each")


@functools.cache
def operator() -> Any:
    """The operator `nexfort::few_keys_attention`, as `reference` is."""
    return registered_attention("few_keys_attention", reference, _check)


def lowerings() -> dict[Any, Any]:
    """The operator and what Inductor calls for it."""
    return {operator(): _lower}


def _lower(q: Any, k: Any, v: Any, scale: float, order: Sequence[int]) -> Any:
    """As `reference`, in Inductor's representation."""
    from torch.utils._sympy.functions import CeilDiv

    from . import triton_kernel as kernels

    q, k, v = (side_by_side(x) for x in (q, k, v))
    batch, heads, queries, _ = q.get_size()
    made, result = empty_result(q, order)
    # four warps and three stages are Triton's own: with those said Inductor would make a kernel for each call's sizes
    launch(
        kernels.attend_few,
        [CeilDiv(queries, QUERIES) * batch * heads, 1, 1],
        ["out"],
        {"q": q, "k": k, "v": v, "out": made, "queries": queries, "keys": k.get_size()[2], "heads": heads}
        | {**strides(q, "qb", "qh", "ql"), **strides(k, "kb", "kh", "kn"), **strides(v, "vb", "vh", "vn")}
        | {**strides(result, "ob", "oh", "ol"), "SCALE": scale, "E": WIDTH, "M": QUERIES, "N": KEYS},
    )
    return result
