# SPDX-License-Identifier: Apache-2.0
"""The kernel beside its reference for rows of all kinds; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from interpreting import some, with_bfloat16, with_numbers, with_rounding

from nexfort_engine.kernels.quantize_rows import op
from nexfort_engine.kernels.quantize_rows.triton_kernel import quantize

with_numbers()
with_bfloat16()
with_rounding()


def launched(x: torch.Tensor, given: dict[str, torch.Tensor | None], how: dict[str, Any]) -> tuple[Any, Any]:
    """What the kernel writes, to memory that held something else."""
    batch, tokens, inner = x.shape
    out = torch.full((batch * tokens, inner), 77, dtype=torch.int8)
    scales = torch.full((batch * tokens,), float("nan"))
    tensors = {"x": x, **given}
    arguments: dict[str, Any] = {name: x if part is None else part for name, part in tensors.items()}
    for name in ("x", "second", "factor", "shift"):
        part = tensors[name]
        steps = (0, 0) if part is None else [0 if n == 1 else s for n, s in zip(part.shape, part.stride(), strict=True)]
        arguments |= {f"{name}_batch": steps[0], f"{name}_token": steps[1]}
    block, rest = op.blocks_of(inner)
    flags = {"WEIGHTED": "weight", "BIASED": "bias", "FACTOR": "factor", "SHIFTED": "shift"}
    quantize[(batch * tokens,)](
        **arguments,
        out=out,
        scales=scales,
        tokens=tokens,
        KIND=op.KINDS[how["kind"]],
        GROUP=how["group"],
        INNER=inner,
        BLOCK=block,
        REST=rest,
        EPS=how["eps"],
        PLUS_ONE=how["plus_one"],
        **{flag: tensors[name] is not None for flag, name in flags.items()},
    )
    return out, scales


def check(x: torch.Tensor, given: dict[str, torch.Tensor | None], **how: Any) -> None:
    """Scales are equal but for the last bits, numbers but for ties; both are as near to the truth as the reference."""
    out, scales = launched(x, given, how)
    wanted, steps = op.reference(x, *given.values(), **how)
    told = (x.shape, x.dtype, how)
    assert torch.allclose(scales, steps, rtol=4e-3), (told, (scales / steps - 1).abs().max())
    differ = (out.int() - wanted.int()).abs()
    assert differ.max() <= 2 and (differ > 0).double().mean() <= 0.05, (told, differ.max())
    double = {name: part if part is None else part.double() for name, part in given.items()}
    full = op.prepared(x.double(), *double.values(), *(how[name] for name in ("kind", "eps", "plus_one")))
    full = full.reshape(out.shape)
    if how["group"]:
        full = (full.unflatten(-1, (-1, how["group"])) @ op.hadamard(how["group"], full)).flatten(-2)
    far, near = ((q.double() * s[:, None].double() - full).norm() for q, s in ((out, scales), (wanted, steps)))
    assert far <= 1.02 * near + 1e-12, (told, far, near)


def of(kind: str, batch: int, tokens: int, inner: int, dtype: torch.dtype, modulated: str) -> Any:
    """An input that lies in a wider tensor, and what else its kind takes."""
    x = torch.randn(batch, tokens, 2 * inner + 8).to(dtype)[..., 8 : 8 + inner] * 3
    given: dict[str, torch.Tensor | None] = dict.fromkeys(("second", "weight", "bias", "factor", "shift"))
    if kind == "swiglu":
        given["second"] = torch.randn(batch, tokens, inner).to(dtype)
    if kind.endswith("norm"):
        given["weight"] = torch.rand(inner).to(dtype) + 0.5
    if kind == "layer_norm":
        given["bias"] = torch.randn(inner).to(dtype)
    if modulated:
        rows = tokens if modulated == "tokens" else 1
        given["factor"], given["shift"] = torch.randn(batch, rows, 6 * inner).to(dtype).chunk(6, -1)[2:4]
    return x, given


def edges() -> None:
    """Rows of zeros, of what is not a number, and of what is infinite."""
    for dtype, group in itertools.product(op.DTYPES, (0, 256)):
        x = torch.randn(1, 5, 512).to(dtype)
        x[0, 1], x[0, 2, 3], x[0, 3, 7] = 0.0, float("nan"), float("inf")
        how = {"kind": "", "eps": 0.0, "plus_one": False, "group": group}
        nothing: dict[str, torch.Tensor | None] = dict.fromkeys(("second", "weight", "bias", "factor", "shift"))
        out, scales = launched(x, nothing, how)
        wanted, steps = op.reference(x, *nothing.values(), **how)
        finite = torch.arange(5) != 3  # a row with an infinite number is as large as its dtype, about
        assert torch.allclose(scales[finite], steps[finite], rtol=1e-5), (dtype, group, scales, steps)
        assert scales.isfinite().all() and scales[3] >= steps[3] / 32, (dtype, group, scales, steps)
        assert (out[1] == 0).all() and 0 < scales[1] <= 1.1e-30, (dtype, group, out[1], scales[1])
        assert (out.int() - wanted.int())[finite].abs().max() <= 1, (dtype, group)


def cases() -> Iterator[tuple[int, str, tuple[int, int, int], torch.dtype, int]]:
    """A number of the kind, the kind, sizes, dtype and group."""
    shapes = ((1, 1, 256), (2, 3, 768), (1, 7, 1280), (3, 1, 2304))
    for (number, kind), (batch, tokens, inner), dtype in itertools.product(enumerate(op.KINDS), shapes, op.DTYPES):
        if batch * tokens > 6 and kind not in ("", "rms_norm"):
            continue
        for group in op.GROUPS if inner == 768 else (op.GROUPS[(number + inner) % 4],):
            yield number, kind, (batch, tokens, inner), dtype, group


torch.manual_seed(0)
for number, kind, shape, dtype, group in some(cases()):
    modulated = ("", "batch", "tokens")[number % 3] if kind.endswith("norm") else ""
    x, given = of(kind, *shape, dtype, modulated)
    check(x, given, kind=kind, eps=1e-6, plus_one=number % 2 == 0, group=group)
x, given = of("", 2, 2, 48, torch.half, "")
check(x, given, kind="", eps=0.0, plus_one=False, group=16)
edges()
