# SPDX-License-Identifier: Apache-2.0
"""Attention of heads of 72 or 80 numbers, which libraries compute as if they had 128.

Microseconds so and by torch's own choice, cuDNN (H200, torch 2.11, in a graph, 2026-11): 2 x 16 heads of 4096 tokens,
80 numbers in bfloat16 335 and 393; with two blocks in shared memory instead of three 72 numbers 348 and 396, and 32 x
16 heads of 1024 tokens in float16 400 and 437. The card is at its limit of power meanwhile (693 of 700 W, 1785 MHz).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..inductor_launch import empty, empty_result, launch
from ..layouts import aligned, laid_out, side_by_side, strides
from ..op_registry import registered_attention

WIDTHS = (72, 80)  # numbers of a head


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, order: Sequence[int]) -> torch.Tensor:
    """softmax(scale * q @ k.T) @ v for q (B, H, L, E), k and v (B, H, S, E), E in `WIDTHS`, as q is.

    order: of the result's dimensions in memory, the outermost first. scale: above 0. Raises ValueError for
    heads of other sizes.
    """
    _check(q, k, v)
    return laid_out(torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale), order)


def _check(*given: torch.Tensor) -> None:
    widths = [x.shape[-1] for x in given]
    if widths[0] not in WIDTHS or any(width != widths[0] for width in widths):
        known = " or ".join(map(str, WIDTHS))
        raise ValueError(f"heads of query, key and value have {widths} numbers; expected {known}, the same for each")


@functools.cache
def operator() -> Any:
    """The operator `nexfort::unpadded_attention`, as `reference` is."""
    return registered_attention("unpadded_attention", reference, _check)


def lowerings() -> dict[Any, Any]:
    """The operator and what Inductor calls for it."""
    return {operator(): _lower}


def _lower(q: Any, k: Any, v: Any, scale: float, order: Sequence[int]) -> Any:
    """As `reference`, in Inductor's representation."""
    from torch._inductor.runtime.hints import DeviceProperties

    from . import triton_kernel as kernels
    from .gluon_kernel import SCRATCH, attend_unpadded_in_groups

    q, k, v = (aligned(side_by_side(x)) for x in (q, k, v))
    batch, heads, queries, width = q.get_size()
    made, result = empty_result(q, order)
    programs = DeviceProperties.create(q.get_device()).multi_processor_count
    launch(
        kernels.attend_unpadded,
        [programs, 1, 1],
        ["out"],
        {"q": q, "k": k, "v": v, "out": made}
        | {"batch": batch, "heads": heads, "queries": queries, "keys": k.get_size()[2]}
        | {**strides(q, "qb", "qh", "ql"), **strides(k, "kb", "kh", "kn"), **strides(v, "vb", "vh", "vn")}
        | {**strides(result, "ob", "oh", "ol"), "scratch": empty(q, [programs * SCRATCH], torch.uint8)}
        | {"SCALE": scale, "E": int(width), "PROGRAMS": programs},
        attend_unpadded_in_groups,
    )
    return result
