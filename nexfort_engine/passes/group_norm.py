# SPDX-License-Identifier: Apache-2.0
"""Group norms by channels: sums that read whole rows where channels are innermost."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.proxy import GraphAppendingTracer

from .writing import fixed, in_memory, replace

aten = torch.ops.aten
_VIEWS = {
    *(aten.movedim.int, aten.permute.default, aten.transpose.int),
    *(aten.flatten.using_ints, aten.reshape.default, aten.view.default),
}


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
        if len(shape) < 3 or fixed(shape[1]) is None:
            continue
        tokens = _tokens_of(node)
        with module.graph.inserting_before(node):
            tracer = GraphAppendingTracer(module.graph)
            given = [None if n is None else Proxy(n, tracer) for n in (x, weight, bias)]
            written = by_channels(*given, like=x.meta["val"], groups=groups, eps=eps, tokens=tokens is not None)
        replace(tokens or node, written)
        found += 1
    module.graph.eliminate_dead_code()  # what was between a norm and its tokens
    return found


def _tokens_of(node: Node) -> Node | None:
    """The norm's result as tokens (N, H*W, C), if it is used as nothing else: how attention takes an image.

    By the strides of what its code makes of a contiguous result, in whatever steps.
    """
    image = node.meta["val"]
    if image.dim() != 4 or not statically_known_true(image.stride(3) == 1) or fixed(image.stride(1)) == 1:
        return None
    while len(node.users) == 1:
        (node,) = node.users
        if node.target not in _VIEWS:
            return None
        value = node.meta["val"]
        pixels = image.shape[2] * image.shape[3]
        if value.dim() == 3 and statically_known_true(value.shape[1] == pixels):
            strides = (image.stride(0), 1, image.stride(1))
            same = (statically_known_true(one == other) for one, other in zip(value.stride(), strides, strict=True))
            return node if all(same) else None
    return None


def by_channels(
    x: Any, weight: Any, bias: Any, *, like: torch.Tensor, groups: int, eps: float, tokens: bool = False
) -> Any:
    """Group norm of x (N, C, ...) in its dtype, computed in fp32 at least. weight, bias: (C) or None. like: as x is.

    tokens: gives (N, H*W, C) of an image (N, C, H, W), in memory as products read it. As a view of the normed image it
    would be copied: the compiler sees that two orders are one only where sizes are numbers.

    Mean and variance of each channel first, then of the group from those: the variance of a group is the mean of its
    channels' variances plus the variance of its channels' means. So with channels innermost each sum reads whole rows,
    where a sum over a group reads a few bytes of each. Then one factor and one summand for each channel, in memory of
    their own: otherwise root and divisions are computed again for every number. With SiLU behind, 2 x 320 channels at
    128x128 took 39 microseconds so, 52 with neither of that nor of what `_moments` does, and 110 by torch's own (fp16,
    H200, torch 2.11, 2026-11). In operators of aten, because a graph with methods in it is not stored by the compiler.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    channels = fixed(like.shape[1])
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
        return aten.reshape.default(each_one, [-1, 1, channels] if tokens else [-1, channels, *behind])

    if tokens:
        wide = aten.flatten.using_ints(aten.permute.default(wide, [0, 2, 3, 1]), 1, 2)

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
    # in memory, or it would be computed again for each number, and the numbers less it be put there instead
    about = in_memory(_about(x, like), [aten.sym_size.int(x, 0), like.shape[1]])
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
