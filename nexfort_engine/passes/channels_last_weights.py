# SPDX-License-Identifier: Apache-2.0
"""Weights of convolutions are brought to channels innermost, as a captured graph does it (modules/channels_last.py), by
a kernel."""

from __future__ import annotations

import math

import torch
from torch.fx import GraphModule

from ..graph.fx_builder import fixed
from ..kernels.channels_last_weight import op as channels_last_weight
from ..modules.channels_last import only_convolved

aten = torch.ops.aten
_MOST_PLACES = 1024


def inner_weights(module: GraphModule) -> int:
    """Have the copies of weights in channels_last made by `kernels/channels_last_weight/op.py`; gives how many.

    Those stay with torch whose kernel would hold too many places at once.
    """
    found = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.clone.default):
        weight = node.args[0]
        turned = node.kwargs.get("memory_format") == torch.channels_last and weight.op == "placeholder"
        if not turned or not only_convolved(node):
            continue
        like = weight.meta["val"]
        sizes = list(map(fixed, like.shape))
        if like.dtype in channels_last_weight.DTYPES and None not in sizes and math.prod(sizes[2:]) <= _MOST_PLACES:  # type: ignore[arg-type]
            node.target, node.kwargs = channels_last_weight.operator(), {}
            found += 1
    return found
