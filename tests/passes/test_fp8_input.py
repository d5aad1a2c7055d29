# SPDX-License-Identifier: Apache-2.0
"""Inputs of ComfyUI's fp8 layers as plain math: the same numbers as the operator's, or left with a reason."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional

pytest.importorskip("comfy_kitchen", reason="the operator is of a package that ComfyUI requires")
from gpu_blocks import exported  # it needs that package
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.passes.fp8_input import fp8_inputs, left, narrowed

T = torch.Tensor
CODES = {torch.float8_e4m3fn: 5, torch.float8_e5m2: 6}
E4M3 = torch.float8_e4m3fn


def _narrow(x: T, scale: T, dtype: torch.dtype = E4M3) -> T:
    return torch.ops.comfy_kitchen.quantize_fp8(x, scale, CODES[dtype])


@settings(max_examples=60)
@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from(list(CODES)),
    st.sampled_from([1.0, 0.01, 3.7, 1e-8, 1e8]),
    st.integers(1, 300),
    st.integers(0, 2**16),
)
def test_numbers_are_divided_in_32_bits_and_rounded_once(
    dtype: torch.dtype, narrow: torch.dtype, scale: float, count: int, seed: int
) -> None:
    """As comfy_kitchen's CUDA kernel does it; its code for CPUs rounds the factor to 16 bits first."""
    x = (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)
    x[seed % count] = (0.0, float("inf"), float("-inf"), float("nan"))[seed % 4]
    step, most = torch.tensor(scale), torch.finfo(narrow).max
    found = narrowed(x, step, dtype=narrow)
    steps = x.float() / step
    wanted = steps.clamp(-most, most).to(narrow)
    assert found.dtype == narrow and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    if scale == 1:
        theirs = _narrow(x[:, None], step, narrow)[:, 0]
        assert torch.equal(found.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf")])
def test_odd_scales_give_what_the_kernel_gives(scale: float) -> None:
    found = narrowed(torch.tensor([1.0, -1.0, 0.0]), torch.tensor(scale), dtype=E4M3).float().tolist()
    wanted = {0.0: [448, -448], float("inf"): [0, 0, 0]}.get(scale, [float("nan")] * 3)
    assert found[: len(wanted)] == pytest.approx(wanted, nan_ok=True)


def _layers(w: list[T], x: T) -> Any:
    h = functional.rms_norm(x, [x.shape[-1]], None, 1e-5).reshape(-1, x.shape[-1])
    return [_narrow(h, torch.ones((), device=x.device)).float() * _narrow(h, w[0]).float()]


def _graph(function: Any = _layers, scale: Any = ((), torch.float32), device: str = "cuda:0") -> Any:
    with FakeTensorMode(shape_env=ShapeEnv()):
        w = [torch.empty(scale[0], dtype=scale[1], device=device)]
        x = torch.empty(2, 64, 128, dtype=torch.bfloat16, device="cuda:0")
    return exported(function, w, [x], [(0, 1)])


def test_operators_are_plain_math() -> None:
    graph = _graph()
    assert fp8_inputs(graph) == 2 and fp8_inputs(graph) == 0 and not left(graph)
    graph.graph.lint()
    assert "comfy_kitchen" not in str(graph.graph)
    graph.recompile()


def _three(w: list[T], x: T) -> Any:
    ones = [torch.ones((), device=x.device) for _ in range(3)]
    return [sum(_narrow(x.reshape(-1, 128), one).float() * i for i, one in enumerate(ones, 1))]


def _three_written(w: list[T], x: T) -> Any:
    h, found = x * 2, []
    for i in range(3):
        found.append(_narrow(h.reshape(-1, 128), w[0]).float() * i)
        h.add_(1)
    return [sum(found)]


@pytest.mark.parametrize(("function", "casts"), [(_three, 1), (_three_written, 3)])
def test_layers_of_one_input_have_it_once(function: Any, casts: int) -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        w, x = [torch.empty(())], torch.empty(2, 64, 128, dtype=torch.bfloat16)
    graph = exported(function, w, [x], [(0, 1)])
    assert fp8_inputs(graph) == 3
    graph.graph.lint()
    graph.recompile()
    assert sum(node.target is torch.ops.aten.clamp.default for node in graph.graph.nodes) == casts
    scale, x = torch.tensor(0.5), torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    ((found,),) = (graph(scale, x.clone()),)
    assert torch.equal(found, function([scale], x.clone())[0])


@pytest.mark.parametrize(
    ("scale", "device", "reason"),
    [
        (((128,), torch.float32), "cuda:0", "expected one number"),
        (((1, 1, 1), torch.float32), "cuda:0", "expected one number"),
        (((), torch.half), "cuda:0", "with a scale in torch.float16"),
        (((), torch.float32), "cpu", "another device"),
    ],
)
def test_operators_stay_that_are_called_otherwise(scale: Any, device: str, reason: str) -> None:
    graph = _graph(scale=scale, device=device)
    assert fp8_inputs(graph) == 1
    (told,) = left(graph)
    assert reason in told and str(graph.graph).count("quantize_fp8") > 0


def test_it_is_on_for_gpus_unless_switched_off() -> None:
    asked = CompileConfig.parse("O2")
    assert asked.lowering_options("cuda")["nexfort.fp8_input"]
    assert not asked.lowering_options("cpu")["nexfort.fp8_input"]
    off = CompileConfig.parse({"mode": "O2", "options": {"fuse.fp8_input": False}})
    assert not off.lowering_options("cuda")["nexfort.fp8_input"]
