# SPDX-License-Identifier: Apache-2.0
"""Linear layers of the same few rows in one launch: the kernel, and which layers of a graph are computed so.

What runs the kernel here is Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_blocks
import pytest
import torch
from kernel_scripts import run
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import linear

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.kernels.grouped_gemm import op as grouped_gemm
from nexfort_engine.lowering import inductor
from nexfort_engine.passes.grouped_gemm import FEW, grouped_linears

pytest.importorskip("triton", reason="the kernel is Triton's")
Tensors = list[torch.Tensor]


def test_the_kernel_gives_what_plain_torch_gives() -> None:
    run("interpreted_grouped_linear.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("cards", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernel_is_compiled_for_every_card(cards: str, tmp_path: Path) -> None:
    run("compiled_grouped_linear.py", cards, CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


def test_the_operator_knows_its_result_without_computing_it() -> None:
    weights = [torch.randn(3, 5) for _ in range(2)]
    torch.library.opcheck(grouped_gemm.operator(), (torch.randn(2, 4, 5), weights), raise_exception=True)


@pytest.mark.parametrize(
    ("count", "columns", "inner"), [(20, 1280, 2048), (4, 640, 2048), (2, 320, 192), (20, 448, 64)]
)
def test_sizes_are_multiples_of_the_blocks(count: int, columns: int, inner: int) -> None:
    block = grouped_gemm.blocks(count, columns, inner)
    assert columns % block["N_BLOCK"] == inner % block["K_BLOCK"] == 0


# ---- which layers ----------------------------------------------------------------------------------------------------

WIDE, NARROW = (128, 192), (64, 192)


def _graph(
    function: Callable[..., Any],
    weights: list[tuple[int, ...]],
    prompt: tuple[int, ...] = (2, 77, 192),
    dtype: torch.dtype = torch.half,
    device: str = "cuda:0",
) -> torch.fx.GraphModule:
    with FakeTensorMode(shape_env=ShapeEnv()):
        args = tuple([torch.empty(s, dtype=dtype, device=device) for s in shapes] for shapes in (weights, [prompt]))
    dims = ([{} for _ in weights], [dict.fromkeys(range(len(prompt) - 1), torch.export.Dim.AUTO)])
    with torch.no_grad():
        lifted = gpu_blocks._Lifted(function)
        return torch.export.export(lifted, args, dynamic_shapes=dims, strict=False).graph_module


def _layers(w: Tensors, prompt: torch.Tensor) -> Any:
    return [torch.tanh(linear(prompt, weight) * prompt.shape[1]) for weight in w]


def test_layers_of_one_prompt_are_one_call_for_each_size() -> None:
    graph = _graph(_layers, [WIDE, NARROW, WIDE, NARROW, WIDE])
    assert grouped_linears(graph) == 5 and grouped_linears(graph) == 0
    graph.graph.lint()
    calls = [node for node in graph.graph.nodes if node.target is grouped_gemm.operator()]
    assert sorted(len(node.args[1]) for node in calls) == [2, 3]
    graph.recompile()
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in (WIDE, NARROW, WIDE, NARROW, WIDE)]
    prompt = torch.randn(3, 5, 192, generator=generator)
    for found, wanted in zip(graph(*weights, prompt), _layers(weights, prompt), strict=True):
        assert torch.equal(found, wanted)


def _read_elsewhere(w: Tensors, prompt: torch.Tensor) -> Any:
    return [*_layers(w, prompt), prompt + 1]


def _given_back(w: Tensors, prompt: torch.Tensor) -> Any:
    return [*_layers(w, prompt), prompt]


def _computed(w: Tensors, prompt: torch.Tensor) -> Any:
    return _layers(w, prompt * 2)


def _written_between(w: Tensors, prompt: torch.Tensor) -> Any:
    first = linear(prompt, w[0])
    prompt.add_(1)
    return [first, linear(prompt, w[1])]


def _result_written(w: Tensors, prompt: torch.Tensor) -> Any:
    return [linear(prompt, w[0]).add_(1), linear(prompt, w[1])]


def _chunked(w: Tensors, prompt: torch.Tensor) -> Any:
    return [*_layers(w, prompt), *prompt.chunk(2, -1)[:1]]


def _weight_written(w: Tensors, prompt: torch.Tensor) -> Any:
    first = linear(prompt, w[0])
    w[1].view(-1).add_(1)
    return [first, linear(prompt, w[1])]


def _weights_computed(w: Tensors, prompt: torch.Tensor) -> Any:
    return [linear(prompt, weight * 2) for weight in w]


def _biased(w: Tensors, prompt: torch.Tensor) -> Any:
    return [linear(prompt, weight, weight[:, 0]) for weight in w]


@pytest.mark.parametrize(
    "function",
    [
        *(_read_elsewhere, _given_back, _chunked, _computed, _weights_computed, _biased),
        *(_written_between, _result_written, _weight_written),
    ],
)
def test_layers_stay_that_are_not_of_a_prompt_or_of_what_is_written(function: Callable[..., Any]) -> None:
    assert grouped_linears(_graph(function, [WIDE, WIDE])) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": (2, FEW, 192)},
        {"dtype": torch.float32},
        {"device": "cpu"},
        {"weights": [(96, 192)] * 2},
        {"weights": [(128, 96)] * 2, "prompt": (2, 77, 96)},
        {"weights": [WIDE, NARROW]},
    ],
    ids=["many rows", "in 32 bits", "on a CPU", "odd columns", "odd rows", "of two sizes"],
)
def test_layers_stay_that_the_kernel_is_not_for(other: dict[str, Any]) -> None:
    given = {"weights": [WIDE, WIDE], **other}
    assert grouped_linears(_graph(_layers, **given)) == 0
    assert grouped_linears(_graph(_layers, [WIDE, WIDE])) == 2


@pytest.mark.gpu
def test_layers_of_a_prompt_are_no_further_from_the_truth_than_eager(tmp_path: Path) -> None:
    """At the sizes that they were lowered with and at others."""
    options = CompileConfig.parse("O2").lowering_options("cuda")
    inductor.lower(gpu_blocks.captured("prompted"), tmp_path / "payload", options)
    block = inductor.load(tmp_path / "payload", {}, [])
    ((_, dtype, shapes, ((image, _), (prompt, _))),) = gpu_blocks.PROMPTED.values()
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(s, device="cuda", generator=generator).mul(s[1] ** -0.5).to(dtype) for s in shapes]
    for batch, tokens, words in ((image[0], image[1], prompt[1]), (1, 64, 1), (3, 100, 154), (1, 4096, 600)):
        sizes = ((batch, tokens, image[2]), (batch, words, prompt[2]))
        x, seen = (torch.randn(size, device="cuda", generator=generator).to(dtype) for size in sizes)
        truth = gpu_blocks.prompted([w.double() for w in weights], x.double(), seen.double())
        eager = (gpu_blocks.prompted(weights, x, seen) - truth).norm()
        ours = (block([*weights, x, seen])[0] - truth).norm()
        assert ours <= 1.1 * eager, (batch, tokens, words, float(ours / truth.norm()), float(eager / truth.norm()))
