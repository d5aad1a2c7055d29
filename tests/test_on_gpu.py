# SPDX-License-Identifier: Apache-2.0
"""What other files promise on a CPU, on a GPU and with CUDA graphs: verified steps, the background, strengths, fp8."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from gpu_backbone import Backbone, close, inputs
from torch import nn
from torch.nn import functional

import nexfort_engine
from nexfort_engine.passes.linear_gelu import product
from nexfort_engine.system.cuda_graph_pool import GraphMemory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("artefact_cache")]


def on_gpu(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return module.cuda().eval().requires_grad_(False)


def graphs(compiled: nn.Module) -> int:
    """How many kinds of step are replayed."""
    return sum(step.graph is not None for step in compiled._nexfort_engine.graphs._steps.values())


@torch.inference_mode()
def test_a_verified_step_finds_every_region_near_and_graphs_go_on() -> None:
    module = on_gpu(Backbone())
    compiled, given = nexfort_engine.compile(module), inputs(2, 16, 0)
    for _ in range(3):
        compiled(*given)
    assert graphs(compiled) == 1
    compiled._nexfort_engine.verify_next()
    assert close(compiled(*given), module(*given))
    data = compiled.report.as_dict()
    (told,) = data["verifications"]
    assert {row["region"] for row in told["regions"]} == {row["name"] for row in data["regions"]}
    assert not [row for row in told["regions"] if row["over"] or row["unjudged"]] and not data["eager"]
    assert told["device"] != "cpu" and told["distance"] < 2e-3
    for _ in range(3):
        assert close(compiled(*given), module(*given))
    assert graphs(compiled) == 1


@torch.inference_mode()
def test_the_background_compiles_beside_eager_steps_and_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    module = on_gpu(Backbone())
    compiled = nexfort_engine.compile(module, options={"options": {"compile.background": True}})
    given = inputs(2, 16, 1)
    wanted = module(*given)
    assert torch.equal(compiled(*given), wanted), "the first step waits for nothing"
    background, until = compiled._nexfort_engine.builder.background, time.monotonic() + 300
    # another engine of this process may hold the lock of captures when the first steps ask for it
    while not (background.begun and background.join(0)) and time.monotonic() < until:
        assert close(compiled(*given), wanted)
    for _ in range(4):
        assert close(compiled(*given), wanted)
    data = compiled.report.as_dict()
    assert data["artefacts_compiled"] > 0 and not data["eager"] and graphs(compiled) == 1


class Adapted(nn.Module):
    """A block with a strength, as adapters keep it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.own, self.beside = nn.Linear(width, width), nn.Linear(width, width)
        self.scaling = {"default": 1.0}

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.own(h) + self.beside(h) * self.scaling["default"]


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adapted() for _ in range(3)])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h


@torch.inference_mode()
def test_a_strength_that_changes_compiles_nothing_and_no_graph_is_stale() -> None:
    module = on_gpu(Adapters())
    compiled = nexfort_engine.compile(module)
    h = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0)).cuda()
    for _ in range(4):
        before = compiled(h)
    assert graphs(compiled) == 1
    mark = compiled.report.mark()
    for strength in (0.5, 2.0, 1.0):
        module.blocks[1].scaling["default"] = strength
        for _ in range(4):
            assert close(compiled(h), module(h))
        assert strength == 1.0 or not close(compiled(h), before)
        assert graphs(compiled) == 1
    new = compiled.report.since(mark)
    assert not new["artefacts"] and not new["eager"]


class Wide(nn.Module):
    """A block whose products pay in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2048, 8192), nn.Linear(8192, 2048)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(nn.functional.gelu(self.up(h)))


@torch.inference_mode()
def test_low_precision_says_which_products_it_takes_and_is_near() -> None:
    from nexfort_engine.quant.matmul import missing

    if reason := missing("cuda"):
        pytest.skip(reason)
    module = on_gpu(nn.Sequential(Wide(), Wide()).bfloat16())
    compiled = nexfort_engine.compile(module, options="O3")
    h = torch.randn(2, 4096, 2048, generator=torch.Generator().manual_seed(0)).cuda().bfloat16()
    for _ in range(4):
        apart = float((compiled(h).float() - module(h).float()).norm() / module(h).float().norm())
        assert 0 < apart < 0.03
    data = compiled.report.as_dict()
    assert not data["eager"] and data["precision"], data


@torch.inference_mode()
def test_packed_weights_are_kept_in_graphs_for_as_long_as_the_host_says_that_they_hold() -> None:
    from prepared_weights import Host

    from nexfort_engine.quant.matmul import missing

    if reason := missing("cuda"):
        pytest.skip(reason)
    module = on_gpu(nn.Sequential(Wide(), Wide()).bfloat16())
    compiled, host = nexfort_engine.compile(module, options="O3"), Host()
    engine = compiled._nexfort_engine
    engine.state.provider = host
    h = torch.randn(2, 4096, 2048, generator=torch.Generator().manual_seed(0)).cuda().bfloat16()

    def kept() -> list[int]:
        bindings = [binding for region in engine.regions for binding in region.bindings]
        assert bindings and all(binding.prepares for binding in bindings)
        return [binding.kept.serial if binding.kept else 0 for binding in bindings]

    def near() -> torch.Tensor:
        """Region by region, captured, replayed: all are near eager with the weights as they are now."""
        results = [compiled(h) for _ in range(4)]
        wanted = module(h).float()
        assert all(torch.equal(result, results[0]) for result in results)
        assert graphs(compiled) == 1, compiled.report.as_dict()["notes"]
        # four products in a row, each of two factors that e4m3 rounds by 2.6 % in the mean
        assert float((results[0].float() - wanted).norm() / wanted.norm()) < 0.026 * math.sqrt(4 * 2)
        return results[0]

    first = near()
    before = kept()
    assert all(before)
    for said in ("two", None, "three"):
        module[0].up.weight.data.mul_(2.0)
        host.said = said
        assert not torch.equal(near(), first)
        assert any(kept()) == (said is not None) and not set(kept()) & set(before)
    module[0].up.weight.data.div_(8.0)
    host.said = "one"
    assert torch.equal(near(), first)
    engine.release()
    assert not any(kept()) and torch.equal(near(), first)
    assert not compiled.report.as_dict()["eager"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 1, 64, 40), (2, 77, 64, 256), (3, 1000, 1152, 4608), (1, 4096, 640, 2568)])
@torch.inference_mode()
def test_a_product_that_computes_gelu_is_nearer_to_the_truth_than_both_apart(
    dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    batch, rows, wide, out = sizes
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).cuda().to(dtype) for shape in ((batch, rows, wide), (out, wide), (out,))
    )
    x = x / wide**0.5
    truth = functional.gelu(functional.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    theirs = functional.gelu(functional.linear(x, weight, bias), approximate="tanh")
    found = product(x, weight, bias, like=x)
    assert found.shape == theirs.shape and found.dtype == dtype
    assert (found - truth).norm() <= 1.1 * (theirs - truth).norm()


def test_a_graph_is_captured_after_the_last_one_went_and_left_a_tensor() -> None:
    memory, x = GraphMemory(), torch.ones(1 << 20, device="cuda")
    with memory.captured(graph := torch.cuda.CUDAGraph()):
        left = x + 1
    del graph
    with memory.captured(graph := torch.cuda.CUDAGraph()):
        made = x + 2
    graph.replay()
    assert float(made.sum()) == 3 << 20 and left.shape == made.shape
