# SPDX-License-Identifier: Apache-2.0
"""Attention without a mask: torch's operator -> `nexfort::cudnn_attention`, which decides by a call's sizes.

A graph serves sizes that it was not captured at, so that the sizes of the captured call decide nothing here.
"""

from __future__ import annotations

from torch.fx import GraphModule

from ..attention.cudnn import operator
from ..graph.layouts import memory_order
from ..graph.sizes import hint
from .attention_match import Attention, attentions, put, takes_any_kernel


def cudnn_attentions(module: GraphModule) -> int:
    """Write attention in 16 bits without a mask as the operator; gives how many."""
    found = 0
    for given in attentions(module):
        if given.mask is None and takes_any_kernel(given):
            tensors = given.query, given.key, given.value
            put(given.node, operator(), (*tensors, given.causal, given.scale, given.shares, list(_order(given))))
            found += 1
    return found


def _order(given: Attention) -> tuple[int, ...]:
    """Of the result's dimensions in memory: as the query's, which is how the kernels for GPUs lay it."""
    query = given.values[0]
    lies = [hint(number) for number in (*query.shape, *query.stride())]
    known = [number for number in lies if number is not None]
    return memory_order(known[:4], known[4:]) if len(known) == len(lies) else given.order or ()
