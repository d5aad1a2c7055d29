# SPDX-License-Identifier: Apache-2.0
"""Attention of many tokens by cuDNN's kernel, and the rest by torch's own choice.

ComfyUI has torch take its flash kernel before cuDNN's. That kernel is written for compute capability 8.0. On an H200
cuDNN's kernel took 0.51 to 0.67 of its time at 512 to 14,040 tokens in bfloat16, and more time at 77 keys (torch 2.11,
2026-11-27). `nexfort::cudnn_attention` decides at each call by the call's sizes. It takes no mask.

The kernel is called by its own operator and not by `torch.nn.attention.sdpa_kernel`. The switches of that context
belong to the process, so a model that runs eager in another thread would take another kernel meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

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
    if _is_for_cudnn(query, key, value, is_causal, enable_gqa):
        given = (query, key, value, None, False, 0.0, is_causal, False)
        found = torch.ops.aten._scaled_dot_product_cudnn_attention.default(*given, scale=scale)[0]
    else:
        found = functional.scaled_dot_product_attention(
            query, key, value, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return _laid(found, tuple(order))


def _is_for_cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, enable_gqa: bool
) -> bool:
    """Whether the call has many tokens, the user did not switch cuDNN's kernel off, and torch would give it the call.

    Torch is asked once for calls of these sizes.
    """
    if not query.is_cuda or min(query.shape[2], key.shape[2]) < LEAST or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    kind = (*((t.shape, t.stride(), t.dtype, t.device) for t in (query, key, value)), is_causal, enable_gqa)
    found = _takes.get(kind)
    if found is None:
        if len(_takes) >= _MOST:
            _takes.clear()
        params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, is_causal, enable_gqa)
        found = _takes[kind] = torch.backends.cuda.can_use_cudnn_attention(params)
    return found


def _laid(result: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """A tensor with its dimensions in this order in memory, the outermost first; itself where it lies so."""
    step, sizes, strides = 1, result.shape, result.stride()
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            wanted = torch.empty_permuted(sizes, order, dtype=result.dtype, device=result.device)
            return wanted.copy_(result)
        step *= sizes[dim]
    return result


def _fake(query: Any, key: Any, value: Any, is_causal: Any, scale: Any, enable_gqa: Any, order: Any) -> Any:
    """A result (B, H, L, F) without its numbers."""
    sizes = (*query.shape[:3], value.shape[3])
    return torch.empty_permuted(sizes, list(order), dtype=query.dtype, device=query.device)


_libraries: list[torch.library.Library] = []  # an operator goes with its library


@functools.cache
def operator() -> Any:
    """The operator `nexfort::cudnn_attention`, as `attention` is. What loads code that calls it asks for it first."""
    schema = (
        "cudnn_attention(Tensor query, Tensor key, Tensor value, bool is_causal, float? scale, bool enable_gqa, "
        "int[] order) -> Tensor"
    )
    library = torch.library.Library("nexfort", "FRAGMENT")
    # the numbers of a head lie side by side; no more is needed
    library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl("cudnn_attention", attention, "CompositeExplicitAutograd")
    library.impl("cudnn_attention", _fake, "Meta")  # register_fake looks for its caller's file, a quarter second
    _libraries.append(library)
    return torch.ops.nexfort.cudnn_attention.default
