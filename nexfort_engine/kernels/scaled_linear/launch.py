# SPDX-License-Identifier: Apache-2.0
"""The kernels of layers in 8 bits, launched from Python and not by lowered code: what is timed alone."""

from __future__ import annotations

from typing import Any

import torch

from ..quantize_rows import op as quantize_rows
from . import choice
from . import op as scaled_linear

T = torch.Tensor


def rows_in_int8(
    x: T, kind: str, group: int, factor: T | None = None, shift: T | None = None, second: T | None = None
) -> tuple[T, T]:
    """`nexfort::quantize_rows` of x (batch, tokens, K). factor, shift: (batch, 1, K), the first with one more."""
    from ..quantize_rows.triton_kernel import quantize

    batch, tokens, inner = x.shape
    out = torch.empty(batch * tokens, inner, dtype=torch.int8, device=x.device)
    scales = torch.empty(batch * tokens, device=x.device)
    given: dict[str, Any] = {"x": x, "second": second, "factor": factor, "shift": shift, "weight": None, "bias": None}
    arguments: dict[str, Any] = {name: x if part is None else part for name, part in given.items()}
    for name in ("x", "second", "factor", "shift"):
        part = given[name]
        sizes = (1, 1, inner) if part is None else part.shape
        steps = [0 if size == 1 else step for size, step in zip(sizes, arguments[name].stride(), strict=True)]
        arguments |= {f"{name}_batch": steps[0], f"{name}_token": steps[1]}
    block, rest = quantize_rows.blocks_of(inner)
    quantize[(batch * tokens,)](
        **arguments,
        out=out,
        scales=scales,
        tokens=tokens,
        KIND=quantize_rows.KINDS[kind],
        GROUP=group,
        INNER=inner,
        BLOCK=block,
        REST=rest,
        EPS=1e-6,
        WEIGHTED=False,
        BIASED=False,
        FACTOR=factor is not None,
        PLUS_ONE=True,
        SHIFTED=shift is not None,
        num_warps=quantize_rows.warps(block),
        num_stages=1,
    )
    return out, scales


def product(
    x: T,
    x_scale: T,
    weight: T,
    weight_scale: T,
    form: choice.Form,
    dtype: torch.dtype,
    *,
    bias: T | None = None,
    up: tuple[T, T] | None = None,
    gate: T | None = None,
    residual: T | None = None,
    activation: str = "",
) -> T:
    """`nexfort::scaled_linear` in a form. up: a weight and its scales. gate: one row (1, N) for all."""
    from .triton_kernel import multiply

    (rows, inner), columns = x.shape, weight.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    given = {"bias": bias, "gate": gate, "residual": residual, "up_bias": None}
    given |= {"up": None, "up_scale": None} if up is None else dict(zip(("up", "up_scale"), up, strict=True))
    scratch: T | None
    kernel, programs, scratch = multiply, -(-rows // form.rows) * -(-columns // form.columns), weight
    if form.grouped:
        kernel, programs, scratch = _grouped(), torch.cuda.get_device_properties(x.device).multi_processor_count, None
    kernel[(programs,)](
        x,
        x_scale,
        weight,
        weight_scale,
        **{name: weight if part is None else part for name, part in given.items()},
        out=out,
        rows=rows,
        tokens=rows,
        gate_batch=0,
        gate_token=0,
        COLUMNS=columns,
        INNER=inner,
        ROW_SCALES=x_scale.numel() > 1,
        COLUMN_SCALES=weight_scale.numel() > 1,
        ACTIVATION=scaled_linear.ACTIVATIONS[activation],
        UP=up is not None,
        BIASED=bias is not None,
        UP_BIASED=False,
        GATED=gate is not None,
        ADDED=residual is not None,
        num_warps=form.warps,
        num_stages=form.stages,
        **form.blocks(),
        scratch=scratch,
        PROGRAMS=programs if form.grouped else 0,
    )
    return out


def _grouped() -> Any:
    """The kernel in Gluon, with memory for the descriptors that it writes."""
    import triton

    from .gluon_kernel import multiply_in_groups

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    return multiply_in_groups
