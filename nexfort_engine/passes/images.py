# SPDX-License-Identifier: Apache-2.0
"""Images between regions: results whose channels lie innermost, as the convolutions of the next region read them."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..aliases import Aliases
from .writing import fixed, is_channels_last, laid_out

aten = torch.ops.aten
_CONVOLUTIONS = {aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input, aten.convolution.default}
_FEW = 64  # channels: with fewer it is a latent or a picture, and whoever gets it finds it as eager leaves it


def images(module: GraphModule) -> int:
    """Have a graph leave its images with channels innermost; gives how many results that changed.

    An image is what has the shape of a convolution's result, or of what a group norm is given. Between convolutions
    the compiler lays channels innermost anyway (force_layout_optimization), and a result in eager's order would be laid
    anew on its way out and again on the next region's way in. Those stay that may be another value's memory.
    """
    graph = module.graph
    shapes = {_shape(at.meta["val"]) for node in graph.nodes if (at := _image_of(node)) is not None}
    output = graph.output_node()
    aliases, found = Aliases(graph), 0
    for node in output.all_input_nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or _shape(value) not in shapes:
            continue
        channels = fixed(value.shape[1])
        if channels is None or channels < _FEW or is_channels_last(value) or not aliases.is_alone(node):
            continue
        with graph.inserting_before(output):
            laid = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.channels_last})
        laid.meta["val"] = laid_out(value, torch.channels_last)
        output.replace_input_with(node, laid)
        found += 1
    return found


def _image_of(node: Node) -> Node | None:
    """The value with the shape of an image, if the call is a convolution or a group norm of such."""
    if node.target in _CONVOLUTIONS:
        return node if node.meta["val"].dim() == 4 else None
    if node.target is aten.group_norm.default:
        x = node.args[0]
        return x if isinstance(x, Node) and x.meta["val"].dim() == 4 else None
    return None


def _shape(value: torch.Tensor) -> tuple[str, ...]:
    return tuple(map(str, value.shape))
