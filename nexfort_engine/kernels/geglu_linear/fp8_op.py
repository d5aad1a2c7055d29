# SPDX-License-Identifier: Apache-2.0
"""As `gated_linear`, of factors that were brought to fp8 (e4m3), with a scale for each row of both.

The kernel is the same, for the same sizes: a block of it has twice as many numbers of a row, and sums are multiplied by
the scales before the bias is added. They are added up as the card does it by itself, as in torch's own product when
asked to be fast; and rounded once, where that gives bfloat16, which is rounded again with the bias and behind GELU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..op_registry import registered
from .op import multiplied

FP8 = torch.float8_e4m3fn


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """u * gelu(v), (rows, N) in `dtype`, for the halves u and v of x (rows, K) @ weight (2N, K).T + bias (2N).

    x_scale (rows, 1), weight_scale (2N, 1): what rows are multiplied by, in float32. GELU by erf.
    """
    both = (x.float() @ weight.float().t()) * x_scale * weight_scale.t()
    value, gate = (both if bias is None else both + bias.float()).chunk(2, -1)
    return (value * torch.nn.functional.gelu(gate)).to(dtype)


@functools.cache
def operator() -> Any:
    """The operator `nexfort::narrow_gated_linear`, as `reference` is."""
    return registered(
        "narrow_gated_linear(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias, "
        "ScalarType dtype) -> Tensor",
        reference,
        lambda x, weight, x_scale, weight_scale, bias, dtype: x.new_empty(
            [x.shape[0], weight.shape[0] // 2], dtype=dtype
        ),
    )


def lowerings() -> dict[Any, Any]:
    """The operator and what Inductor calls for it."""
    return {operator(): _lower}


def _lower(x: Any, weight: Any, x_scale: Any, weight_scale: Any, bias: Any, dtype: torch.dtype) -> Any:
    """As `reference`, in Inductor's representation."""
    return multiplied(x, weight, bias, dtype, (x_scale, weight_scale))
