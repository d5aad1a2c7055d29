# SPDX-License-Identifier: Apache-2.0
"""Attention by the kernel that was measured to be the fastest for a call's device and shape.

Torch takes its kernels in a fixed order. `nexfort::attention` computes what torch's scaled_dot_product_attention does
without dropout, and asks once which kernel to take: at the first call of a kind, on the call's own tensors
(`tuner.py`), of those that may take it (`backends.py`). The answer is kept on disk beside the artefacts
(`tuning_cache.py`). A pass puts the operator in a graph (passes/tuned_attention.py) where the user asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .backends import KERNELS, Call
from .tuner import Chooser, asked_by

__all__ = ["attention", "chooser", "operator"]

chooser = Chooser(KERNELS)
_libraries: list[torch.library.Library] = []  # an operator goes with its library


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    order: Sequence[int],
    quantised: bool,
) -> torch.Tensor:
    """softmax(scale * query @ key.T + mask) @ value, of one floating-point dtype, by the kernel that was chosen.

    query (B, H, L, E), key (B, G, S, E), value (B, G, S, F); the rest as torch's scaled_dot_product_attention takes it.
    order: of the result's dimensions (B, H, L, F) in memory, the outermost first, whatever kernel ran. quantised:
    kernels that quantise may be taken. Raises what torch's own raises where none can take the call.
    """
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    call = Call(query, key, value, mask, is_causal, scale, enable_gqa)
    return chooser.run(call, tuple(order), quantised, asked_by.get())


def _fake(
    query: Any, key: Any, value: Any, mask: Any, is_causal: Any, scale: Any, enable_gqa: Any, order: Any, quantised: Any
) -> Any:
    return empty_result(query, value, order)


def empty_result(query: Any, value: Any, order: Any) -> Any:
    """A result (B, H, L, F) without its numbers, its dimensions in this order in memory."""
    sizes = (*query.shape[:3], value.shape[3])
    return torch.empty_permuted(sizes, list(order), dtype=query.dtype, device=query.device)


def registered(schema: str, compute: Any, fake: Any, tag: torch.Tag) -> Any:
    """The operator `nexfort::<name>` of a schema, once a process. fake: `compute` for tensors without numbers."""
    name = schema.partition("(")[0]
    library = torch.library.Library("nexfort", "FRAGMENT")
    library.define(schema, tags=(tag,))
    library.impl(name, compute, "CompositeExplicitAutograd")
    library.impl(name, fake, "Meta")  # register_fake would look for its caller's file, which takes a quarter second
    _libraries.append(library)
    return getattr(torch.ops.nexfort, name).default


@functools.cache
def operator() -> Any:
    """The operator `nexfort::attention`, as `attention` is. What loads code that calls it asks for it first."""
    schema = (
        "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, "
        "bool enable_gqa, int[] order, bool quantised) -> Tensor"
    )
    # which kernels take a call depends on how its tensors lie in memory
    return registered(schema, attention, _fake, torch.Tag.needs_exact_strides)
