# SPDX-License-Identifier: Apache-2.0
"""Low precision: attention in int8 and fp8 where that pays, torch's operator -> `nexfort::narrow_attention` (kernels/).

The cost of attention grows with queries times keys, that of bringing keys and values to 8 bits with keys alone: what
has few stays as it is. `plan` says which, and why not.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph.fx_builder import fixed
from ..graph.sizes import hint
from ..kernels.low_precision_attention import op as kernel
from ..quant.cost_model import H200
from .attention_match import HALVES, Attention, attentions, put_kernel

# By the numbers a head (H200, torch 2.11, 2026-11): operations a second of torch's own choice, and of the narrow kernel
# seconds for each block of keys and for each program. Heads of 72 and 80, taken for 128, were slower.
_HALF = {64: 455e12, 128: 650e12}
_BLOCK = {64: 0.85e-6, 128: 1.06e-6}
_PROGRAM = {64: 4.7e-6, 128: 7.5e-6}
_AT_ONCE = 132  # programs
_PREPARED = 2.8e12  # bytes a second, keys and values read in two bytes a number and written in one
_LEAST = 0.05  # of the time it takes: sizes and cards differ by less


@dataclass(frozen=True)
class Seen:
    """One attention of a graph at the captured call. heads: of all rows. reason: why it is not in 8 bits."""

    attention: Attention
    heads: int
    queries: int
    keys: int
    width: int
    reason: str | None = None


def plan(module: GraphModule) -> list[Seen]:
    """All attention of a captured graph, with a reason for that which stays as it is."""
    return [_seen(attention) for attention in attentions(module)]


def describe_plan(module: GraphModule) -> list[dict[str, Any]]:
    """The plan for people, as JSON: {"heads", "queries", "keys", "width", "reason", "count"}, those alike in one line.

    The sizes are those of the captured call. reason: why they stay as they are; None: they are computed in 8 bits.
    """
    alike = Counter((s.heads, s.queries, s.keys, s.width, s.reason) for s in plan(module))
    names = ("heads", "queries", "keys", "width", "reason", "count")
    return [dict(zip(names, (*key, n), strict=True)) for key, n in alike.items()]


def narrow_attentions(module: GraphModule) -> int:
    """Compute the attention of the plan in int8 and fp8; gives how many."""
    chosen = [seen for seen in plan(module) if seen.reason is None]
    for seen in chosen:
        put_kernel(seen.attention, kernel.operator(), seen.width)
    return len(chosen)


def _seen(attention: Attention) -> Seen:
    q, k, _ = attention.values
    sizes = [hint(size) for size in (*q.shape, k.shape[2])]
    if None in sizes or attention.order is None:
        return Seen(attention, 0, 0, 0, 0, "a size is not known before the call")
    if attention.order[-1] != 3:
        return Seen(attention, 0, 0, 0, 0, "the numbers of a head of its result do not lie side by side")
    batch, heads, queries, width, keys = (size or 0 for size in sizes)
    reason = _unfit(attention)
    if reason is None and (part := gain(batch * heads, queries, keys, width)) < _LEAST:
        reason = f"it would take as long or longer (estimated gain: {part:.0%})"
    return Seen(attention, batch * heads, queries, keys, width, reason)


def _unfit(attention: Attention) -> str | None:
    q, k, v = attention.values
    width = fixed(q.shape[-1])
    if q.device.type != "cuda":
        return f"it is computed on {q.device.type}; expected a GPU"
    if not attention.is_plain:
        return "it has a mask, or heads that share keys"
    if q.dtype not in HALVES or not q.dtype == k.dtype == v.dtype:
        return f"it is computed in {q.dtype}; expected float16 or bfloat16"
    if width not in _HALF or fixed(v.shape[-1]) != width:
        known = " or ".join(map(str, _HALF))
        return f"heads of {q.shape[-1]} and {v.shape[-1]} numbers; expected {known} for both, which were measured"
    if not all(statically_known_true(q.shape[i] == x.shape[i]) for x in (k, v) for i in (0, 1)):
        return "keys are shared by queries of several rows"
    if not attention.keeps_order(width):
        return f"its scores are multiplied by {attention.factor(width)}; expected a number above 0"
    return None


def gain(heads: int, queries: int, keys: int, width: int) -> float:
    """The part of its time that attention is estimated to save in 8 bits. Negative: it loses."""
    half = 4.0 * heads * queries * keys * width / _HALF[width]
    rounds = math.ceil(heads * math.ceil(queries / kernel.QUERIES_IN_GROUPS) / _AT_ONCE)
    narrow = rounds * (math.ceil(keys / kernel.KEYS) * _BLOCK[width] + _PROGRAM[width])
    prepared = heads * keys * 2 * width * 3.0 / _PREPARED + H200.kernel
    return 1 - (narrow + prepared) / half
