# SPDX-License-Identifier: Apache-2.0
"""A linear layer of factors in int8 or fp8 (e4m3), scales of both, and what is behind it, in one launch.

Behind it may be a bias, GELU, SwiGLU of two layers with one input, a gate and a residual. Sums in 32 bits go through
all of that before they are rounded once, and are not written before. The kernel takes no memory of its own, so it can
be captured in a CUDA graph at any number of rows. Whole numbers are summed exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ..inductor_launch import empty, launch
from ..layouts import aligned, contiguous, side_by_side
from ..op_registry import registered
from . import choice

FACTORS = (torch.int8, torch.float8_e4m3fn)
DTYPES = (torch.float16, torch.bfloat16)
MULTIPLE = 16  # numbers of a row are a multiple of it: a card reads as many bytes at once
MOST_INNER = 2**31 // 128**2  # summands of whole numbers that 32 bits hold
# what is computed of the sums, by the number that the kernel has for it
ACTIVATIONS: Mapping[str, int] = {"": 0, "gelu_tanh": 1, "gelu": 2, "silu": 3}
_SCHEMA = (
    "scaled_linear(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? up, "
    "Tensor? up_scale, Tensor? up_bias, Tensor? gate, Tensor? residual, str activation, SymInt[] sizes, "
    "ScalarType dtype) -> Tensor"
)


def reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    up: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    sizes: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """residual + gate * activation(x @ weight.T + bias) * (x @ up.T + up_bias), (*sizes, N) in `dtype`.

    x (rows, K) and the weights (N, K) are in one of FACTORS. x_scale (rows, or one number), weight_scale and up_scale
    (N, in any shape, or one number): what they are multiplied by, in float32. gate: as the result is, or 1 long where
    one row is for several. residual: as the result is. What is None is left out.
    """
    made = _product(x, x_scale, weight, weight_scale, bias)
    if activation in ("gelu_tanh", "gelu"):
        made = torch.nn.functional.gelu(made, approximate="tanh" if activation == "gelu_tanh" else "none")
    elif activation == "silu":
        made = torch.nn.functional.silu(made)
    if up is not None:
        assert up_scale is not None
        made = made * _product(x, x_scale, up, up_scale, up_bias)
    made = made.reshape([*sizes, weight.shape[0]])
    if gate is not None:
        made = made * gate.to(made.dtype)
    if residual is not None:
        made = made + residual.to(made.dtype)
    return made.to(dtype)


def _product(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x @ weight.T, scaled, plus bias, in the dtype of the scales. Sums of whole numbers are exact."""
    wide = torch.float64 if x.dtype == torch.int8 else x_scale.dtype
    sums = (x.to(wide) @ weight.to(wide).t()).to(x_scale.dtype)
    made = sums * (x_scale.reshape(-1, 1) * weight_scale.reshape(1, -1))
    return made if bias is None else made + bias.to(made.dtype)


@functools.cache
def operator() -> Any:
    """The operator `nexfort::scaled_linear`, as `reference` is."""

    def fake(x: torch.Tensor, *args: Any) -> torch.Tensor:
        weight, (sizes, dtype) = args[1], args[-2:]
        return x.new_empty([*sizes, weight.shape[0]], dtype=dtype)

    return registered(_SCHEMA, reference, fake)


def lowerings() -> dict[Any, Any]:
    """The operator and what Inductor calls for it."""
    return {operator(): _lower}


@functools.cache
def kernel(form: choice.Form) -> Any:
    """The kernel with the warps and stages of a form."""
    import triton

    from .triton_kernel import multiply

    how = triton.Config({}, num_warps=form.warps, num_stages=form.stages)
    return triton.autotune([how], key=[])(multiply)


def _lower(
    x: Any,
    x_scale: Any,
    weight: Any,
    weight_scale: Any,
    bias: Any,
    up: Any,
    up_scale: Any,
    up_bias: Any,
    gate: Any,
    residual: Any,
    activation: str,
    sizes: list[Any],
    dtype: torch.dtype,
) -> Any:
    """As `reference`, in Inductor's representation."""
    from torch._inductor.lowering import view
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import CeilDiv

    known = V.graph.sizevars
    rows = x.get_size()[0]
    columns, inner = (int(size) for size in weight.get_size())
    out = empty(x, [rows, columns], dtype)
    few = known.optimization_hint(rows, fallback=choice.MANY) < choice.MANY
    device = DeviceProperties.create(x.get_device())
    form = choice.form(divmod(device.cc, 10), columns, inner, few=few, up=up is not None)
    programs, gluon = 0, None
    if form.grouped:
        from .gluon_kernel import SCRATCH, multiply_in_groups
        from .triton_kernel import multiply

        programs, gluon = device.multi_processor_count, multiply_in_groups
    tokens, steps = 1, [0, 0]
    if gate is not None:
        gate = side_by_side(gate)
        tokens = sizes[-1]
        found = zip(gate.get_size()[:-1], gate.get_stride()[:-1], strict=True)
        each = [0 if known.statically_known_equals(size, 1) else step for size, step in found]
        steps = [0, 0, *each][-2:]
    x, weight = aligned(contiguous(x)), aligned(contiguous(weight))
    up = up if up is None else aligned(contiguous(up))
    given = {"weight_scale": weight_scale, "x_scale": x_scale, "bias": bias, "up_scale": up_scale, "up_bias": up_bias}
    given |= {"up": up, "residual": residual}
    tensors = {name: weight if part is None else contiguous(part) for name, part in given.items()}
    grid = programs or CeilDiv(rows, form.rows) * -(-columns // form.columns)
    scratch = weight if gluon is None else empty(x, [programs * SCRATCH], torch.uint8)
    launch(
        multiply if gluon else kernel(form),
        [grid, 1, 1],
        ["out"],
        {"x": x, "weight": weight, **tensors, "gate": weight if gate is None else gate, "out": out, "rows": rows}
        | {"tokens": tokens, "gate_batch": steps[0], "gate_token": steps[1], "COLUMNS": columns, "INNER": inner}
        | {"ROW_SCALES": not _is_one(x_scale), "COLUMN_SCALES": not _is_one(weight_scale)}
        | {"ACTIVATION": ACTIVATIONS[activation], "UP": up is not None}
        | {"BIASED": bias is not None, "UP_BIASED": up_bias is not None, "GATED": gate is not None}
        | {"ADDED": residual is not None, **form.blocks(), "scratch": scratch, "PROGRAMS": programs},
        gluon,
    )
    return view(out, [*sizes, columns])


def _is_one(scale: Any) -> bool:
    """Whether a scale is one number."""
    from torch._inductor.virtualized import V

    return all(V.graph.sizevars.statically_known_equals(size, 1) for size in scale.get_size())
