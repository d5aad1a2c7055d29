# SPDX-License-Identifier: Apache-2.0
"""A layer and the gate between its halves in one launch: the kernels, and which layers of a graph are computed so.

What runs the kernel here is Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_blocks
import pytest
import torch
from gates import WIDTH, chunked, exported, gate_first, layer_like, sliced, split, whole_read
from kernel_scripts import run
from torch.nn.functional import gelu, linear

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.kernels.geglu_linear import op as geglu_linear
from nexfort_engine.kernels.gluon_support import DESCRIPTORS
from nexfort_engine.lowering import inductor
from nexfort_engine.passes.geglu_linear import LEAST, gated_linears

pytest.importorskip("triton", reason="the kernels are Triton's")
Tensor = torch.Tensor


def test_the_kernel_gives_what_plain_torch_gives() -> None:
    run("interpreted_gated_linear.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("forms", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_the_kernel_is_compiled_for_its_card(forms: str, tmp_path: Path) -> None:
    run("compiled_gated_linear.py", forms, CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("bias", [None, torch.ones(6)])
def test_the_operator_knows_its_result_without_computing_it(bias: Tensor | None) -> None:
    given = (torch.randn(2, 4, 5), torch.randn(6, 5), bias)
    torch.library.opcheck(geglu_linear.operator(), given, raise_exception=True)


# ---- which layers ----------------------------------------------------------------------------------------------------

ROWS = (2, LEAST // 2, 192)


def _graph(
    function: Callable[..., Any],
    rows: tuple[int, ...] = ROWS,
    width: int = WIDTH,
    dtype: torch.dtype = torch.half,
    device: str = "cuda:0",
) -> torch.fx.GraphModule:
    return exported(function, layer_like(width, rows[-1], dtype), rows, dtype, device)


@pytest.mark.parametrize("function", [chunked, split, sliced])
def test_a_layer_and_the_gate_between_its_halves_are_one_call(function: Callable[..., Tensor]) -> None:
    graph = _graph(function)
    assert gated_linears(graph) == 1 and gated_linears(graph) == 0
    graph.graph.lint()
    (call,) = (node for node in graph.graph.nodes if node.op == "call_function" and node.users)
    assert call.target is geglu_linear.operator(), "all else is gone"
    graph.recompile()
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=generator) for s in [(2 * WIDTH, 192), (2 * WIDTH,), (3, 5, 192)]]
    (found,) = graph(*given)
    assert torch.equal(found, function(given[2], *given[:2]))


def _by_tanh(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    value, gate = linear(x, w, b).chunk(2, -1)
    return value * gelu(gate, approximate="tanh")


def _of_one_half(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate = linear(x, w, b).chunk(2, -1)[1]
    return gate * gelu(gate)


def _half_read(x: Tensor, w: Tensor, b: Tensor) -> Any:
    value, gate = linear(x, w, b).chunk(2, -1)
    return value * gelu(gate), gate.sum()


def _gate_read(x: Tensor, w: Tensor, b: Tensor) -> Any:
    value, gate = linear(x, w, b).chunk(2, -1)
    gate = gelu(gate)
    return value * gate + gate


def _in_fours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    value, gate, _, _ = linear(x, w, b).chunk(4, -1)
    return value * gelu(gate)


def _of_rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    value, gate = linear(x, w, b).chunk(2, 0)
    return value * gelu(gate)


def _of_two_layers(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return linear(x, w, b)[..., :WIDTH] * gelu(linear(x + 1, w, b)[..., WIDTH:])


def _written(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    both = linear(x, w, b)
    value, gate = both.chunk(2, -1)
    both.add_(1)
    return value * gelu(gate)


@pytest.mark.parametrize(
    "function",
    [
        *(gate_first, _by_tanh, _of_one_half, whole_read, _half_read, _gate_read),
        *(_in_fours, _of_rows, _of_two_layers, _written),
    ],
)
def test_what_is_no_such_gate_stays(function: Callable[..., Any]) -> None:
    assert gated_linears(_graph(function)) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"rows": (1, LEAST - 1, 192)},
        {"dtype": torch.float32},
        {"device": "cpu"},
        {"width": 192},
        {"rows": (2, LEAST, 96)},
    ],
    ids=["few rows", "in 32 bits", "on a CPU", "odd columns", "odd rows"],
)
def test_layers_stay_that_the_kernel_is_not_for(other: dict[str, Any]) -> None:
    assert gated_linears(_graph(chunked, **other)) == 0


def _of_a_number(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return gelu(linear(x, w, b)) * b.unbind(0)[1]


def test_numbers_beside_a_gate_are_no_halves() -> None:
    assert gated_linears(_graph(_of_a_number)) == 0


@pytest.mark.gpu
def test_a_gated_layer_is_no_further_from_the_truth_than_eager(tmp_path: Path) -> None:
    """At the sizes that it was lowered with and at others, some numbers of which are large; and from disk once more."""
    if torch.cuda.get_device_capability() not in DESCRIPTORS:
        pytest.skip("the kernel is for cards of compute capability 9.0")
    inductor.lower(
        gpu_blocks.captured("gated"), tmp_path / "payload", CompileConfig.parse("O2").lowering_options("cuda")
    )
    _, dtype, shapes, ((given, _),) = gpu_blocks.GATED["gated"]
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(s, device="cuda", generator=generator).mul(s[-1] ** -0.5).to(dtype) for s in shapes]
    assert any("multiply_gated_in_groups" in file.read_text() for file in (tmp_path / "payload").rglob("*.py"))
    for _ in range(2):
        block = inductor.load(tmp_path / "payload", {}, [])
        for batch, tokens in (given[:2], (1, 1), (3, 100), (1, 4096), (2, 129)):
            for size in (1.0, 30.0):
                x = (torch.randn(batch, tokens, given[2], device="cuda", generator=generator) * size).to(dtype)
                truth = gpu_blocks.gated([w.double() for w in weights], x.double())
                eager = (gpu_blocks.gated(weights, x) - truth).norm()
                ours = (block([*weights, x])[0] - truth).norm()
                assert ours <= 1.1 * eager, (batch, tokens, size, float(ours / eager))
        x[0, 0] = float("nan")
        assert block([*weights, x])[0][0, 0].isnan().all()


@pytest.mark.gpu
def test_rows_that_begin_anywhere_are_read_from_a_copy(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() not in DESCRIPTORS:
        pytest.skip("the kernel is for cards of compute capability 9.0")
    inductor.lower(
        gpu_blocks.captured("shifted"), tmp_path / "payload", CompileConfig.parse("O2").lowering_options("cuda")
    )
    _, dtype, (shape,), ((given, _),) = gpu_blocks.GATED["shifted"]
    generator = torch.Generator("cuda").manual_seed(0)
    weight, x = (torch.randn(s, device="cuda", generator=generator).to(dtype) for s in (shape, given))
    truth = gpu_blocks.shifted([weight.double()], x.double())
    ours = inductor.load(tmp_path / "payload", {}, [])([weight, x])[0]
    assert (ours - truth).norm() <= 1.1 * (gpu_blocks.shifted([weight], x) - truth).norm()
