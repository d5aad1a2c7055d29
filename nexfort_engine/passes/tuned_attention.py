# SPDX-License-Identifier: Apache-2.0
"""Attention by the kernel that is measured to be the fastest: torch's operator -> `nexfort::attention`.

The result lies in memory as it does in the captured graph, whose code may look at it so, whichever kernel is chosen.
"""

from __future__ import annotations

from torch.fx import GraphModule

from ..attention.operator import operator
from .attention_match import attentions, put, takes_any_kernel


def measured_attentions(module: GraphModule, *, quantised: bool = False) -> int:
    """Write attention in 16 bits as the operator that chooses; gives how many. quantised: among kernels that quantise.

    Those stay whose layout only a call knows.
    """
    found = 0
    for given in attentions(module):
        if not takes_any_kernel(given):
            continue
        tensors = given.query, given.key, given.value, given.mask
        put(
            given.node,
            operator(),
            (*tensors, given.causal, given.scale, given.shares, list(given.order or ()), quantised),
        )
        found += 1
    return found


def quantised_attentions(module: GraphModule) -> int:
    """As `measured_attentions`, among kernels that quantise too."""
    return measured_attentions(module, quantised=True)
