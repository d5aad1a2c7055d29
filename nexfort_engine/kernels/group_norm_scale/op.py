# SPDX-License-Identifier: Apache-2.0
"""What a group norm multiplies each channel with and adds to it, of images with channels anywhere in memory.

Two launches: means and variances of each channel in some chunks of its places, then of its group from those. Each
number is read once. What Inductor writes for the same (`passes.group_norm.by_channels`) is four launches. Microseconds
of norm and SiLU so and otherwise (fp16, H200, torch 2.11, 2026-11), for channels outermost with a result that has them
innermost: 2 x 320 at 96x96 17.5 and 30.4, 2 x 640 at 48x48 11.6 and 24.9, 2 x 1280 at 24x24 9.8 and 21.0, 2 x 2560 at
12x12 9.6 and 19.5; for channels innermost 17.1 and 18.7, 12.8 and 15.6, 9.2 and 13.3, 7.7 and 11.9.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..inductor_launch import empty, launch
from ..layouts import contiguous, settled
from ..op_registry import registered

_INNER = {"C_BLOCK": 32, "P_BLOCK": 64}  # numbers of a block where channels lie side by side
_OUTER = {"C_BLOCK": 4, "P_BLOCK": 512}
_PROGRAMS = 1024  # that a launch is cut into where the image is large enough, for 132 multiprocessors and fewer
_FEWEST = {"inner": 128, "outer": 4096}  # places of a chunk
_MOST_CHUNKS = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    eps: float,
    offset: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Factors and summands (N, 2, C), in dtype as they are computed, with which x (N, C, ...) becomes its group norm.

    weight, bias: (C) or None. offset (C) and offsets (N, C) are added to x first, or are None. Mean and biased variance
    of each of `groups` groups of channels are taken over its channels and all places (Wu and He, "Group Normalization",
    2018): scale = weight / sqrt(variance + eps) and shift = bias - mean * scale.
    """
    batch, channels = x.shape[:2]
    added = torch.zeros(batch, channels, dtype=dtype, device=x.device)
    for more in (offset, offsets):
        added = added if more is None else added + more.to(dtype)
    image = x.to(dtype) + added.reshape(batch, channels, *[1] * (x.dim() - 2))
    variance, mean = torch.var_mean(image.reshape(batch, groups, -1), -1, correction=0)
    scale = torch.rsqrt(variance + eps)[..., None].expand(batch, groups, channels // groups).reshape(batch, channels)
    if weight is not None:
        scale = scale * weight.to(dtype)
    shift = (added - mean[..., None].expand(batch, groups, channels // groups).reshape(batch, channels)) * scale
    if bias is not None:
        shift = shift + bias.to(dtype)
    return torch.stack([scale, shift], 1)


@functools.cache
def operator() -> Any:
    """The operator `nexfort::group_factors`, as `reference` is."""
    return registered(
        "group_factors(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, Tensor? offset=None, "
        "Tensor? offsets=None) -> Tensor",
        reference,
        lambda x, *_: x.new_empty(x.shape[0], 2, x.shape[1], dtype=torch.float32),
    )


def lowerings() -> dict[Any, Any]:
    """The operator and what Inductor calls for it."""
    return {operator(): _lower}


def _lower(x: Any, weight: Any, bias: Any, groups: int, eps: float, offset: Any = None, offsets: Any = None) -> Any:
    """As `reference`, in Inductor's representation."""
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import CeilDiv

    from . import triton_kernel as kernels

    x, strides = _where_it_lies(x)
    batch, channels, *rest = x.get_size()
    channels, places = int(channels), functools.reduce(lambda a, b: a * b, rest)
    inner = V.graph.sizevars.statically_known_equals(strides[1], 1)
    block = _INNER if inner else _OUTER
    chunks = _chunks(batch, channels, places, inner)
    sizes = {"channels": channels, "places": places, "chunk": CeilDiv(places, 16 * chunks) * 16}
    moments = empty(x, [batch, chunks, 2, channels])
    launch(
        kernels.moments_of_chunks,
        [CeilDiv(channels, block["C_BLOCK"]), chunks, batch],
        ["moments"],
        {"x": x, "moments": moments, **sizes}
        | {"stride_n": strides[0], "stride_c": strides[1], "stride_p": strides[-1], "CHUNKS": chunks, **block},
    )
    factors = empty(x, [batch, 2, channels])
    if offsets is not None:
        offsets = contiguous(offsets)
    each = channels // groups
    launch(
        kernels.factors_of_groups,
        [batch * groups, 1, 1],
        ["factors"],
        {"moments": moments, "weight": weight, "bias": bias, "offset": offset, "offsets": offsets}
        | {
            "factors": factors,
            **sizes,
            "EPS": eps,
            "GROUPS": groups,
            "EACH": each,
            "CHUNKS": chunks,
            **_blocks(each, chunks),
        },
    )
    return factors


def _blocks(each: int, chunks: int) -> dict[str, int]:
    """How many channels and chunks of a group are looked at at once: all, as a rule."""
    return {"E_BLOCK": _power(each), "K_BLOCK": max(1, min(_power(chunks), 4096 // _power(each)))}


def _where_it_lies(x: Any) -> tuple[Any, list[Any]]:
    """x in memory and its strides; copied where its places do not follow each other at one distance."""
    from torch._inductor.virtualized import V

    real = settled(x)
    sizes, strides = real.get_size(), real.get_stride()
    equal = V.graph.sizevars.statically_known_equals
    if not all(equal(strides[i], strides[i + 1] * sizes[i + 1]) for i in range(2, len(sizes) - 1)):
        real = contiguous(real)
    return real, list(real.get_stride())


def _chunks(batch: Any, channels: int, places: Any, inner: bool) -> int:
    """In how many chunks the places of a channel are summed, for the sizes that the graph is lowered with."""
    from torch._inductor.virtualized import V

    rows, length = (V.graph.sizevars.optimization_hint(size, fallback=1) for size in (batch, places))
    blocks = rows * -(-channels // (_INNER if inner else _OUTER)["C_BLOCK"])
    most = min(length // _FEWEST["inner" if inner else "outer"], _MOST_CHUNKS)
    return int(max(1, min(most, _PROGRAMS // blocks)))


def _power(number: int) -> int:
    """The smallest power of 2 that is no smaller."""
    return 1 << (number - 1).bit_length()
