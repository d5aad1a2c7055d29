# SPDX-License-Identifier: Apache-2.0
"""Weights of convolutions are brought to channels innermost, as a captured graph does it (images.py), by a kernel."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from ..kernels import innermost_weight
from .writing import fixed

aten = torch.ops.aten


def inner_weights(module: GraphModule) -> int:
    """Have the copies of weights in channels_last made by `kernels/innermost_weight.py`; gives how many."""
    found = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.clone.default):
        weight = node.args[0]
        if node.kwargs.get("memory_format") != torch.channels_last or weight.op != "placeholder":
            continue
        like = weight.meta["val"]
        if like.dtype in innermost_weight.DTYPES and None not in map(fixed, like.shape):
            node.target, node.kwargs = innermost_weight.operator(), {}
            found += 1
    return found
