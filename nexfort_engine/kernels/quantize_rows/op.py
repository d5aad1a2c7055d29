# SPDX-License-Identifier: Apache-2.0
"""Rows of a linear layer's input brought to int8, each with a scale: what is before the layer, the rotation (ConvRot:
groups of numbers times a Hadamard matrix) and the rounding in one launch.

The numbers are those that comfy_kitchen's CUDA kernel gives, so that a layer keeps its picture: the rotation in 32
bits, its result, the scale and their quotient rounded to the dtype of the input, ties to even. What is not a number
becomes -128 and does not count for the scale. Where an infinite number is, the scale is about the largest that there
is.

What is before the rotation is rounded once, to the dtype of the input, where eager code rounds at every step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..inductor_launch import empty, launch
from ..layouts import contiguous, side_by_side
from ..op_registry import registered

GROUPS = (0, 16, 64, 256)  # numbers that are rotated together; 0: none
DTYPES = (torch.float16, torch.bfloat16)
LONGEST = 16384  # numbers of a row: a program holds one in registers
# what is computed of the input first, by the number that the kernel has for it
KINDS: Mapping[str, int] = {"": 0, "gelu_tanh": 1, "gelu": 2, "swiglu": 3, "rms_norm": 4, "layer_norm": 5}
_LEAST_BLOCK = 256
_MOST_OF_WHOLE = 0.8  # of the next power of 2, so that two blocks pay
_SCHEMA = (
    "quantize_rows(Tensor x, Tensor? second, Tensor? weight, Tensor? bias, Tensor? factor, Tensor? shift, "
    "str kind, float eps, bool plus_one, int group) -> (Tensor, Tensor)"
)
_FOUR = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))


def hadamard(size: int, like: torch.Tensor) -> torch.Tensor:
    """The normalised regular Hadamard matrix of this size, a power of 4, where `like` is, in its dtype."""
    four = torch.tensor(_FOUR, dtype=like.dtype, device=like.device)
    found = four
    while found.shape[0] < size:
        found = torch.kron(found, four)
    return found / math.sqrt(size)


def prepared(
    x: torch.Tensor,
    second: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    factor: torch.Tensor | None,
    shift: torch.Tensor | None,
    kind: str,
    eps: float,
    plus_one: bool,
) -> torch.Tensor:
    """What is rotated, in the dtype of x: `kind` of x (..., K), times weight plus bias (K), times factor plus shift.

    second (..., K): what is multiplied with silu(x), for "swiglu" alone. factor, shift: as x is, or 1 long where one
    row is for several. plus_one: whether one more than factor is meant.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    found = x.to(wide)
    if kind in ("gelu_tanh", "gelu"):
        found = torch.nn.functional.gelu(found, approximate="tanh" if kind == "gelu_tanh" else "none")
    elif kind == "swiglu":
        assert second is not None
        found = torch.nn.functional.silu(found) * second.to(wide)
    elif kind == "rms_norm":
        found = found * torch.rsqrt(found.square().mean(-1, keepdim=True) + eps)
    elif kind == "layer_norm":
        found = found - found.mean(-1, keepdim=True)
        found = found * torch.rsqrt(found.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        found = found * weight.to(wide)
    if bias is not None:
        found = found + bias.to(wide)
    if factor is not None:
        found = found * (factor.to(wide) + (1.0 if plus_one else 0.0))
    if shift is not None:
        found = found + shift.to(wide)
    return found.to(x.dtype)


def reference(
    x: torch.Tensor,
    second: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    factor: torch.Tensor | None,
    shift: torch.Tensor | None,
    kind: str,
    eps: float,
    plus_one: bool,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in int8 (rows, K) and their scales (rows), in float32, of what `prepared` gives, rotated in groups.

    A row is about its numbers in int8 times its scale.
    """
    given = prepared(x, second, weight, bias, factor, shift, kind, eps, plus_one)
    return quantized(given.reshape(-1, x.shape[-1]), group)


def quantized(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference`, of rows that nothing is computed of before."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    found = rows.to(wide)
    if group:
        found = (found.unflatten(-1, (-1, group)) @ hadamard(group, found)).flatten(-2)
    sizes = found.abs().nan_to_num(0.0, torch.finfo(rows.dtype).max)
    scale = (sizes.amax(-1, keepdim=True).clamp(max=torch.finfo(rows.dtype).max) / 127.0).float().clamp(min=1e-30)
    step = scale.to(rows.dtype)
    step = torch.where(step == 0, torch.finfo(rows.dtype).tiny, step)
    steps = found.to(rows.dtype) / step
    steps = torch.where(steps.isnan(), -128.0, steps.round()).clamp(-128.0, 127.0)
    return steps.to(torch.int8), scale.flatten()


@functools.cache
def operator() -> Any:
    """The operator `nexfort::quantize_rows`, as `reference` is."""

    def fake(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = math.prod(x.shape[:-1])
        return x.new_empty([rows, x.shape[-1]], dtype=torch.int8), x.new_empty([rows], dtype=torch.float32)

    return registered(_SCHEMA, reference, fake)


def lowerings() -> dict[Any, Any]:
    """The operator and what Inductor calls for it."""
    return {operator(): _lower}


def warps(block: int) -> int:
    """Of a program that has so many numbers."""
    return max(2, min(16, block // 1024))


@functools.cache
def kernel(block: int) -> Any:
    """The kernel for rows of so many numbers, with the warps that it is run with."""
    import triton

    from .triton_kernel import quantize

    return triton.autotune([triton.Config({}, num_warps=warps(block), num_stages=1)], key=[])(quantize)


def blocks_of(inner: int) -> tuple[int, int]:
    """Numbers of the two blocks of a program for rows of so many; the second is 0 where one block is hardly larger."""
    whole = max(_LEAST_BLOCK, 1 << (inner - 1).bit_length())
    main = whole // 2
    rest = max(_LEAST_BLOCK, 1 << (inner - main - 1).bit_length()) if main < inner else whole
    return (main, rest) if main >= _LEAST_BLOCK and main + rest <= _MOST_OF_WHOLE * whole else (whole, 0)


def _lower(
    x: Any,
    second: Any,
    weight: Any,
    bias: Any,
    factor: Any,
    shift: Any,
    kind: str,
    eps: float,
    plus_one: bool,
    group: int,
) -> list[Any]:
    """As `reference`, in Inductor's representation."""
    from torch._inductor.lowering import view

    sizes = list(x.get_size())
    inner = int(sizes[-1])
    if len(sizes) > 3:
        assert factor is None and shift is None, "what is per token is for inputs of at most three dimensions"
        sizes = [functools.reduce(lambda a, b: a * b, sizes[:-1], 1), inner]
        x, second = (part if part is None else view(part, sizes) for part in (x, second))
    batch, tokens = [1, 1, *sizes[:-1]][-2:]
    out, scales = empty(x, [batch * tokens, inner], torch.int8), empty(x, [batch * tokens])
    parts = {"x": x, "second": second, "factor": factor, "shift": shift}
    parts = {name: part if part is None else side_by_side(part) for name, part in parts.items()}
    arguments: dict[str, Any] = {}
    for name, part in parts.items():
        arguments[name] = parts["x"] if part is None else part
        arguments[f"{name}_batch"], arguments[f"{name}_token"] = (0, 0) if part is None else _steps(part)
    for name, part in {"weight": weight, "bias": bias}.items():
        arguments[name] = parts["x"] if part is None else contiguous(part)
    block, rest = blocks_of(inner)
    launch(
        kernel(block),
        [batch * tokens, 1, 1],
        ["out", "scales"],
        {**arguments, "out": out, "scales": scales, "tokens": tokens}
        | {"KIND": KINDS[kind], "GROUP": group, "INNER": inner, "BLOCK": block, "REST": rest, "EPS": eps}
        | {"WEIGHTED": weight is not None, "BIASED": bias is not None, "FACTOR": factor is not None}
        | {"PLUS_ONE": plus_one, "SHIFTED": shift is not None},
    )
    return [out, scales]


def _steps(part: Any) -> tuple[Any, Any]:
    """The strides of batch and token of what is as the input is, or one row for several."""
    from torch._inductor.virtualized import V

    known, sizes, strides = V.graph.sizevars, part.get_size()[:-1], part.get_stride()[:-1]
    steps = [0 if known.statically_known_equals(n, 1) else step for n, step in zip(sizes, strides, strict=True)]
    return tuple([0, 0, *steps][-2:])  # type: ignore[return-value]
