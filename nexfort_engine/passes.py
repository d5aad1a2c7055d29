# SPDX-License-Identifier: Apache-2.0
"""Passes: a captured graph written differently, so that Inductor makes better kernels of it. Each gives equal numbers.

A pass is a function of a graph, and one switch in the config. What it puts in is plain code here, run on the graph's
own nodes, so that reading that code is reading what runs. Low precision, which does not give equal numbers, is in
quant/precision.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.proxy import GraphAppendingTracer

from .quant.precision import low_precision

aten = torch.ops.aten
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
PREFIX = "nexfort."  # of the switches among the settings for lowering; the rest are Inductor's


def split(options: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """The engine's own switches, without their prefix, and Inductor's settings."""
    own = {name.removeprefix(PREFIX): value for name, value in options.items() if name.startswith(PREFIX)}
    return own, {name: value for name, value in options.items() if not name.startswith(PREFIX)}


def _replace(node: Node, written: Proxy) -> None:
    """Put what was written in a node's place."""
    written.node.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(written.node)
    node.graph.erase_node(node)


def group_norms(module: GraphModule) -> int:
    """Write group norms by channels (see `by_channels`); gives how many.

    Those stay that have no dimensions behind, or any number of channels.
    """
    found = 0
    for node in list(module.graph.nodes):
        if node.target is not aten.group_norm.default:
            continue
        arguments: list[Any] = [*node.args[:5], *(None, None, 1e-5)[len(node.args[:5]) - 2 :]]
        x, groups, weight, bias, eps = arguments
        shape = x.meta["val"].shape
        if len(shape) < 3 or _fixed(shape[1]) is None:
            continue
        with module.graph.inserting_before(node):
            tracer = GraphAppendingTracer(module.graph)
            given = [None if n is None else Proxy(n, tracer) for n in (x, weight, bias)]
            written = by_channels(*given, like=x.meta["val"], groups=groups, eps=eps)
        _replace(node, written)
        found += 1
    return found


def _fixed(size: Any) -> int | None:
    """A size that is the same in every call, or None."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def by_channels(x: Any, weight: Any, bias: Any, *, like: torch.Tensor, groups: int, eps: float) -> Any:
    """Group norm of x (N, C, ...) in its dtype, computed in fp32 at least. weight, bias: (C) or None. like: as x is.

    Mean and variance of each channel first, then of the group from those: the variance of a group is the mean of its
    channels' variances plus the variance of its channels' means. So with channels innermost each sum reads whole rows,
    where a sum over a group reads a few bytes of each. Then one factor and one summand for each channel, in memory of
    their own: otherwise root and divisions are computed again for every number. With SiLU behind, 2 x 320 channels at
    128x128 took 39 microseconds so, 52 with neither of that nor of what `_moments` does, and 110 by torch's own (fp16,
    H200, torch 2.11, 2026-11). In operators of aten, because a graph with methods in it is not stored by the compiler.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    channels = _fixed(like.shape[1])
    assert channels is not None, "its number of channels is any"
    each, behind = channels // groups, [1] * (like.dim() - 2)

    def mean_of(values: Any) -> Any:
        return aten.mean.dim(values, [-1], True)

    wide = aten.to.dtype(x, dtype)
    mean, variance = (aten.reshape.default(found, [-1, groups, each]) for found in _moments(x, wide, like))
    middle = mean_of(mean)
    apart = aten.sub.Tensor(mean, middle)
    spread = aten.add.Tensor(mean_of(variance), mean_of(aten.mul.Tensor(apart, apart)))
    scale = aten.expand.default(aten.rsqrt.default(aten.add.Scalar(spread, eps)), [-1, -1, each])
    if weight is not None:
        scale = aten.mul.Tensor(scale, aten.reshape.default(aten.to.dtype(weight, dtype), [groups, each]))
    shift = aten.neg.default(aten.mul.Tensor(middle, scale))
    if bias is not None:
        shift = aten.add.Tensor(shift, aten.reshape.default(aten.to.dtype(bias, dtype), [groups, each]))

    def for_channels(values: Any) -> Any:
        each_one = in_memory(aten.reshape.default(values, [-1, channels]), [aten.sym_size.int(x, 0), channels])
        return aten.reshape.default(each_one, [-1, channels, *behind])

    result = aten.add.Tensor(aten.mul.Tensor(wide, for_channels(scale)), for_channels(shift))
    return aten.to.dtype(result, like.dtype)


def _moments(x: Any, wide: Any, like: torch.Tensor) -> tuple[Any, Any]:
    """Mean and variance (N, C) of each channel of x (N, C, ...), whose numbers in fp32 are `wide`.

    Numbers of 16 bits are summed less the mean of a few of their channel, and squared: two sums instead of Welford's,
    which divides for each number. What that loses where this mean is k deviations away, k^2 roundings of fp32, is lost
    in those of 16 bits up to k = 40. It is of places far from each other, so that one number alone has to be as many
    times further away. Numbers of fp32 have no such slack.
    """
    if like.dtype not in (torch.float16, torch.bfloat16):
        variance, mean = aten.var_mean.correction(aten.flatten.using_ints(wide, 2), [2], correction=0)
        return mean, variance
    about = _about(x, like)
    beside = aten.reshape.default(about, [-1, like.shape[1], *[1] * (like.dim() - 2)])
    apart = aten.flatten.using_ints(aten.sub.Tensor(wide, beside), 2)
    mean, square = aten.mean.dim(apart, [2]), aten.mean.dim(aten.mul.Tensor(apart, apart), [2])
    variance = aten.clamp_min.default(aten.sub.Tensor(square, aten.mul.Tensor(mean, mean)), 0)
    return aten.add.Tensor(about, mean), variance


def _about(x: Any, like: torch.Tensor) -> Any:
    """The mean (N, C) in fp32 of some numbers of x (N, C, ...): of its beginning and its middle in each dimension."""
    some = [x]
    for _ in range(like.dim() - 2):
        middle = [operator.floordiv(aten.sym_size.int(one, 2), 2) for one in some]
        some = [aten.select.int(one, 2, at) for one, half in zip(some, middle, strict=True) for at in (0, half)]
    total = aten.to.dtype(some[0], torch.float32)
    for one in some[1:]:
        total = aten.add.Tensor(total, aten.to.dtype(one, torch.float32))
    return aten.mul.Tensor(total, 1 / len(some))


_NEAREST = {aten.upsample_nearest1d.vec: 1, aten.upsample_nearest2d.vec: 2, aten.upsample_nearest3d.vec: 3}
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
        if _NEAREST.get(node.target) != 2 or not node.users or _channels_last(node.args[0].meta["val"]):
            continue
        if any(user.target not in _CONVOLUTIONS or user.args[0] is not node for user in node.users):
            continue
        with module.graph.inserting_before(node):
            laid = innermost(Proxy(node.args[0], GraphAppendingTracer(module.graph)))
        laid.node.meta["val"] = _laid_out(node.args[0].meta["val"], torch.channels_last)
        node.replace_input_with(node.args[0], laid.node)
        for changed in (node, *list(node.users)):
            before = changed.meta["val"]
            if not _channels_last(before):
                if changed is not node:
                    _as_it_was(changed)
                changed.meta["val"] = _laid_out(before, torch.channels_last)
        found += 1
    return found


def innermost(x: Any) -> Any:
    """x (N, C, H, W) as a tensor in memory whose channels are innermost."""
    batch, channels, height, width = (aten.sym_size.int(x, at) for at in range(4))
    laid = in_memory(aten.permute.default(x, [0, 2, 3, 1]), [batch, height, width, channels])
    return aten.permute.default(laid, [0, 3, 1, 2])


def in_memory(x: Any, sizes: list[Any]) -> Any:
    """x of these sizes as a contiguous tensor in memory: otherwise Inductor may compute it again for each reader."""
    strides: list[Any] = [1]
    for size in sizes[:0:-1]:
        strides.insert(0, operator.mul(strides[0], size))
    # as_strided asks for a tensor in memory
    return aten.as_strided.default(aten.clone.default(x, memory_format=torch.contiguous_format), sizes, strides)


def _as_it_was(node: Node) -> None:
    """Have a node's users read a contiguous copy."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        beside = node.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    beside.meta["val"] = node.meta["val"]
    for user in users:
        user.replace_input_with(node, beside)


def _laid_out(value: Any, layout: torch.memory_format) -> Any:
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
        dims = _NEAREST.get(node.target)
        if dims is None:
            continue
        x, sizes, scales = (*node.args, None)[:3]
        like, result = x.meta["val"], node.meta["val"]
        factors = [_factor(like.shape[2 + d], result.shape[2 + d]) for d in range(dims)]
        if None in factors and scales is not None:
            continue
        with module.graph.inserting_before(node):
            tracer = GraphAppendingTracer(module.graph)
            given = Proxy(x, tracer)
            if None not in factors:
                written = repeated(given, factors)
            else:
                ends = [Proxy(size, tracer) if isinstance(size, Node) else size for size in sizes]
                written = looked_up(given, ends, like.device)
            if _channels_last(result):
                written = aten.clone.default(written, memory_format=_CHANNELS_LAST[result.dim()])
        _replace(node, written)
        found += 1
    return found


def _factor(before: Any, after: Any) -> int | None:
    """How many times larger one size is than the other, whatever they are, if that is one of _EXACT."""
    return next((factor for factor in _EXACT if statically_known_true(after == factor * before)), None)


def _channels_last(like: torch.Tensor) -> bool:
    # the strides and not `is_contiguous`, which knows nothing of sizes that are symbols
    strides = like.stride()
    return like.dim() in _CHANNELS_LAST and _fixed(strides[1]) == 1 and _fixed(strides[-1]) != 1


def repeated(x: Any, factors: list[Any]) -> Any:
    """x (N, C, ...) with each number of the dimensions behind repeated `factors` times."""
    for at, factor in enumerate(factors):
        if factor > 1:
            dim, count = 2 + at, len(factors)
            wide = aten.expand.default(
                aten.unsqueeze.default(x, dim + 1), [-1] * (dim + 1) + [factor] + [-1] * (count - at - 1)
            )
            x = aten.flatten.using_ints(wide, dim, dim + 1)
    return x


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


def gelus(module: GraphModule) -> int:
    """Write the tanh form of GELU with a sigmoid (see `by_sigmoid`); gives how many."""
    found = 0
    for node in list(module.graph.nodes):
        if node.target is not aten.gelu.default or node.kwargs.get("approximate") != "tanh":
            continue
        x = node.args[0]
        with module.graph.inserting_before(node):
            written = by_sigmoid(Proxy(x, GraphAppendingTracer(module.graph)), like=x.meta["val"])
        _replace(node, written)
        found += 1
    return found


def by_sigmoid(x: Any, *, like: torch.Tensor) -> Any:
    """GELU in its tanh form (Hendrycks and Gimpel, 2016) in x's dtype, computed in fp32 at least. like: as x is.

    (1 + tanh(u)) / 2 is sigmoid(2u), which has no cancellation for numbers far below zero and needs no library: 4608
    rows of 15360 took 76 microseconds so and 97 otherwise (bfloat16, H200, torch 2.11, 2026-11).
    """
    wide = aten.to.dtype(x, torch.promote_types(like.dtype, torch.float32))
    cubic = aten.add.Tensor(aten.mul.Tensor(aten.mul.Tensor(wide, wide), 0.044715), 1.0)
    twice = aten.mul.Tensor(aten.mul.Tensor(wide, cubic), 2.0 * (2.0 / math.pi) ** 0.5)
    return aten.to.dtype(aten.mul.Tensor(wide, aten.sigmoid.default(twice)), like.dtype)


PASSES: dict[str, Callable[[GraphModule], int]] = {
    "group_norm": group_norms,
    "inner_channels": inner_channels,
    "upsample": upsamplings,
    "gelu": gelus,
    "low_precision": low_precision,
}
