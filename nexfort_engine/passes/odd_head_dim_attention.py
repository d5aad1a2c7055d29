# SPDX-License-Identifier: Apache-2.0
"""Attention of heads that libraries pad: torch's operator -> `nexfort::unpadded_attention` (kernels/).

Attention to few keys is left to them: there they are the faster ones.
"""

from __future__ import annotations

from torch.fx import GraphModule

from ..graph.sizes import hint
from ..kernels.odd_head_dim_attention import op as kernel
from .attention_match import Attention, attentions, plain_width, put_kernel

LEAST = 512  # queries, and keys, at the captured call
_DEVICE = "cuda"  # elsewhere the operator is torch's


def unpadded_attentions(module: GraphModule) -> int:
    """Compute attention of heads of such sizes by the kernel that is for it; gives how many."""
    found = 0
    for given in attentions(module):
        width = _width(given)
        if width is None:
            continue
        put_kernel(given, kernel.operator(), width)
        found += 1
    return found


def _width(given: Attention) -> int | None:
    """Numbers of a head where the kernel takes an attention, and is the faster one."""
    width = plain_width(given, _DEVICE)
    many = [hint(x.shape[2]) for x in given.values[:2]]
    if width not in kernel.WIDTHS or any(n is None or n < LEAST for n in many):
        return None
    return width if given.keeps_order(width) else None
