# SPDX-License-Identifier: Apache-2.0
"""Graphs with attention in them, as a process with a GPU captures them, for the tests of kernels of attention."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_blocks
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import scaled_dot_product_attention as attention

from nexfort_engine.kernels.layouts import empty_laid_out

TORCHS = torch.ops.aten.scaled_dot_product_attention.default
PLAIN, BEHIND, OUTERMOST = (0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)  # heads before and behind tokens; tokens before all
Tensors = list[torch.Tensor]
Input = tuple[tuple[int, ...], tuple[int, ...]]  # sizes, and which of them are symbols


def heads(x: torch.Tensor, width: int = 64) -> torch.Tensor:
    """(B, L, H * width) as (B, H, L, width)."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    """(B, H, L, width) as (B, L, H * width)."""
    return x.transpose(1, 2).flatten(2)


def crossed(_: Tensors, x: torch.Tensor, prompt: torch.Tensor, width: int = 64, **how: Any) -> torch.Tensor:
    """Attention of x to keys and values beside each other."""
    keys, values = prompt.chunk(2, -1)
    return joined(attention(heads(x, width), heads(keys, width), heads(values, width), **how))


def graph_of(
    function: Callable[..., Any],
    *inputs: Input,
    dtype: torch.dtype = torch.half,
    device: str = "cuda:0",
) -> torch.fx.GraphModule:
    """The graph of a function of no weights and these inputs."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        given = [torch.empty(sizes, dtype=dtype, device=device) for sizes, _ in inputs]
    return gpu_blocks.exported(function, [], given, [symbols for _, symbols in inputs])


def node_of(graph: torch.fx.GraphModule, target: Any) -> Any:
    """The one call of an operator in a graph."""
    (node,) = [node for node in graph.graph.nodes if node.target is target]
    return node


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, _: tuple[int, ...]) -> torch.Tensor:
    """By torch's operator, called as those of kernels are."""
    return attention(q, k, v, scale=scale)


def of_copies(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, _: tuple[int, ...]) -> torch.Tensor:
    """By torch, of tensors that lie as each of its kernels takes them."""
    return attention(*(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)), scale=scale)


# ---- what is launched ------------------------------------------------------------------------------------------------

_VIEW = r"reinterpret_tensor\((\w+), \([^()]*\), \(([^()]*)\), (\w+)\)"
_MADE = r"(\w+) = (?:empty_strided_cuda\(|reinterpret_tensor\(\w+, )\([^()]*\), \(([^()]*)\)"


@dataclasses.dataclass(frozen=True)
class Launch:
    """A call of a kernel on query, key, value and result, all else as texts.

    strides: of each of them. starts: where each begins in its memory. views: which are parts of something. rest: the
    arguments behind them.
    """

    strides: list[list[str]]
    starts: list[int]
    views: list[bool]
    rest: list[str]


def launches_of(
    folder: Path, switch: str, kernel: str, function: Callable[..., Any], inputs: Sequence[Input], orders: Sequence[Any]
) -> list[Launch]:
    """The calls of a kernel for attention whose results lie in these orders, by a pretended GPU with this pass on.

    The environment has to be one without a GPU, and with this folder on PYTHONPATH.
    """
    graph = graph_of(function, *inputs)
    nodes = [node for node in graph.graph.nodes if node.target is TORCHS]
    for node, order in zip(nodes, orders, strict=True):  # as on a card, where it follows the queries
        result = node.meta["val"]
        node.meta["val"] = result.new_empty_strided(result.shape, empty_laid_out(result, order).stride())
    one = dataclasses.replace(gpu_blocks.captured("wide"), graph=graph, lasting=[])
    options: dict[str, object] = {f"nexfort.{switch}": True}
    payload = gpu_blocks.lowered(folder, "pretended_worker", ["block"], options, lambda _: one)["block"]
    (code,) = (text for file in payload.rglob("*.py") if "def call(" in (text := file.read_text()))
    call = code.partition("def call(")[2].partition("runner = ")[0]
    lies = dict(re.findall(_MADE, call))
    lies |= {name: strides for name, strides, _ in re.findall(_VIEW, call[call.index("return (") :])}
    for name, before in re.findall(r"(\w+) = (buf\d+); del", call):  # the memory of one that is over
        lies[name] = lies[before]
    found = []
    for launch in re.findall(rf"{kernel}_\d+\.run\((.*)\)", call):
        tensors = list(re.finditer(rf"{_VIEW}|(buf\d+)", launch))[:4]
        strides = [(tensor[2] or lies[tensor[4]]).split(", ") for tensor in tensors]
        starts = [int(tensor[3] or 0) for tensor in tensors]
        rest = launch[tensors[-1].end() + 2 :].split(", ")
        found.append(Launch(strides, starts, [tensor[2] is not None for tensor in tensors], rest))
    return found
