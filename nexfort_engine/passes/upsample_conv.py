# SPDX-License-Identifier: Apache-2.0
"""Nearest-neighbour upsampling to the double for a convolution: both -> `nexfort::upsampled_convolution` (kernels/)."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from ..graph.alias_analysis import Aliases
from ..graph.fx_builder import fixed, is_channels_last, replace
from ..graph.sizes import hint
from ..kernels.conv3x3 import upsample_op as kernel
from ..kernels.conv3x3.op import CHANNELS, DTYPES, widths
from .upsample import as_it_was, factor, laid_out

aten = torch.ops.aten
_CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding)
_DEVICE = "cuda"  # elsewhere the operator is torch's


def upsampled_convolutions(module: GraphModule) -> int:
    """Convolve images that are upsampled to the double as they were before; gives how many.

    The double at the captured call: in others sizes may be any, for which the operator is what both were. Those stay
    whose upsampled image somebody else reads, because it is in memory then.
    """
    found, aliases = 0, Aliases(module.graph)
    for node in list(module.graph.find_nodes(op="call_function", target=aten.upsample_nearest2d.vec)):
        x, sizes, scales = (*node.args, None)[:3]
        like, result = x.meta["val"], node.meta["val"]
        if aliases.is_written(x) or not all(scale == 2 for scale in scales or ()):
            continue  # it would be read later than it is; torch finds places by the factors where there are some
        doubled = all(factor(like.shape[at], result.shape[at]) == 2 for at in (2, 3))
        given = scales is None and all(hint(result.shape[at]) == hint(like.shape[at] * 2) for at in (2, 3))
        if not (doubled or given) or not node.users or not all(_is_fit(user, node) for user in node.users):
            continue
        for user in list(node.users):
            _convolve(user, x, None if doubled else sizes)
        module.graph.erase_node(node)
        found += 1
    return found


def _convolve(node: Node, x: Node, sizes: Any) -> None:
    """Have a convolution's result made of the image before it is upsampled. None: twice its sizes."""
    if not is_channels_last(node.meta["val"]):
        as_it_was(node)
        node.meta["val"] = laid_out(node.meta["val"], torch.channels_last)
    with node.graph.inserting_before(node):
        tracer = GraphAppendingTracer(node.graph)
        image = Proxy(x, tracer)
        if sizes is None:
            tall, wide = (aten.sym_size.int(image, at) * 2 for at in (2, 3))
        else:
            tall, wide = (Proxy(size, tracer) if isinstance(size, Node) else size for size in sizes)
        weight, bias = (Proxy(one, tracer) if isinstance(one, Node) else None for one in (*node.args, None)[1:3])
        made = kernel.operator()(image, weight, bias, tall, wide)
    replace(node, made)


def _is_fit(node: Node, image: Node) -> bool:
    """Whether a reader of an image is a convolution of it that the kernel takes."""
    if node.target not in _CONVOLUTIONS or node.args[0] is not image or not isinstance(node.args[1], Node):
        return False
    like, weight = node.meta["val"], node.args[1].meta["val"]
    columns, channels, *places = map(fixed, weight.shape)
    same = like.device.type == _DEVICE and like.dtype in DTYPES and weight.dtype == like.dtype
    inner = any(map(is_channels_last, (like, weight)))
    if not same or places != [3, 3] or not inner or columns is None or channels is None:
        return False
    return channels % CHANNELS == 0 and bool(widths(columns)) and _is_plain(*node.args[3:], **node.kwargs)


def _is_plain(stride: object = 1, padding: object = 0, dilation: object = 1, groups: object = 1) -> bool:
    """Whether a convolution of three by three places gives as many as it is given, each of all channels."""
    once = (1, [1], [1, 1])
    return stride in once and dilation in once and (padding == "same" or padding in once) and groups == 1
