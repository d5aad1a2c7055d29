# SPDX-License-Identifier: Apache-2.0
"""The kernels that attention is chosen from: torch's by their own operators, and those of packages where installed.

Not by `torch.nn.attention.sdpa_kernel`: its switches belong to the process, so a model that runs eager in another
thread would take another kernel meanwhile, and two threads that leave it in turn would leave the switches changed. What
the user switched off there is no candidate; a package's kernel counts as flash.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

aten = torch.ops.aten
OWN = "torch"  # what torch takes by itself
_HALF = (torch.float16, torch.bfloat16)
_MASKED_BY_CUDNN = -65504.0  # it gives NaN for rows of infinities alone; torch's own choice hands it this number too


class Call(NamedTuple):
    """What attention is asked for; see `operator.attention`. A mask has four dimensions."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@dataclass(frozen=True)
class Kernel:
    """One way to compute a call.

    run: its result (B, H, L, F), in any layout. problem: why it does not take a call, or None. enabled: whether the
    user lets it be used. version: of what it comes with, where that is not torch's own. quantises: it is of lower
    precision than its inputs.
    """

    name: str
    run: Callable[[Call], torch.Tensor]
    problem: Callable[[Call], str | None] = lambda call: None
    enabled: Callable[[], bool] = lambda: True
    version: str = ""
    quantises: bool = False


def own(call: Call) -> torch.Tensor:
    """By the kernel that torch takes."""
    return functional.scaled_dot_product_attention(
        call.query, call.key, call.value, call.mask, 0.0, call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
    )


def _cudnn(call: Call) -> torch.Tensor:
    mask = _added(call, _MASKED_BY_CUDNN)
    found = aten._scaled_dot_product_cudnn_attention.default(
        call.query, call.key, call.value, mask, False, 0.0, call.is_causal, False, scale=call.scale
    )
    return found[0]


def _flash(call: Call) -> torch.Tensor:
    width = call.query.shape[-1]
    more = -width % 8  # it takes multiples of 8, and zeros change no product
    tensors = call[:3] if not more else [functional.pad(t, (0, more)) for t in call[:3]]
    found = aten._scaled_dot_product_flash_attention.default(
        *tensors, 0.0, call.is_causal, False, scale=1 / math.sqrt(width) if call.scale is None else call.scale
    )
    return found[0][..., :width] if more else found[0]


def _efficient(call: Call) -> torch.Tensor:
    mask = _added(call, -math.inf)
    if mask is not None:
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            mask = functional.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]]  # it reads 8 numbers at once
        mask = mask.expand(*call.query.shape[:3], call.key.shape[2])
    found = aten._scaled_dot_product_efficient_attention.default(
        *call[:3], mask, False, 0.0, call.is_causal, scale=call.scale
    )
    return found[0]


def _added(call: Call, masked: float) -> torch.Tensor | None:
    """The mask as numbers that are added to scores."""
    if call.mask is None or call.mask.dtype is not torch.bool:
        return call.mask
    zero = torch.zeros((), dtype=call.query.dtype, device=call.mask.device)
    return torch.where(call.mask, zero, masked)


def _flash_3(call: Call) -> torch.Tensor:
    attend = importlib.import_module("flash_attn_interface").flash_attn_func
    found = attend(*(t.transpose(1, 2) for t in call[:3]), softmax_scale=call.scale, causal=call.is_causal)
    return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)  # some versions give more


def _sage(call: Call) -> torch.Tensor:
    attend = importlib.import_module("sageattention").sageattn
    found: torch.Tensor = attend(*call[:3], tensor_layout="HND", is_causal=call.is_causal, sm_scale=call.scale)
    return found


def _torchs(may: Callable[[Any], bool]) -> Callable[[Call], str | None]:
    """Why torch itself would not give a call to one of its kernels."""

    def problem(call: Call) -> str | None:
        query, key, value, mask, is_causal, _, enable_gqa = call
        if mask is not None and mask.dtype not in (torch.bool, query.dtype):
            return f"the mask is in {mask.dtype}"
        params = torch.backends.cuda.SDPAParams(query, key, value, mask, 0.0, is_causal, enable_gqa)
        return None if may(params) else "torch does not give it such a call"

    return problem


def _packages(most: int) -> Callable[[Call], str | None]:
    """Why a package's kernel for up to `most` numbers a head does not take a call."""

    def problem(call: Call) -> str | None:
        query, key, value = call[:3]
        if call.mask is not None:
            return "it takes no mask"
        if call.is_causal and query.shape[2] != key.shape[2]:
            return "its causal masks begin elsewhere where lengths differ"
        if query.dtype not in _HALF or any(t.stride(-1) != 1 for t in call[:3]):
            return "it takes 16 bits that lie side by side"
        width = query.shape[-1]
        return None if width == value.shape[-1] and width <= most and width % 8 == 0 else "it takes no such heads"

    return problem


def _installed(module: str, *distributions: str) -> str | None:
    """The version of a package, without importing it; None if it is not there."""
    if importlib.util.find_spec(module) is None:
        return None
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def nvidia() -> Sequence[Kernel]:
    """Those for NVIDIA's cards."""
    cuda = torch.backends.cuda
    found = [
        Kernel(
            "cudnn",
            _cudnn,
            _torchs(cuda.can_use_cudnn_attention),
            cuda.cudnn_sdp_enabled,
            str(torch.backends.cudnn.version()),
        ),
        Kernel("flash", _flash, _torchs(cuda.can_use_flash_attention), cuda.flash_sdp_enabled),
        Kernel("efficient", _efficient, _torchs(cuda.can_use_efficient_attention), cuda.mem_efficient_sdp_enabled),
    ]
    if version := _installed("flash_attn_interface", "flash_attn_3", "flash-attn-3"):
        found.append(Kernel("flash3", _flash_3, _packages(256), cuda.flash_sdp_enabled, version))
    if version := _installed("sageattention", "sageattention"):
        found.append(Kernel("sage", _sage, _packages(128), cuda.flash_sdp_enabled, version, quantises=True))
    return found


# by the type of a call's device; for others torch's own choice stands
KERNELS: dict[str, Callable[[], Sequence[Kernel]]] = {"cuda": nvidia}
