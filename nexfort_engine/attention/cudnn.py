# SPDX-License-Identifier: Apache-2.0
"""Attention of many tokens by cuDNN's kernel, and the rest by torch's own choice.

ComfyUI has torch take its flash kernel before cuDNN's. That kernel is written for compute capability 8.0. On an H200
cuDNN's kernel took 0.51 to 0.67 of its time at 512 to 14,040 tokens in bfloat16, and more time at 77 keys (torch 2.11,
2026-11-27). `nexfort::cudnn_attention` decides at each call by the call's sizes. It takes no mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .backends import Call, Kernel, nvidia, own
from .operator import empty_result, registered
from .tuner import laid

__all__ = ["LEAST", "attention", "operator"]

LEAST = 512  # tokens: cuDNN's kernel is taken for at least so many queries and so many keys
_MOST = 512  # kinds of calls of which is remembered whether cuDNN takes them
_takes: dict[Any, bool] = {}


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    order: Sequence[int],
) -> torch.Tensor:
    """softmax(scale * query @ key.T) @ value, of one dtype, float16 or bfloat16.

    query (B, H, L, E), key (B, G, S, E), value (B, G, S, F); the rest as torch's scaled_dot_product_attention takes it.
    order: of the result's dimensions (B, H, L, F) in memory, the outermost first, whatever kernel ran. Raises what
    torch's own raises where none can take the call.
    """
    call = Call(query, key, value, None, is_causal, scale, enable_gqa)
    kernel = _cudnn() if query.is_cuda and min(query.shape[2], key.shape[2]) >= LEAST else None
    if kernel is not None and kernel.enabled() and _fits(kernel, call):
        return laid(kernel.run(call), tuple(order))
    return laid(own(call), tuple(order))


@functools.cache
def _cudnn() -> Kernel:
    return next(kernel for kernel in nvidia() if kernel.name == "cudnn")


def _fits(kernel: Kernel, call: Call) -> bool:
    """Whether torch would give a call to cuDNN. It is asked once for calls of these sizes."""
    tensors = call[:3]
    kind = (*((t.shape, t.stride(), t.dtype, t.device) for t in tensors), call.is_causal, call.enable_gqa)
    found = _takes.get(kind)
    if found is None:
        if len(_takes) >= _MOST:
            _takes.clear()
        found = _takes[kind] = kernel.problem(call) is None
    return found


def _fake(query: Any, key: Any, value: Any, is_causal: Any, scale: Any, enable_gqa: Any, order: Any) -> Any:
    return empty_result(query, value, order)


@functools.cache
def operator() -> Any:
    """The operator `nexfort::cudnn_attention`, as `attention` is. What loads code that calls it asks for it first."""
    schema = (
        "cudnn_attention(Tensor query, Tensor key, Tensor value, bool is_causal, float? scale, bool enable_gqa, "
        "int[] order) -> Tensor"
    )
    # the numbers of a head lie side by side; no more is needed
    return registered(schema, attention, _fake, torch.Tag.needs_fixed_stride_order)
