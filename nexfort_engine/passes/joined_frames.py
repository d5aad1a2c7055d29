# SPDX-License-Identifier: Apache-2.0
"""Convolutions over some frames of a video are those of images whose channels are these frames'.

    conv3d(x, w)  ->  conv3d(cat of x's frames 0.., 1.., 2.. over channels, w with its frames over channels)

For 96 channels cuDNN has a kernel of compute capability 8.0 for three frames, and one of 9.0 for an image of 3 x 96.
Four frames of 480x832: 1.35 ms and 0.74 (bfloat16, H200, torch 2.11, 2026-11). What joins them is part of the kernel
that computed them. Of 128, 192, 256 or 384 channels both take the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from ..graph.fx_builder import fill, fixed, replace
from ..kernels.conv3d.op import INNERMOST, SECOND
from .video_convolutions import FEWEST, gains, given_to

aten = torch.ops.aten
_WIDTH = 64  # channels of a block of cuDNN's faster kernels; a multiple of it they take as it is


def joined_frames(module: GraphModule) -> int:
    """Write such convolutions over joined frames; gives how many."""
    fill(module.graph.nodes)
    found = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.conv3d.default):
        x, weight, bias, stride, padding, dilation = given_to(node)
        outputs, channels, frames, *places = (fixed(size) or 0 for size in weight.meta["val"].shape)
        by_frames = (stride[0], padding[0], dilation[0]) == (1, 0, 1)
        if not by_frames or frames < 2 or max(places) == 1 or outputs < FEWEST or channels % _WIDTH == 0:
            continue
        if not gains(node, x, weight, (*stride, *padding, *dilation)):
            continue
        tracer = GraphAppendingTracer(module.graph)
        with module.graph.inserting_before(node):
            images = joined(Proxy(x, tracer), frames), as_images(Proxy(weight, tracer))
            given = [Proxy(bias, tracer) if isinstance(bias, Node) else bias, stride, padding, dilation]
            written = aten.conv3d.default(*images, *given)
        replace(node, written)
        found += 1
    fill(module.graph.nodes)
    return found


def joined(x: Any, frames: int) -> Any:
    """x (N, C, T, H, W) as (N, frames C, T - frames + 1, H, W), channels innermost: each frame with those behind it."""
    last = aten.sym_size.int(x, 2) - (frames - 1)
    each = [aten.slice.Tensor(x, 2, at, last + at) for at in range(frames)]
    return aten.permute.default(aten.cat.default([aten.permute.default(one, INNERMOST) for one in each], 4), SECOND)


def as_images(weight: Any) -> Any:
    """weight (O, C, t, h, w) as (O, t C, 1, h, w)."""
    return aten.unsqueeze.default(aten.flatten.using_ints(aten.permute.default(weight, [0, 2, 1, 3, 4]), 1, 2), 2)
