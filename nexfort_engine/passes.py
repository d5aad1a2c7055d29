# SPDX-License-Identifier: Apache-2.0
"""Passes: a captured graph written differently, so that Inductor makes better kernels of it. Each gives equal numbers.

A pass is a function of a graph, and one switch in the config. What it puts in is plain code here, run on the graph's
own nodes, so that reading that code is reading what runs. Low precision, which does not give equal numbers, is in
precision.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Proxy
from torch.fx.proxy import GraphAppendingTracer

from .precision import low_precision

aten = torch.ops.aten
PREFIX = "nexfort."  # of the switches among the settings for lowering; the rest are Inductor's


def split(options: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """The engine's own switches, without their prefix, and Inductor's settings."""
    own = {name.removeprefix(PREFIX): value for name, value in options.items() if name.startswith(PREFIX)}
    return own, {name: value for name, value in options.items() if not name.startswith(PREFIX)}


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
        written.node.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(written.node)
        module.graph.erase_node(node)
        found += 1
    return found


def _fixed(size: Any) -> int | None:
    """A size that is the same in every call, or None."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def by_channels(x: Any, weight: Any, bias: Any, *, like: torch.Tensor, groups: int, eps: float) -> Any:
    """Group norm of x (N, C, ...) in its dtype, computed in fp32 at least. weight, bias: (C) or None. like: as x is.

    Mean and variance of each channel first, then of the group from those: the variance of a group is the mean of its
    channels' variances plus the variance of its channels' means. So with channels innermost each sum reads whole rows,
    where a sum over a group reads a few bytes of each. With SiLU behind, 128 channels at 1024x1024 took 0.46 ms so and
    1.98 otherwise; 2 x 320 channels at 128x128 took 53 microseconds and 110 (fp16, H200, torch 2.11, 2026-11). In
    operators of aten, because a graph with methods in it is not stored by the compiler.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    channels = _fixed(like.shape[1])
    assert channels is not None, "its number of channels is any"
    each, behind = channels // groups, [1] * (like.dim() - 2)

    def grouped(values: Any) -> Any:
        return aten.reshape.default(values, [-1, groups, each])

    def mean_of(values: Any) -> Any:
        return aten.mean.dim(values, [-1], True)

    wide = aten.to.dtype(x, dtype)
    found = aten.var_mean.correction(aten.flatten.using_ints(wide, 2), [2], correction=0)
    variance, mean = grouped(found[0]), grouped(found[1])
    middle = mean_of(mean)
    apart = aten.sub.Tensor(mean, middle)
    spread = aten.add.Tensor(mean_of(variance), mean_of(aten.mul.Tensor(apart, apart)))
    scale = aten.rsqrt.default(aten.add.Scalar(spread, eps))
    if weight is not None:
        scale = aten.mul.Tensor(scale, aten.reshape.default(aten.to.dtype(weight, dtype), [groups, each]))
    shift = aten.neg.default(aten.mul.Tensor(middle, scale))
    if bias is not None:
        shift = aten.add.Tensor(shift, aten.reshape.default(aten.to.dtype(bias, dtype), [groups, each]))

    def for_channels(values: Any) -> Any:
        return aten.reshape.default(aten.expand.default(values, [-1, -1, each]), [-1, channels, *behind])

    result = aten.add.Tensor(aten.mul.Tensor(wide, for_channels(scale)), for_channels(shift))
    return aten.to.dtype(result, like.dtype)


PASSES: dict[str, Callable[[GraphModule], int]] = {"group_norm": group_norms, "low_precision": low_precision}
