# SPDX-License-Identifier: Apache-2.0
"""Group norms by rows and channels: sums that read what lies side by side where channels are innermost."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..graph.fx_builder import fixed, in_memory, replace
from ..kernels.group_norm_scale import op as group_norm_scale

aten = torch.ops.aten
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


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
        like, tracer = x.meta["val"], GraphAppendingTracer(module.graph)
        with module.graph.inserting_before(node):
            if _has_kernels(like):
                x, *offsets = _without_offsets(x)
                given = [None if n is None else Proxy(n, tracer) for n in (x, weight, bias, *offsets)]
                written = by_kernels(*given, like=like, groups=groups, eps=eps)
            else:
                given = [None if n is None else Proxy(n, tracer) for n in (x, weight, bias)]
                written = by_channels(*given, like=like, groups=groups, eps=eps)
        replace(node, written)
        found += 1
    return found


class LaidOut(TorchFunctionMode):
    """Inside the block what eager's group norms give lies in memory as `by_channels` leaves it: as x does.

    Eager's own is contiguous on a GPU. What follows would be called with another memory format than behind an artefact.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is functional.group_norm or func is torch.group_norm:
            x = args[0] if args else kwargs["input"]
            if type(result) is torch.Tensor and result.dim() > 2 and result.stride() != x.stride():
                return torch.empty_like(x, dtype=result.dtype).copy_(result)
        return result


def by_channels(x: Any, weight: Any, bias: Any, *, like: torch.Tensor, groups: int, eps: float) -> Any:
    """Group norm of x (N, C, ...) in its dtype, computed in fp32 at least. weight, bias: (C) or None. like: as x is.

    Mean and variance of each row of a channel first, then of the group from those: the variance of a group is the mean
    of its rows' variances plus the variance of its rows' means. So with channels innermost each sum reads channels that
    lie side by side, where a sum over a group reads a few bytes of each place; and no place has to be found by dividing
    by the width, as in sums over a channel's whole plane. Then one factor and one summand for each channel, in memory
    of their own: otherwise root and divisions are computed again for every number. With SiLU behind, 2 x 320 channels
    at 96x96 took 22 microseconds without `_about`'s launch, 32 by sums of channels (fp16, H200, torch 2.11, 2026-11).
    In operators of aten, because a graph with methods in it is not stored by the compiler.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    channels = fixed(like.shape[1])
    assert channels is not None, "its number of channels is any"
    each, behind = channels // groups, [1] * (like.dim() - 2)
    batch, *rows = (aten.sym_size.int(x, at) for at in (0, *range(2, like.dim() - 1)))
    summed = list(range(2, 3 + len(rows)))

    wide = aten.to.dtype(x, dtype)
    means, variances = (aten.reshape.default(v, [-1, groups, each, *rows]) for v in _of_rows(x, wide, like))
    middle, spread = _of_groups(means, variances, groups, summed)

    def for_each(values: Any) -> Any:  # (N, groups) to (N, groups, each)
        return aten.expand.default(aten.unsqueeze.default(values, -1), [-1, -1, each])

    scale = for_each(aten.rsqrt.default(aten.add.Scalar(spread, eps)))
    if weight is not None:
        scale = aten.mul.Tensor(scale, aten.reshape.default(aten.to.dtype(weight, dtype), [groups, each]))
    shift = aten.neg.default(aten.mul.Tensor(for_each(middle), scale))
    if bias is not None:
        shift = aten.add.Tensor(shift, aten.reshape.default(aten.to.dtype(bias, dtype), [groups, each]))

    def for_channels(values: Any) -> Any:
        each_one = in_memory(aten.reshape.default(values, [-1, channels]), [batch, channels])
        return aten.reshape.default(each_one, [-1, channels, *behind])

    return _applied(wide, for_channels(scale), for_channels(shift), like)


def by_kernels(
    x: Any, weight: Any, bias: Any, offset: Any, offsets: Any, *, like: torch.Tensor, groups: int, eps: float
) -> Any:
    """As `by_channels`, with factors and summands by kernels of our own (kernels/group_norm_scale/op.py).

    offset: (C) or None, offsets: (N, C) or None, are still to be added to x.
    """
    factors = group_norm_scale.operator()(x, weight, bias, groups, eps, offset, offsets)
    batch, channels = aten.sym_size.int(x, 0), fixed(like.shape[1])
    behind = [1] * (like.dim() - 2)
    scale, shift = (aten.reshape.default(aten.select.int(factors, 1, at), [batch, channels, *behind]) for at in (0, 1))
    return _applied(aten.to.dtype(x, torch.float32), scale, shift, like)


def _has_kernels(like: torch.Tensor) -> bool:
    # on cards of AMD nobody measured them
    return like.device.type == "cuda" and torch.version.hip is None and like.dtype in group_norm_scale.DTYPES


def _without_offsets(x: Any) -> tuple[Node, Node | None, Node | None]:
    """x before what is added to whole channels, where nobody else reads x; and that: of all rows (C), of each (N, C).

    Otherwise the sum would be put in memory for the kernels, which are no part of what Inductor fuses: a convolution's
    bias and what a residual block adds of the time step.
    """
    graph = x.graph
    offset = offsets = None
    like = x.meta["val"]
    if x.target is aten.add.Tensor and len(x.users) == 1 and not x.kwargs:
        first, second = x.args
        for image, other in ((first, second), (second, first)):
            if _is_of_channels(other, like) and _is_alike(image, like):
                x, offsets = image, graph.call_function(aten.reshape.default, (other, [-1, fixed(like.shape[1])]))
                break
    if x.target in _CONVOLUTIONS and len(x.users) == 1 and len(x.args) > 2 and isinstance(x.args[2], Node):
        offset = x.args[2]
        bare = graph.call_function(x.target, (*x.args[:2], None, *x.args[3:]), x.kwargs)
        bare.meta["val"] = like
        x = bare
    return x, offset, offsets


def _is_alike(node: Any, like: torch.Tensor) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == like.dtype and value.shape == like.shape


def _is_of_channels(node: Any, like: torch.Tensor) -> bool:
    """Whether a value has one number for each channel of each row."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.dtype != like.dtype or value.dim() != like.dim():
        return False
    return value.shape[:2] == like.shape[:2] and all(fixed(size) == 1 for size in value.shape[2:])


def _applied(wide: Any, scale: Any, shift: Any, like: torch.Tensor) -> Any:
    return aten.to.dtype(aten.add.Tensor(aten.mul.Tensor(wide, scale), shift), like.dtype)


def _of_rows(x: Any, wide: Any, like: torch.Tensor) -> tuple[Any, Any]:
    """Means and variances (N, C, ..., without the last dimension) of the rows of x, whose numbers in fp32 are `wide`.

    Numbers of 16 bits are summed less the mean of a few of their channel, and squared: two sums instead of Welford's,
    which divides for each number. What that loses where this mean is k deviations away, k^2 roundings of fp32, is lost
    in those of 16 bits up to k = 40. It is of places far from each other, so that one number alone has to be as many
    times further away. Numbers of fp32 have no such slack.
    """
    if like.dtype not in (torch.float16, torch.bfloat16):
        found = aten.var_mean.correction(wide, [-1], correction=0)
        return found[1], found[0]
    # otherwise it is computed again for each number, and x less it is put in memory in fp32 for both sums
    about = in_memory(_about(x, like), [aten.sym_size.int(x, 0), like.shape[1]])
    beside = aten.reshape.default(about, [-1, like.shape[1], *[1] * (like.dim() - 2)])
    apart = aten.sub.Tensor(wide, beside)
    means, squares = aten.mean.dim(apart, [-1]), aten.mean.dim(aten.mul.Tensor(apart, apart), [-1])
    variances = aten.clamp_min.default(aten.sub.Tensor(squares, aten.mul.Tensor(means, means)), 0)
    return aten.add.Tensor(means, aten.reshape.default(about, [-1, like.shape[1], *[1] * (like.dim() - 3)])), variances


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


def _of_groups(means: Any, variances: Any, groups: int, summed: list[int]) -> tuple[Any, Any]:
    """Means and variances (N, groups) of groups, from those (N, groups, ...) of their rows."""
    middle = aten.mean.dim(means, summed)
    apart = aten.sub.Tensor(means, aten.reshape.default(middle, [-1, groups, *[1] * len(summed)]))
    spread = aten.add.Tensor(aten.mean.dim(variances, summed), aten.mean.dim(aten.mul.Tensor(apart, apart), summed))
    return middle, spread
