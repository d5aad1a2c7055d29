# SPDX-License-Identifier: Apache-2.0
"""Nearest-neighbour upsampling: laid out for the convolutions behind it, and without a division for each number."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.proxy import GraphAppendingTracer

from ..graph.fx_builder import CHANNELS_LAST, in_memory, is_channels_last, replace

aten = torch.ops.aten
_NEAREST = {aten.upsample_nearest1d.vec: 1, aten.upsample_nearest2d.vec: 2, aten.upsample_nearest3d.vec: 3}
# the same for whole factors: the middle of each number lies in the one that it comes from
_MIDDLE = {
    aten._upsample_nearest_exact1d.vec: 1,
    aten._upsample_nearest_exact2d.vec: 2,
    aten._upsample_nearest_exact3d.vec: 3,
}
_EXACT = (1, 2, 4, 8)  # factors whose inverse torch's float32 index arithmetic has no rounding for
_CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding, aten.convolution.default)


def inner_channels(module: GraphModule) -> int:
    """Bring channels innermost before images are upsampled for convolutions alone; gives how many.

    Inductor lays out so what a convolution reads (force_layout_optimization), and reading across memory while that is
    made costs most where it is largest. 2 x 640 channels from 64x64 to 128x128: 107 microseconds for the upsampling, 25
    of channels that are innermost (fp16, H200, torch 2.11, 2026-11).
    """
    found = 0
    for node in list(module.graph.nodes):
        if _NEAREST.get(node.target) != 2 or not node.users or is_channels_last(node.args[0].meta["val"]):
            continue
        if any(user.target not in _CONVOLUTIONS or user.args[0] is not node for user in node.users):
            continue
        with module.graph.inserting_before(node):
            laid = innermost(Proxy(node.args[0], GraphAppendingTracer(module.graph)))
        laid.node.meta["val"] = laid_out(node.args[0].meta["val"], torch.channels_last)
        node.replace_input_with(node.args[0], laid.node)
        for changed in (node, *list(node.users)):
            before = changed.meta["val"]
            if not is_channels_last(before):
                if changed is not node:
                    as_it_was(changed)
                changed.meta["val"] = laid_out(before, torch.channels_last)
        found += 1
    return found


def innermost(x: Any) -> Any:
    """x (N, C, H, W) as a tensor in memory whose channels are innermost."""
    batch, channels, height, width = (aten.sym_size.int(x, at) for at in range(4))
    laid = in_memory(aten.permute.default(x, [0, 2, 3, 1]), [batch, height, width, channels])
    return aten.permute.default(laid, [0, 3, 1, 2])


def as_it_was(node: Node) -> None:
    """Have a node's users read a contiguous copy."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        beside = node.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    beside.meta["val"] = node.meta["val"]
    for user in users:
        user.replace_input_with(node, beside)


def laid_out(value: Any, layout: torch.memory_format) -> Any:
    with value.fake_mode:
        return aten.clone.default(value, memory_format=layout)


def upsamplings(module: GraphModule) -> int:
    """Write nearest-neighbour upsampling without a division for every number of the result; gives how many.

    Where the sizes are any, Inductor finds the place that each number comes from by dividing sizes in float64 once for
    each of them. Upsampling by 2, 4 or 8 repeats numbers instead, and other sizes get the places from a list that is
    made once a call: of all dimensions, because Inductor divides by sizes again to find a number's place in each of
    several (2 x 640 channels to 128x128: 19 microseconds so, 23 with two lists, H200, torch 2.11, 2026-11).
    """
    found = 0
    for node in list(module.graph.nodes):
        dims = _NEAREST.get(node.target) or _MIDDLE.get(node.target)
        if dims is None:
            continue
        x, sizes, scales = (*node.args, None)[:3]
        like, result = x.meta["val"], node.meta["val"]
        factors = [factor(like.shape[2 + d], result.shape[2 + d]) for d in range(dims)]
        if scales is not None and list(scales) != factors:
            continue  # torch finds places by what is given, which need not be how much larger a size is
        if None in factors and node.target in _MIDDLE:
            continue
        with module.graph.inserting_before(node):
            tracer = GraphAppendingTracer(module.graph)
            given = Proxy(x, tracer)
            if None not in factors:
                written = repeated(given, factors)
            else:
                ends = [Proxy(size, tracer) if isinstance(size, Node) else size for size in sizes]
                written = looked_up(given, ends, like.device)
            if is_channels_last(result):
                written = aten.clone.default(written, memory_format=CHANNELS_LAST[result.dim()])
        replace(node, written)
        found += 1
    return found


def factor(before: Any, after: Any) -> int | None:
    """How many times larger one size is than the other, whatever they are, if that is one of _EXACT."""
    return next((factor for factor in _EXACT if statically_known_true(after == factor * before)), None)


def repeated(x: Any, factors: list[Any]) -> Any:
    """x (N, C, ...) with each number of the dimensions behind repeated `factors` times."""
    for at, factor in enumerate(factors):
        if factor > 1:
            dim, count = 2 + at, len(factors)
            wide = aten.expand.default(
                aten.unsqueeze.default(x, dim + 1), [-1] * (dim + 1) + [factor] + [-1] * (count - at - 1)
            )
            x = aten.flatten.using_ints(wide, dim, dim + 1)
    # where nothing is repeated it would be x itself, which others write to
    return aten.clone.default(x, memory_format=torch.contiguous_format)


def looked_up(x: Any, sizes: list[Any], device: torch.device) -> Any:
    """x (N, C, ...) upsampled to `sizes` by one list of places, with the arithmetic of torch in each dimension."""
    place: Any = None
    count: Any = 1
    for at, size in enumerate(sizes):
        before = aten.sym_size.int(x, 2 + at)
        numbers = _arange(x, size, device)
        index = aten.to.dtype(aten.mul.Tensor(numbers, operator.truediv(before, size)), torch.int64)
        for _ in sizes[at + 1 :]:
            index = aten.unsqueeze.default(index, -1)
        place = index if place is None else aten.add.Tensor(aten.mul.Tensor(place, before), index)
        count = operator.mul(size, count)
    places = in_memory(aten.reshape.default(place, [-1]), [count])
    found = aten._unsafe_index.Tensor(aten.flatten.using_ints(x, 2), [None, None, places])
    return aten.reshape.default(found, [-1, aten.sym_size.int(x, 1), *sizes])


def _arange(x: Any, size: Any, device: torch.device) -> Any:
    """0, 1, ... below `size` in fp32: in the graph of x if it is of one, also where the size is a plain number."""
    kwargs = {"dtype": torch.float32, "device": device}
    if isinstance(x, Proxy):
        return x.tracer.create_proxy("call_function", aten.arange.default, (size,), kwargs)
    return aten.arange.default(size, **kwargs)
