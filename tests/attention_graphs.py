# SPDX-License-Identifier: Apache-2.0
"""Graphs with attention in them, as a process with a GPU captures them, for the tests of kernels of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_blocks
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import scaled_dot_product_attention as attention

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
    dims = ([], [dict.fromkeys(symbols, torch.export.Dim.AUTO) for _, symbols in inputs])
    with torch.no_grad():
        lifted = gpu_blocks._Lifted(function)
        return torch.export.export(lifted, ([], given), dynamic_shapes=dims, strict=False).graph_module


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
