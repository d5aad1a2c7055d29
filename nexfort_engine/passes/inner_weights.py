# SPDX-License-Identifier: Apache-2.0
"""Weights of convolutions laid out ahead: with channels innermost, as the kernels read them.

Where Inductor lays out images so (force_layout_optimization) it copies the weight of each convolution on each call. A
copy that a graph makes of a weight alone is taken out of it, and kept while the weight stays (prepared.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from .. import prepared
from ..aliases import Aliases
from ..kernels import innermost_weight
from .writing import fixed

aten = torch.ops.aten
_CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input, aten.convolution.default)


def inner_weights(module: GraphModule) -> int:
    """Have convolutions read a copy of their weight whose channels are innermost; gives how many weights.

    Those stay that are read as they lie (1x1 and those that have channels innermost), those too small to be kept, and
    those that the graph writes to: there is one copy for all who read them.
    """
    aliases = Aliases(module.graph)
    laid: dict[Node, Node] = {}
    for node in list(module.graph.nodes):
        if node.target not in _CONVOLUTIONS:
            continue
        weight: Any = node.args[1]
        like = weight.meta["val"]
        if not _is_copied(like) or aliases.is_written(weight):
            continue
        with module.graph.inserting_before(node):
            if weight not in laid:
                laid[weight] = innermost(Proxy(weight, GraphAppendingTracer(module.graph))).node
            seen = module.graph.call_function(innermost_weight.operator(), (laid[weight],))
        with like.fake_mode:
            seen.meta["val"] = torch.empty_like(like, memory_format=torch.contiguous_format)
        node.update_arg(1, seen)
    return len(laid)


def innermost(weight: Any) -> Any:
    """The weight (O, I, H, W) in memory as (O, H, W, I)."""
    return aten.clone.default(aten.permute.default(weight, [0, 2, 3, 1]), memory_format=torch.contiguous_format)


def _is_copied(weight: torch.Tensor) -> bool:
    """Whether Inductor would copy it for a convolution in two dimensions, and the copy is worth keeping."""
    sizes = [fixed(size) for size in weight.shape]
    if len(sizes) != 4 or None in sizes or weight.numel() < prepared.LEAST:
        return False
    strides = [weight.stride(at) for at in (0, 2, 3, 1) if sizes[at] != 1]  # a size of 1 has no place in an order
    return strides != sorted(strides, reverse=True)
