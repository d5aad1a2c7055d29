# SPDX-License-Identifier: Apache-2.0
"""The kernel beside its reference, with all that may be behind a product; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from interpreting import some, with_bfloat16, with_numbers, with_rounding

from nexfort_engine.kernels.scaled_linear import choice, op
from nexfort_engine.kernels.scaled_linear.triton_kernel import multiply

with_numbers()
with_bfloat16()
with_rounding()
NAMES = ("bias", "up", "up_scale", "up_bias", "gate", "residual")


def launched(args: tuple[Any, ...], given: dict[str, Any], how: dict[str, Any], form: choice.Form) -> torch.Tensor:
    """What the kernel writes, to memory that held something else."""
    x, x_scale, weight, weight_scale = args
    columns, inner = weight.shape
    rows = x.shape[0]
    out = torch.full((rows, columns), float("nan"), dtype=how["dtype"])
    gate, steps = given["gate"], (0, 0)
    if gate is not None:
        found = [0 if n == 1 else step for n, step in zip(gate.shape[:-1], gate.stride()[:-1], strict=True)]
        steps = tuple([0, 0, *found][-2:])
    grid = -(-rows // form.rows) * -(-columns // form.columns)
    multiply[(grid,)](
        *args,
        **{name: weight if given[name] is None else given[name] for name in NAMES},
        out=out,
        rows=rows,
        tokens=how["sizes"][-1],
        gate_batch=steps[0],
        gate_token=steps[1],
        COLUMNS=columns,
        INNER=inner,
        ROW_SCALES=x_scale.numel() > 1 or rows == 1,
        COLUMN_SCALES=weight_scale.numel() > 1,
        ACTIVATION=op.ACTIVATIONS[how["activation"]],
        UP=given["up"] is not None,
        BIASED=given["bias"] is not None,
        UP_BIASED=given["up_bias"] is not None,
        GATED=gate is not None,
        ADDED=given["residual"] is not None,
        **form.blocks(),
        scratch=weight,
        PROGRAMS=0,
    )
    return out.reshape(*how["sizes"], columns)


def factor(rows: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes that the dtype has, the least and the largest among them."""
    if dtype == torch.int8:
        return torch.randint(-128, 128, (rows, inner), dtype=dtype)
    return (torch.randn(rows, inner) * 20).clamp(-448, 448).to(dtype)


def check(batch: int, tokens: int, columns: int, inner: int, kind: torch.dtype, dtype: torch.dtype, at: int) -> None:
    """Beside the same in float64; nothing is further from it than the reference in float32, which is rounded once."""
    rows = batch * tokens
    form = choice.Form(*((32, 32, 64), (16, 64, 32), (64, 32, 128))[at % 3], 4, 1, at % 2 * 7 + 1)
    per_row, per_column = at % 3 < 2, at % 2 == 0
    args = (factor(rows, inner, kind), torch.rand(rows if per_row else 1) / 50)
    args += (factor(columns, inner, kind), torch.rand((columns, 1) if per_column else (1,)) / 50)
    given: dict[str, Any] = dict.fromkeys(NAMES)
    activation = ("", "gelu_tanh", "gelu", "silu")[at % 4]
    if at % 2:
        given["bias"] = torch.randn(columns).to(dtype)
    if at % 4 == 3:
        given["up"], given["up_scale"] = factor(columns, inner, kind), torch.rand_like(args[3]) / 50
        given["up_bias"] = torch.randn(columns).to(dtype) if at % 8 == 3 else None
    if at % 3:
        given["residual"] = torch.randn(batch, tokens, columns).to(dtype)
    if at % 3 == 2:
        gates = torch.randn(batch, tokens if at % 2 else 1, 3 * columns).to(dtype)
        given["gate"] = gates.chunk(3, -1)[1]
    how = {"activation": activation, "sizes": [batch, tokens], "dtype": dtype}
    out = launched(args, given, how, form)
    plain = op.reference(*args, *given.values(), **how)
    double = [part if part is None else part.double() for part in (*args, *given.values())]
    truth = op.reference(*double, **{**how, "dtype": torch.double})
    far, near = (out.double() - truth).norm(), (plain.double() - truth).norm()
    assert far <= 1.1 * near + 1e-12, ((batch, tokens, columns, inner, kind, dtype, at), far, near)


torch.manual_seed(0)
SHAPES = ((1, 1, 48, 64), (2, 33, 80, 96), (1, 65, 33, 208), (3, 5, 256, 160))
CASES = itertools.product(op.FACTORS, op.DTYPES)
for _, ((kind, dtype), at, shape) in some(
    case for case in enumerate(itertools.product(CASES, range(8), SHAPES)) if (case[0] + case[1][1]) % 3 == 0
):
    check(*shape, kind, dtype, at)
