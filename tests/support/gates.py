# SPDX-License-Identifier: Apache-2.0
"""Layers with a gate between their halves, and some that look like it, for the tests of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gpu_blocks
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import gelu, linear

Tensor = torch.Tensor
WIDTH = 256  # of each half


def exported(
    function: Callable[..., Any], weights: Sequence[Tensor], rows: tuple[int, ...], dtype: torch.dtype, device: str
) -> torch.fx.GraphModule:
    """The graph of a function of rows and weights like these, in sizes that are symbols."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        held = [torch.empty(w.shape, dtype=w.dtype, device=device) for w in weights]
        x = torch.empty(rows, dtype=dtype, device=device)
    return gpu_blocks.exported(lambda w, x: function(x, *w), held, [x], [range(len(rows) - 1)])


def layer_like(width: int, inner: int, dtype: torch.dtype) -> list[Tensor]:
    """Weight and bias of one with such halves."""
    return [torch.empty(2 * width, inner, dtype=dtype), torch.empty(2 * width, dtype=dtype)]


def chunked(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The gate as SD and SDXL have it."""
    value, gate = linear(x, w, b).chunk(2, -1)
    return value * gelu(gate)


def split(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Without a bias."""
    value, gate = linear(x, w).split(WIDTH, dim=2)
    return gelu(gate) * value


def sliced(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """By places."""
    both = linear(x, w, b)
    return both[..., :WIDTH] * gelu(both[..., WIDTH:])


def gate_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The other half through GELU."""
    gate, value = linear(x, w, b).chunk(2, -1)
    return value * gelu(gate)


def whole_read(x: Tensor, w: Tensor, b: Tensor) -> Any:
    """With what the layer makes read by others."""
    both = linear(x, w, b)
    value, gate = both.chunk(2, -1)
    return value * gelu(gate), both
