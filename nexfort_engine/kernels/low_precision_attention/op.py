# SPDX-License-Identifier: Apache-2.0
"""Attention in low precision: queries and keys in int8, exponentials and values in fp8 (e4m3), sums in fp32.

Two launches: keys and values are brought to 8 bits, each block of 128 with scales of its own, then attention of 64
queries a program, or of 128 by one for compute capability 9.0. A mean of some keys is taken from all of them first,
which no softmax sees and which makes keys that have something in common as exact as others (Zhang et al.,
"SageAttention", 2024, which also has the choice of int8 for scores). Of normal numbers the result is 0.038 of its norm
off, by the kernel for 9.0 0.042, most of it from the exponentials and values.

Microseconds by the kernel for 9.0 (both launches) and by torch's own choice, cuDNN (H200, torch 2.11, in a graph,
2026-11-24), heads of 128: 2 x 12 heads of 14040 tokens 2563 and 3917, 24 of 4608 351 and 396; of 64: 2 x 5 of 9216 408
and 479, 2 x 10 of 4096 169 and 186. By the other one: 3021, 400, 415 and 182; and 2 x 20 of 1024 32 and 32 (H100).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..gluon_support import gluon_missing
from ..inductor_launch import empty, empty_result, launch
from ..layouts import laid_out, side_by_side, strides
from ..op_registry import registered_attention

QUERIES, KEYS = 64, 128  # of a block
QUERIES_IN_GROUPS = 128  # of a program of the kernel for compute capability 9.0
WIDTHS = (64, 128)  # of heads: the kernels take the next larger one
FP8 = torch.float8_e4m3fn
_SAMPLE = 64  # keys whose mean is taken from all
_SMALLEST = 1e-30


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, order: Sequence[int]) -> torch.Tensor:
    """softmax(scale * q @ k.T) @ v for q (B, H, L, E), k and v (B, H, S, E), as q is, in the same precision.

    order: of the result's dimensions in memory, the outermost first. scale: above 0.
    """
    keys = k.shape[2]
    some = torch.arange(_SAMPLE, device=k.device) * keys // _SAMPLE
    wide = k.float() - k.float()[:, :, some].mean(2, keepdim=True)
    k8, k_scale = _blockwise(wide, 127.0)
    v8, v_scale = _blockwise(v.float(), 448.0)
    most = q.float().abs().amax(-1, keepdim=True).clamp_min(_SMALLEST)
    scores = (q.float() * (127.0 / most)).round() @ k8.round().mT
    scores = scores * (most * (scale * math.log2(math.e) / 127.0)) * k_scale[..., None, :]
    summands = v_scale.log2()[..., None, :]
    largest = (scores + summands).amax(-1, keepdim=True)
    p = torch.exp2(scores + summands - largest + 8.0)
    total = (p * torch.exp2(-summands)).sum(-1, keepdim=True)
    result = (p.to(FP8).float() @ v8.to(FP8).float()) / total
    return laid_out(result.to(q.dtype), order)


def _blockwise(x: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, H, S, E) so that each block of KEYS goes up to `largest`, and (B, H, S) what to multiply that by."""
    rows = x.abs().amax(-1)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % KEYS)).unflatten(-1, (-1, KEYS))
    scale = rows.amax(-1).clamp_min(_SMALLEST) / largest
    scale = scale.repeat_interleave(KEYS, -1)[..., : x.shape[2]]
    return x / scale[..., None], scale


@functools.cache
def operator() -> Any:
    """The operator `nexfort::narrow_attention`, as `reference` is."""
    return registered_attention("narrow_attention", reference)


def lowerings() -> dict[Any, Any]:
    """The operator and what Inductor calls for it."""
    return {operator(): _lower}


def width(e: int) -> int:
    """Numbers a head that the kernels compute with for heads of e. Raises ValueError for wider ones."""
    for known in WIDTHS:
        if e <= known:
            return known
    raise ValueError(f"heads have {e} numbers; expected at most {WIDTHS[-1]}")


def slower() -> str | None:
    """Why a card of compute capability 9.0 has the kernel that all cards have, or None."""
    return gluon_missing() if torch.cuda.get_device_capability()[0] == 9 else None


def _in_groups() -> Any:
    """The kernel for cards of compute capability 9.0; it has warps of its own beside four."""
    from .gluon_kernel import attend_in_groups

    return attend_in_groups


def _lower(q: Any, k: Any, v: Any, scale: float, order: Sequence[int]) -> Any:
    """As `reference`, in Inductor's representation."""
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils._sympy.functions import CeilDiv

    from . import triton_kernel as kernels

    q, k, v = (side_by_side(x) for x in (q, k, v))
    batch, heads, queries, e = q.get_size()
    keys = k.get_size()[2]
    e, w = int(e), width(int(e))
    blocks = CeilDiv(keys, KEYS)
    rows = batch * heads
    k8, v8 = (empty(q, [rows, blocks, KEYS * w], dtype) for dtype in (torch.int8, FP8))
    k_scale, v_scale = empty(q, [rows, blocks]), empty(q, [rows, blocks])
    sizes = {"keys": keys, "blocks": blocks, "heads": heads}
    narrow = {"k8": k8, "v8": v8, "k_scale": k_scale, "v_scale": v_scale}
    launch(
        kernels.narrow_keys_values,
        [2 * blocks * rows, 1, 1],
        list(narrow),
        {"k": k, "v": v, **narrow, **sizes, **strides(k, "kb", "kh", "kn"), **strides(v, "vb", "vh", "vn")}
        | {"E": e, "W": w, "N": KEYS, "SAMPLE": _SAMPLE},
    )
    made, result = empty_result(q, order)
    grouped = DeviceProperties.create(q.get_device()).major == 9 and gluon_missing() is None
    each = QUERIES_IN_GROUPS if grouped else QUERIES
    # four warps and three stages are Triton's own: with those said Inductor would make a kernel for each call's sizes
    launch(
        kernels.attend,
        [CeilDiv(queries, each) * rows, 1, 1],
        ["out"],
        {"q": q, **narrow, "out": made, "queries": queries, **sizes}
        | {**strides(q, "qb", "qh", "ql"), **strides(result, "ob", "oh", "ol")}
        | {"SCALE": scale, "E": e, "W": w, "M": each, "N": KEYS},
        _in_groups() if grouped else None,
    )
    return result
