# SPDX-License-Identifier: Apache-2.0
"""What the measurements of layers in int8 launch and print; how long anything takes only a card says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_scripts import run

from benchmarks import int8_linear
from nexfort_engine.kernels.scaled_linear import choice


@pytest.mark.large  # about a benchmark; the kernels have tests of their own
def test_what_is_launched_computes_the_layer() -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's")
    run("interpreted_int8_launch.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("up", [False, True])
def test_measurements_become_a_row_of_the_table(up: bool) -> None:
    layer = int8_linear.Layer(3840, 10240, up)
    rows: list[dict[str, Any]] = [{"what": "host", "us": 500.0}, {"what": "rows", "us": 20.0}]
    rows += [{"what": "ours", "us": 300.0 + i, "form": form} for i, form in enumerate(choice.FORMS)]
    wanted = choice.Measured(choice.FORMS[0], 320.0, 500.0)
    assert int8_linear.measured(layer, rows) == f"({-10240 if up else 10240}, 3840): {wanted!r},"


def test_models_have_layers_that_the_kernels_take() -> None:
    for layers in int8_linear.MODELS.values():
        assert all(layer.inner % int8_linear.GROUP == 0 and layer.inner <= 16384 for layer in layers)


@pytest.mark.parametrize("block", [int8_linear.gated_block, int8_linear.sandwich_block])
def test_blocks_are_those_of_the_pass(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of them is taken, with what is before and behind it."""
    pytest.importorskip("comfy_kitchen", reason="the operators are of a package that ComfyUI requires")
    import comfy_kitchen  # noqa: F401
    from gpu_blocks import exported
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from nexfort_engine.passes import int8_linear as passed

    sizes = [(256, 256)] * 4 + [(512, 256), (256, 512)] + [(512, 256)] * (block is int8_linear.sandwich_block)
    with FakeTensorMode(shape_env=ShapeEnv()):
        w = [part for n, k in sizes for part in (torch.empty(n, k, dtype=torch.int8), torch.empty(n, 1))]
        inputs = [torch.empty(1, 64, 256, dtype=torch.bfloat16), torch.empty(1, 1536, dtype=torch.bfloat16)]
    monkeypatch.setattr(passed, "_DEVICE", "cpu")
    graph = exported(block, w, inputs, [(1,), ()])
    assert passed.int8_linears(graph) == len(sizes)
    assert ("gelu_tanh" in str(graph.graph)) is (block is int8_linear.gated_block)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="of a GPU"):
        int8_linear.main([])
    with pytest.raises(SystemExit):
        int8_linear.main(["--models", "sdxl"])
