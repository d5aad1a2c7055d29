# SPDX-License-Identifier: Apache-2.0
"""Attention of more numbers a head than the fast kernels take, as products of some queries at a time.

The decoders and encoders of pictures have one: 512 numbers and one head, 384 in Wan's. Above 256 torch is left with its
memory-efficient kernel.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Proxy
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.proxy import GraphAppendingTracer

from .attending import HALVES, Attention, attentions
from .writing import fixed, replace

aten = torch.ops.aten
_MOST = 256  # numbers a head that FlashAttention takes; cuDNN takes no more either
# Of the queries. The scores of one part are in memory at a time, in fp32 and in 16 bits: 0.1 GB for a picture of
# 1024x1024, 1.6 for 2048x2048, which is less than what decoding it holds at its end.
PARTS = 16


def wide_attentions(module: GraphModule) -> int:
    """Write attention of wide heads as `in_parts`, on a GPU and in 16 bits; gives how many.

    Those stay that have a mask, drop out, are causal or share keys between heads.
    """
    found = 0
    for given in attentions(module):
        if not _fits(given):
            continue
        tracer = GraphAppendingTracer(module.graph)
        tensors = [Proxy(part, tracer) for part in (given.query, given.key, given.value)]
        with module.graph.inserting_before(given.node):
            written = in_parts(*tensors, like=given.values[0], scale=given.scale)
        replace(given.node, written)
        found += 1
    return found


def in_parts(q: Any, k: Any, v: Any, *, like: torch.Tensor, scale: float | None = None) -> Any:
    """softmax(scale * q @ k.T) @ v for q (B, H, L, E), k (B, H, S, E) and v (B, H, S, F); scale: 1 / sqrt(E) if None.

    like: as q is. Scores are in fp32, as in the kernels that never put them in memory; what multiplies v is in q's
    dtype there too.
    """
    width = fixed(like.shape[-1])
    assert width is not None, "its numbers a head are any"
    factor = 1 / math.sqrt(width) if scale is None else scale
    queries, keys, values = (aten.flatten.using_ints(x, 0, 1) for x in (q, k, v))
    across = aten.transpose.int(keys, 1, 2)
    rows = aten.sym_size.int(q, 2)
    each = operator.floordiv(rows, PARTS)
    found = []
    for i in range(PARTS):
        begin = operator.mul(each, i)
        end = rows if i + 1 == PARTS else operator.mul(each, i + 1)
        scores = aten.mul.Tensor(_product_in_fp32(aten.slice.Tensor(queries, 1, begin, end), across, like), factor)
        found.append(aten.bmm.default(aten.to.dtype(aten.softmax.int(scores, -1), like.dtype), values))
    return aten.reshape.default(aten.cat.default(found, 1), [*_sizes(q, like), rows, aten.sym_size.int(v, 3)])


def _product_in_fp32(a: Any, b: Any, like: torch.Tensor) -> Any:
    if like.device.type == "cuda":
        return aten.bmm.dtype(a, b, torch.float32)
    return aten.bmm.default(aten.to.dtype(a, torch.float32), aten.to.dtype(b, torch.float32))


def _sizes(q: Any, like: torch.Tensor) -> list[Any]:
    return [aten.sym_size.int(q, i) if fixed(like.shape[i]) is None else fixed(like.shape[i]) for i in (0, 1)]


def _fits(given: Attention) -> bool:
    q, k, v = given.values
    if not given.is_plain or q.device.type != "cuda" or torch.version.hip is not None or q.dtype not in HALVES:
        return False
    width = fixed(q.shape[-1])
    if width is None or width <= _MOST or fixed(v.shape[-1]) is None:
        return False
    return all(statically_known_true(q.shape[i] == x.shape[i]) for x in (k, v) for i in (0, 1))
