# SPDX-License-Identifier: Apache-2.0
"""Convolutions of videos read and write them with channels innermost, as their kernels compute.

    conv3d(x, w)  ->  nexfort::conv3d(x and w with channels innermost), seen with channels second

Code of video autoencoders has channels second, and cuDNN lays out each input, weight and result anew: 88 of the 645
ms of a decode of Wan 2.1's VAE (33 frames of 480x832). Here the kernel before writes the input so, such as that of a
norm, and the kernel behind reads the result so. A convolution of 96 channels at 480x832 takes 3.4 ms with and 2.8 ms
without cuDNN's kernels for layouts, of 384 at 120x208 0.72 and 0.60 (bfloat16, H200, torch 2.11, 2026-11).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from ..graph.fx_builder import fill, fixed, is_channels_last, replace
from ..kernels.conv3d.op import INNERMOST, SECOND, operator

aten = torch.ops.aten
FEWEST = 16  # channels of the input: of fewer cuDNN takes other kernels
_HALVES = (torch.float16, torch.bfloat16)
_OPERATOR = "nexfort.conv3d.default"
_MOST_READS = 8  # of tensors by one kernel that computes what several read
_MOST_STEPS = 90  # that one kernel computes of a number; a norm, a SiLU, frames before and a border are 50


def video_convolutions(module: GraphModule) -> int:
    """Write such convolutions as the operator; gives how many."""
    fill(module.graph.nodes)  # with what passes before put in
    found = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.conv3d.default):
        x, weight, bias, stride, padding, dilation = given_to(node)
        if not gains(node, x, weight, (*stride, *padding, *dilation)):
            continue
        tracer = GraphAppendingTracer(module.graph)
        with module.graph.inserting_before(node):
            given = Proxy(x, tracer), Proxy(weight, tracer)
            written = convolved(*given, stride, padding, dilation, inner=is_channels_last(node.meta["val"]))
            if bias is not None:
                written = aten.add.Tensor(written, aten.view.default(Proxy(bias, tracer), [-1, 1, 1, 1]))
        replace(node, written)
        found += 1
    fill(module.graph.nodes)
    return found


def more_at_once(module: GraphModule) -> dict[str, int]:
    """Settings of Inductor for a graph that has such an operator: a norm, what is joined and padded is one kernel.

    By its rule of thumb what has so much to compute is in memory before it is laid out, which is a pass of its own.
    """
    has = any(str(node.target) == _OPERATOR for node in module.graph.nodes)
    return {"realize_opcount_threshold": _MOST_STEPS, "realize_reads_threshold": _MOST_READS} if has else {}


def convolved(
    x: Any, weight: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], *, inner: bool = False
) -> Any:
    """x (N, I, T, H, W) convolved with weight (O, I, t, h, w). inner: the result lies with channels innermost still."""
    turned = (turned_inside(part) for part in (x, weight))
    made = operator()(*turned, list(stride), list(padding), list(dilation))
    seen = aten.permute.default(made, SECOND)
    return seen if inner else aten.clone.default(seen, memory_format=torch.contiguous_format)


def turned_inside(x: Any) -> Any:
    """x (N, C, T, H, W) as (N, T, H, W, C) without gaps: x itself, where it is known to lie so."""
    seen = aten.permute.default(x, INNERMOST)
    if isinstance(x, Proxy) and is_channels_last(x.node.meta["val"]):
        return seen
    return aten.clone.default(seen, memory_format=torch.contiguous_format)


def given_to(node: Node) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Input, weight, bias, stride, padding and dilation of torch's operator."""
    given: list[Any] = [*node.args, *(None, [1], [0], [1], 1)[len(node.args) - 2 :]]
    return given[0], given[1], given[2], *([*part] * (3 // len(part)) for part in given[3:6])  # type: ignore[return-value]


def gains(node: Node, x: Node, weight: Node, numbers: Sequence[Any]) -> bool:
    """Whether a convolution takes less time with channels innermost. numbers: its stride, padding and dilation."""
    value, like = x.meta["val"], weight.meta["val"]
    if node.kwargs or value.dim() != 5 or value.dtype not in _HALVES or like.dtype != value.dtype:
        return False
    if not all(isinstance(number, int) for number in numbers):
        return False
    sizes = [fixed(size) or 0 for size in like.shape]
    groups = node.args[6] if len(node.args) > 6 else 1
    return bool(groups == 1 and sizes[1] >= FEWEST and max(sizes[2:]) > 1)
