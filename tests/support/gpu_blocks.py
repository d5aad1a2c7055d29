# SPDX-License-Identifier: Apache-2.0
"""Blocks for a GPU in half precision: residual, transformer, products in fp8. Captured and lowered without a GPU."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_video_blocks import INPLACE, VIDEOS
from torch import nn
from torch.nn import functional

from nexfort_engine.capture.types import Captured
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.guards.shape_guards import Conditions
from nexfort_engine.lowering import worker_pool
from nexfort_engine.modules import channels_last
from nexfort_engine.passes import rotary

CHANNELS, WIDTH, EMBEDDING = 64, 128, 256
Tensors = list[torch.Tensor]


def residual(w: Tensors, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    h = functional.conv2d(functional.silu(functional.group_norm(x, 32, w[0], w[1])), w[2], w[3], padding=1)
    h = h + functional.linear(functional.silu(embedding), w[4], w[5])[:, :, None, None]
    return x + functional.conv2d(functional.silu(functional.group_norm(h, 32, w[6], w[7])), w[8], w[9], padding=1)


def shortened(w: Tensors, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Such a block from more channels to fewer, whose results are looked at as rows too."""
    h = functional.conv2d(functional.silu(functional.group_norm(x, 32, w[0], w[1])), w[2], w[3], padding=1)
    h = h + functional.linear(functional.silu(embedding), w[4], w[5])[:, :, None, None]
    h = functional.conv2d(functional.silu(functional.group_norm(h, 32, w[6], w[7])), w[8], w[9], padding="same")
    rows = functional.conv2d(h, w[8], w[9], padding=1).view(h.shape[0], h.shape[1], -1).mean(2)
    return functional.conv2d(x, w[10], w[11]) + h + rows[:, :, None, None]


def upsampled(w: Tensors, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    """To the double, and to the sizes of another image, which need not be such."""
    h = functional.conv2d(functional.interpolate(x, scale_factor=2.0, mode="nearest"), w[0], w[1], padding=1)
    tall = functional.interpolate(h, size=skip.shape[2:], mode="nearest")
    return skip + functional.conv2d(tall, w[2], padding="same")


def convolved_rows(w: Tensors, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Tokens as an image, the number of whose channels is what is left."""
    image = x.reshape(x.shape[0], like.shape[2], like.shape[3], -1).permute(0, 3, 1, 2)
    return functional.conv2d(image, w[0], w[1], padding=1)


def convolved_behind(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """An image that begins two bytes behind an address."""
    return functional.conv2d(x[1:].view(2, 64, 64, 320).permute(0, 3, 1, 2), w[0], w[1], padding=1)


def transformer(w: Tensors, x: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    batch, tokens, width = x.shape
    parts = functional.linear(functional.layer_norm(x, [width], w[0], w[1]), w[2]).chunk(3, -1)
    q, k, v = (part.view(batch, tokens, width // 64, 64).transpose(1, 2) for part in parts)
    seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
    x = x + functional.linear(seen, w[3], w[4])
    more = functional.linear(
        functional.gelu(functional.linear(functional.layer_norm(x, [width], w[5], w[6]), w[7], w[8])), w[9], w[10]
    )
    return x + (more.float() * strength).to(x.dtype)


def masked(w: Tensors, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Causal attention, and one with a mask that is the same for all heads and rows, of fewer heads of keys."""
    batch, tokens, width = x.shape
    q, k, v = (functional.linear(x, weight).view(batch, tokens, -1, 64).transpose(1, 2) for weight in w[:3])
    mask = kept[:, None, None].expand(batch, 1, tokens, tokens)
    seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.1, enable_gqa=True)
    more = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return x + (seen + more).transpose(1, 2).reshape(batch, tokens, width)


def feed_forward(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(functional.gelu(functional.linear(x, w[0], w[1])), w[2], w[3])


def gelus(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """A feed-forward with GELU's tanh form, and a gated one, whose GELU is multiplied by something in its kernel."""
    h = functional.layer_norm(x, [x.shape[-1]], w[0], w[1])
    more = functional.gelu(functional.linear(h, w[2], w[3]), approximate="tanh")
    gated = functional.gelu(functional.linear(h, w[2], w[3]), approximate="tanh") * functional.linear(h, w[4], w[5])
    return (
        x + functional.linear(functional.dropout(more, 0.1, False), w[6], w[7]) + functional.linear(gated, w[6], w[7])
    )


def wide(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Self-attention and a gated feed-forward of a width whose rows have a kernel to themselves."""
    batch, tokens, width = x.shape
    h = functional.layer_norm(x, [width], w[0], w[1])
    parts = (functional.linear(h, weight).view(batch, tokens, 20, 64).transpose(1, 2) for weight in w[2:5])
    seen = functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(batch, tokens, width)
    x = functional.linear(seen, w[5], w[6]) + x
    h = functional.linear(functional.layer_norm(x, [width], w[0], w[1]), w[7], w[8])
    values, gates = h.chunk(2, -1)
    return functional.linear(values * functional.gelu(gates), w[9], w[10]) + x


def looking(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """What a decoder has in its middle: one head of all channels."""
    h = functional.group_norm(x, 32, w[0], w[1])
    q, k, v = (functional.conv2d(h, weight).flatten(2).transpose(1, 2)[:, None].contiguous() for weight in w[2:5])
    seen = functional.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(x.shape)
    return x + functional.conv2d(seen, w[5])


def long(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Self-attention of so many tokens that it pays in 8 bits."""
    batch, tokens, width = x.shape
    parts = (functional.linear(x, weight).view(batch, tokens, width // 128, 128).transpose(1, 2) for weight in w[:3])
    seen = functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(batch, tokens, width)
    return x + functional.linear(seen, w[3])


LAYERS = 6


def turned_heads(w: Tensors, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Heads with a norm of their own, turned in pairs by a table for each row of the batch."""
    heads = functional.linear(x, w[0]).unflatten(-1, (-1, 64))
    return rotary.turned(functional.rms_norm(heads, [64], w[1]), table, like=heads, table_like=table)


def turned_rows(w: Tensors, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Heads with one norm for all, turned in pairs by a table for the whole batch; what the norm gives is kept too."""
    rows = functional.rms_norm(functional.linear(x, w[0]), [w[1].numel()], w[1])
    heads = rows.unflatten(-1, (-1, 64))
    return torch.stack([heads, rotary.turned(heads, table, like=heads, table_like=table)])


def turned_alone(w: Tensors, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Heads without a norm."""
    heads = functional.linear(x, w[0]).unflatten(-1, (-1, 64))
    return rotary.turned(heads, table, like=heads, table_like=table)


def joined(w: Tensors, x: torch.Tensor, more: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    """A norm of a sum that has one number for each row of the batch in it."""
    x = x + more * strength[:, None]
    return functional.linear(functional.layer_norm(x, [x.shape[-1]]) * (1 + strength[:, None]), w[0]) + x


def stack(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Such layers one after another, each with weights of its own."""
    for i in range(0, len(w), len(w) // LAYERS):
        x = wide(w[i : i + len(w) // LAYERS], x)
    return x


def prompted(w: Tensors, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    """Layers of attention to a prompt."""
    batch, tokens, width = x.shape
    for q, k, v, out in (w[i : i + 4] for i in range(0, len(w), 4)):
        given = (functional.linear(x, q), functional.linear(prompt, k), functional.linear(prompt, v))
        heads = [part.view(batch, -1, width // 64, 64).transpose(1, 2) for part in given]
        seen = functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(batch, tokens, width)
        x = x + functional.linear(seen, out)
    return x


def gated(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Two layers with a gate between halves, one without a bias."""
    for i in (0, 3):
        value, gate = functional.linear(functional.layer_norm(x, x.shape[-1:]), w[i], w[1] if i == 0 else None).chunk(
            2, -1
        )
        x = x + functional.linear(value * functional.gelu(gate), w[i + 2 - i // 3])
    return x


def computed_heads(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Attention whose queries, keys and values are computed head by head, so that how they lie is open for long."""
    heads = x.view(*x.shape[:2], -1, 64).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads * w[0], heads + w[0], heads - w[0])


def shifted(w: Tensors, numbers: torch.Tensor) -> torch.Tensor:
    """A layer with a gate that is given rows which begin two bytes behind where memory does."""
    value, gate = functional.linear(numbers[1:].view(-1, w[0].shape[1]), w[0]).chunk(2, -1)
    return value * functional.gelu(gate)


def paying(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """A layer with a gate between halves, of a size that pays in fp8."""
    value, gate = functional.linear(x, *w).chunk(2, -1)
    return value * functional.gelu(gate)


C, D, E, W = CHANNELS, WIDTH, EMBEDDING, 1280
# function, type, shapes of the weights, shapes of the inputs with the dimensions that are symbols; without any it is a
# number that a module holds, on the CPU
BLOCKS: dict[str, tuple[Callable[..., torch.Tensor], torch.dtype, list[Any], list[Any]]] = {
    "residual": (
        residual,
        torch.half,
        [(C,), (C,), (C, C, 3, 3), (C,), (C, E), (C,), (C,), (C,), (C, C, 3, 3), (C,)],
        [((2, C, 64, 64), (0, 2, 3)), ((2, E), (0,))],
    ),
    "transformer": (
        transformer,
        torch.bfloat16,
        [(D,), (D,), (3 * D, D), (D, D), (D,), (D,), (D,), (4 * D, D), (4 * D,), (D, 4 * D), (D,)],
        [((2, 4096, D), (0, 1)), ((), ())],
    ),
    "gelus": (
        gelus,
        torch.bfloat16,
        [(D,), (D,), *[(4 * D, D), (4 * D,)] * 2, (D, 4 * D), (D,)],
        [((2, 4096, D), (0, 1))],
    ),
    "wide": (
        wide,
        torch.half,
        [(W,), (W,), *[(W, W)] * 4, (W,), (8 * W, W), (8 * W,), (W, 4 * W), (W,)],
        [((2, 1024, W), (0, 1))],
    ),
    "looking": (
        looking,
        torch.bfloat16,
        [(512,), (512,), *[(512, 512, 1, 1)] * 4],
        [((1, 512, 128, 128), (2, 3))],
    ),
    "long": (long, torch.bfloat16, [(2 * D, 2 * D)] * 4, [((2, 8192, 2 * D), (0, 1))]),
    "feed_forward": (  # products that pay in fp8
        feed_forward,
        torch.half,
        [(4096, 1024), (4096,), (1024, 4096), (1024,)],
        [((2, 4096, 1024), (0, 1))],
    ),
}


# of a larger image whose channels are innermost
INNERMOST = {"innermost": (*BLOCKS["residual"][:3], [((2, C, 128, 128), (0, 2, 3)), ((2, E), (0,))])}
MASKED = {
    "masked": (
        masked,
        torch.half,
        [(D, D), (64, D), (64, D)],
        [((2, 1024, D), (0, 1)), ((2, 1024), (0, 1))],
    )
}
FROZEN = {
    "shortened": (
        shortened,
        torch.half,
        [
            *[(4 * C,), (4 * C,), (2 * C, 4 * C, 3, 3), (2 * C,), (2 * C, E), (2 * C,)],
            *[(2 * C,), (2 * C,), (2 * C, 2 * C, 3, 3), (2 * C,), (2 * C, 4 * C, 1, 1), (2 * C,)],
        ],
        [((2, 4 * C, 64, 64), (0, 2, 3)), ((2, E), (0,))],
    ),
    "widened": (
        residual,
        torch.bfloat16,
        [(320,), (320,), (320, 320, 3, 3), (320,), (320, E), (320,), (320,), (320,), (320, 320, 3, 3), (320,)],
        [((2, 320, 96, 96), (0, 2, 3)), ((2, E), (0,))],
    ),
}
UPSAMPLED = {
    "upsampled": (
        upsampled,
        torch.half,
        [(640, 320, 3, 3), (640,), (320, 640, 3, 3)],
        [((2, 320, 24, 16), (0, 2, 3)), ((2, 320, 96, 64), (0, 2, 3))],
    )
}
CONVOLVED = {
    "convolved_rows": (
        convolved_rows,
        torch.half,
        [(320, 320, 3, 3), (320,)],
        [((2, 4096, 320), (0, 1)), ((2, 4, 64, 64), (0, 2, 3))],
    ),
    "convolved_behind": (
        convolved_behind,
        torch.half,
        [(320, 320, 3, 3), (320,)],
        [((1 + 2 * 64 * 64 * 320,), ())],
    ),
}
_TABLE = (8, 1024, 1, 32, 2, 2)
# one in fp32, as tables of models are; one with a table for all of its batch
TURNED = {
    "turned_alone": (turned_alone, torch.bfloat16, [(256, D)], [((8, 1024, D), (0, 1)), (_TABLE, (0, 1))]),
    "turned_heads": (turned_heads, torch.float32, [(256, D), (64,)], [((8, 1024, D), (0, 1)), (_TABLE, (0, 1))]),
    "turned_rows": (turned_rows, torch.half, [(1280, D), (1280,)], [((8, 1024, D), (0, 1)), (_TABLE[1:], (0,))]),
}
JOINED = {
    "joined": (
        joined,
        torch.bfloat16,
        [(1536, 1536)],
        [((2, 4096, 1536), (0, 1)), ((2, 4096, 1536), (0, 1)), ((2, 1536), (0,))],
    )
}
_LAYER = [(D, D), (D, 192), (D, 192), (D, D)]
PROMPTED = {"prompted": (prompted, torch.half, _LAYER * 3, [((2, 1024, D), (0, 1)), ((2, 77, 192), (0, 1))])}
GATED = {
    "gated": (gated, torch.half, [(8 * D, D), (8 * D,), (D, 4 * D), (4 * D, D), (D, 2 * D)], [((2, 1024, D), (0, 1))]),
    "shifted": (shifted, torch.bfloat16, [(2 * D, D)], [((1 + 512 * D,), ())]),
}
PAYING = {
    "paying": (paying, torch.half, [(2560, 320), (2560,)], [((2, 8192, 320), (0, 1))]),
    "paying_without_bias": (paying, torch.bfloat16, [(2560, 320)], [((2, 8192, 320), (0, 1))]),
}
COMPUTED = {"computed_heads": (computed_heads, torch.half, [(1,)], [((2, 4096, 640), (0, 1))])}
STACKS = {"stack": (stack, torch.half, BLOCKS["wide"][2] * LAYERS, BLOCKS["wide"][3])}  # that repeat themselves


class _Lifted(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, weights: Tensors, inputs: Tensors) -> Tensors:
        return [self.function(weights, *inputs)]


def exported(
    function: Callable[..., Any], weights: Tensors, inputs: Tensors, symbols: Sequence[Sequence[int]]
) -> torch.fx.GraphModule:
    """The graph of a function of weights and inputs without numbers. symbols: the dimensions of each input that are."""
    dims = ([{} for _ in weights], [dict.fromkeys(some, torch.export.Dim.AUTO) for some in symbols])
    with torch.no_grad():
        return torch.export.export(_Lifted(function), (weights, inputs), dynamic_shapes=dims, strict=False).graph_module


def cast(kind: str) -> Captured:
    """A block's graph whose weights are stored in fp32 and cast for each use, as ComfyUI does where it is told to."""
    return captured(kind, stored=torch.float32)


def captured(kind: str, behind: int = 0, stored: torch.dtype | None = None) -> Captured:
    """A block's graph as a process with a GPU captures it.

    behind: weights begin so many numbers behind an address. stored: the type of weights that are cast to the block's.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    function, dtype, weights, inputs = {
        **{**BLOCKS, **INNERMOST, **MASKED, **FROZEN, **UPSAMPLED},
        **{**CONVOLVED, **TURNED, **JOINED, **INPLACE, **VIDEOS, **PROMPTED, **GATED, **PAYING, **COMPUTED, **STACKS},
    }[kind]
    with FakeTensorMode(shape_env=ShapeEnv()):
        args = tuple(
            [torch.empty(shape, dtype=kept, device="cuda:0") if shape else torch.empty(()) for shape in shapes]
            for shapes, kept in ((weights, stored or dtype), ([shape for shape, _ in inputs], dtype))
        )
        if behind:
            args[0][:] = [
                torch.empty(w.numel() + behind, dtype=dtype, device="cuda:0")[behind:].view(w.shape) for w in args[0]
            ]
        if kind in MASKED:
            args[1][1] = args[1][1].bool()
        if kind in INNERMOST or kind in UPSAMPLED:
            args[1][0] = args[1][0].to(memory_format=torch.channels_last)
        laid = kind in FROZEN or kind in UPSAMPLED
        own = {place: w for place, w in enumerate(args[0]) if laid and w.dim() == 4 and w.shape[-1] > 1}
        for place, weight in own.items():
            args[0][place] = weight.to(memory_format=torch.channels_last)
    run = function if stored is None else lambda w, *given: function([one.to(dtype) for one in w], *given)
    graph = exported(run, *args, [symbols for _, symbols in inputs])
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for place, weight in own.items():
        channels_last.copy_to_channels_last(graph, nodes[place], weight)
    named = list(range(len(weights)))
    return Captured(
        graph, named, [], [], [], [], [], Conditions([], []), [], [], None, [], [], {}, [], [True] * len(named)
    )


OPTIONS = CompileConfig.parse("O3").lowering_options("cuda")


def lowered(
    folder: Path,
    module: str,
    kinds: Sequence[str] = tuple(BLOCKS),
    options: dict[str, object] = OPTIONS,
    capture: Callable[[str], Captured] = captured,
) -> dict[str, Path]:
    """The payload of blocks, by one forked worker that imports `module` of the tests first (on PYTHONPATH)."""
    answers: queue.Queue[str | None] = queue.Queue()
    with worker_pool.Pool(1, "cuda", None) as helpers:
        for kind in kinds:
            (folder / kind).mkdir()
            one = capture(kind)
            helpers.submit(one, folder / kind, [module, *one.modules], options, "cuda:0", answers.put, _never)
        problems = [answers.get(timeout=300) for _ in kinds]
    assert problems == [None] * len(kinds), problems
    return {kind: folder / kind / "payload" for kind in kinds}


def _never() -> str:
    raise AssertionError("the worker did not do it")
