# SPDX-License-Identifier: Apache-2.0
"""Blocks with layers in int8 as ComfyUI's files have them: what captures see of them. No test lives here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import comfy_kitchen  # noqa: F401  # its operators
import torch
from gpu_blocks import exported
from torch.nn import functional

from nexfort_engine.capture.types import Captured
from nexfort_engine.guards.shape_guards import Conditions

T = torch.Tensor
WIDTH, HIDDEN, GROUP = 256, 512, 64
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def linear(x: T, w: Sequence[T], bias: T | None = None, act: str | None = None, group: int = GROUP) -> T:
    """What ComfyUI's layers call. w: the weight in int8 and its scales."""
    return torch.ops.comfy_kitchen.int8_linear(x, w[0], w[1], bias, CODES[x.dtype], group > 0, group or 256, act)


def sandwich(w: Sequence[T], x: T, modulation: T) -> T:
    """Norms before and behind layers, and SwiGLU of two of them: Z-Image."""
    scale, gate, more, last = modulation.unsqueeze(1).chunk(4, -1)
    h = functional.rms_norm(x, [WIDTH], w[0], 1e-5) * (1 + scale)
    q, k, v = linear(h, w[1:3]).chunk(3, -1)
    heads = (part.reshape(*x.shape[:2], 4, 64).transpose(1, 2) for part in (q, k, v))
    seen = functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
    x = x + gate.tanh() * functional.rms_norm(linear(seen, w[3:5]), [WIDTH], w[0], 1e-5)
    h = functional.rms_norm(x, [WIDTH], w[0], 1e-5) * (1 + more)
    h = functional.silu(linear(h, w[5:7])) * linear(h, w[7:9])
    return x + last.tanh() * functional.rms_norm(linear(h, w[9:11]), [WIDTH], w[0], 1e-5)


def gated(w: Sequence[T], x: T, modulation: T) -> T:
    """Layer norms with modulation before layers, gates and residuals behind: Qwen-Image, Wan, Flux."""
    parts = modulation.unsqueeze(1).chunk(6, -1)
    h = torch.addcmul(parts[0], functional.layer_norm(x, [WIDTH], eps=1e-6), 1 + parts[1])
    q, k, v = (linear(h, w[i : i + 2], w[i + 2]) for i in (0, 3, 6))
    heads = (part.reshape(*x.shape[:2], 4, 64).transpose(1, 2) for part in (q, k, v))
    seen = functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
    x = torch.addcmul(x, functional.dropout(linear(seen, w[9:11]), 0.0, False), parts[2])
    h = functional.layer_norm(x, [WIDTH], eps=1e-6) * (1 + parts[4]) + parts[3]
    h = functional.dropout(functional.gelu(linear(h, w[11:13], w[13]), approximate="tanh"), 0.0, False)
    return x + parts[5] * linear(h, w[14:16], w[16], group=16)


def halves(w: Sequence[T], x: T, modulation: T) -> T:
    """SwiGLU and GELU that the operator computes of its input; a residual without a gate; GELU that all read."""
    h = linear(functional.layer_norm(x, [WIDTH], w[0], w[1], 1e-6), w[2:4], group=0)
    x = linear(h, w[4:6], None, "swiglu", 0) + x
    both = functional.gelu(linear(x, w[6:8]))
    return x + linear(linear(x, w[8:10]), w[10:12], None, "gelu_tanh") + both.mean(-1, keepdim=True)


def eighths(w: Sequence[T], x: T, modulation: T) -> T:
    """Layers in fp8 with one scale each for input and weight, three of them with one input."""
    h = functional.rms_norm(x, [WIDTH], w[0], 1e-5) * (1 + modulation[:, None])
    rows, one = h.reshape(-1, WIDTH), w[4]

    def product(weight: T) -> T:
        narrow = torch.ops.comfy_kitchen.quantize_fp8(rows, one, 5)
        return torch._scaled_mm(narrow, weight.t(), one, one, out_dtype=x.dtype)

    return (product(w[1]) + product(w[2]) * product(w[3])).reshape(x.shape)


def _weight(columns: int, inner: int) -> list[Any]:
    return [(columns, inner, torch.int8), (columns, 1, torch.float32)]


BLOCKS: dict[str, tuple[Callable[..., T], list[Any], int]] = {
    "sandwich": (
        sandwich,
        [
            *[(WIDTH,), *_weight(3 * WIDTH, WIDTH), *_weight(WIDTH, WIDTH)],
            *[*_weight(HIDDEN, WIDTH), *_weight(HIDDEN, WIDTH), *_weight(WIDTH, HIDDEN)],
        ],
        4,
    ),
    "gated": (
        gated,
        [
            *[*_weight(WIDTH, WIDTH), (WIDTH,)] * 3,
            *[*_weight(WIDTH, WIDTH), *_weight(HIDDEN, WIDTH), (HIDDEN,), *_weight(WIDTH, HIDDEN), (WIDTH,)],
        ],
        6,
    ),
    "halves": (
        halves,
        [
            *[(WIDTH,), (WIDTH,), *_weight(2 * HIDDEN, WIDTH), *_weight(WIDTH, HIDDEN)],
            *[*_weight(WIDTH, WIDTH), *_weight(HIDDEN, WIDTH), *_weight(WIDTH, HIDDEN)],
        ],
        1,
    ),
}
NARROW = {"eighths": (eighths, [(WIDTH,), *[(WIDTH, WIDTH, torch.float8_e4m3fn)] * 3, (torch.float32,)], 1)}


def weights(kind: str, dtype: torch.dtype, make: Callable[..., T]) -> list[T]:
    """A block's. make: of a shape and a dtype."""
    shapes = {**BLOCKS, **NARROW}[kind][1]
    return [make(s[:-1], s[-1]) if isinstance(s[-1], torch.dtype) else make(s, dtype) for s in shapes]


def random(seed: int, device: str = "cpu") -> Callable[[Sequence[int], torch.dtype], T]:
    """Makes tensors of random numbers, of a size that layers keep."""
    draw = torch.Generator(device).manual_seed(seed)

    def make(shape: Sequence[int], dtype: torch.dtype) -> T:
        if dtype == torch.int8:
            return torch.randint(-127, 128, shape, dtype=dtype, generator=draw, device=device)
        if len(shape) == 2 and shape[1] == 1:
            return torch.rand(shape, generator=draw, device=device) / 1000
        return torch.randn(shape, generator=draw, device=device).to(dtype)

    return make


def graph_of(
    kind: str,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda:0",
    tokens: int = 512,
    change: Callable[[list[T]], None] = lambda w: None,
    function: Callable[..., Any] | None = None,
) -> torch.fx.GraphModule:
    """Captured with the batch and the number of tokens as symbols. change: of the weights, before."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    known, _, parts = {**BLOCKS, **NARROW}[kind]
    with FakeTensorMode(shape_env=ShapeEnv()):
        own = weights(kind, dtype, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
        change(own)
        shapes = ((2, tokens, WIDTH), (2, parts * WIDTH))
        inputs = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    return exported(function or known, own, inputs, [(0, 1), (0,)])


def captured(kind: str) -> Captured:
    """A block as a process with a GPU captures it."""
    named = list(range(len({**BLOCKS, **NARROW}[kind][1])))
    nothing = Conditions([], [])
    return Captured(
        graph_of(kind),
        named,
        [],
        [],
        [],
        [],
        [],
        nothing,
        [],
        [],
        None,
        [],
        [],
        {},
        ["comfy_kitchen"],
        [True] * len(named),
    )


def plain(kind: str) -> Captured:
    """The same, whose products are by the kernel in Triton in the worker that lowers it."""
    found = captured(kind)
    found.modules.append("plain_products")
    return found


def truth(x: T, w: Sequence[T], group: int = GROUP) -> T:
    """The layer in float64, with its input as it is."""
    from nexfort_engine.kernels.quantize_rows.op import hadamard

    given = x.double()
    if group:
        given = (given.unflatten(-1, (-1, group)) @ hadamard(group, given)).flatten(-2)
    return given @ (w[0].double() * w[1].double()).t()


def size(x: T) -> float:
    """The norm of all numbers."""
    return math.sqrt(float(x.double().square().sum()))
