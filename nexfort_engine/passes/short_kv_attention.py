# SPDX-License-Identifier: Apache-2.0
"""Attention to few keys, such as those of a prompt: torch's operator -> `nexfort::few_keys_attention` (kernels/).

A prompt is told from an image, which may have few tokens in one call and many in the next, by its length, which has
nothing to do with how many queries there are.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_symbols

from ..graph.fx_builder import fixed
from ..graph.sizes import hint
from ..kernels.short_kv_attention import op as kernel
from .attention_match import Attention, attentions, plain_width, put_kernel

FEW = 256  # keys at the captured call; of 512 torch's own choice is faster
_DEVICE = "cuda"  # elsewhere the operator is torch's


def few_keys_attentions(module: GraphModule) -> int:
    """Compute attention to few keys by the kernel that is for it; gives how many.

    Not where every token looks at all others, whose number is an image's.
    """
    found = 0
    for given in attentions(module):
        if not _fits(given):
            continue
        put_kernel(given, kernel.operator(), kernel.WIDTH)
        found += 1
    return found


def _fits(given: Attention) -> bool:
    """Whether the kernel takes an attention, and is the faster one."""
    if plain_width(given, _DEVICE) != kernel.WIDTH:
        return False
    q, k, _ = given.values
    keys = hint(k.shape[2])
    return keys is not None and 1 <= keys <= FEW and _are_apart(q.shape[2], k.shape[2])


def _are_apart(queries: Any, keys: Any) -> bool:
    """Whether one number can change without the other. Two that never do so at least differ."""
    of_queries, of_keys = free_symbols(queries), free_symbols(keys)
    return of_queries.isdisjoint(of_keys) and (bool(of_queries or of_keys) or fixed(queries) != fixed(keys))
