# SPDX-License-Identifier: Apache-2.0
"""Whole-step CUDA graphs: same bits as region by region, and never a stale replay."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_backbone import Backbone, close, inputs
from subjects import ask_instead
from torch import nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

import nexfort_engine
from nexfort_engine.kernels.gluon_support import DESCRIPTORS
from nexfort_engine.system.kernel_launches import writes_descriptors

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    module = Backbone().cuda().eval().requires_grad_(False)
    return module, nexfort_engine.compile(module)


def test_replays_are_the_same_and_outputs_are_kept(pair):
    module, compiled = pair
    with torch.inference_mode():
        kept, wanted = [], []
        for seed in range(6):
            for batch, length in ((2, 16), (1, 24)):
                given = inputs(batch, length, seed)
                kept.append(compiled(*given))
                wanted.append(module(*given))
        assert all(close(a, b) for a, b in zip(kept, wanted, strict=True))
        assert len(compiled._nexfort_engine.graphs._steps) >= 2
        assert all(s.graph is not None for s in compiled._nexfort_engine.graphs._steps.values())
        given = inputs(2, 16, 0)
        assert torch.equal(compiled(*given), compiled(*given))


@pytest.mark.parametrize("how", ["in_place", "data", "parameter"])
def test_a_changed_weight_is_seen(pair, how):
    module, compiled = pair
    given = inputs(2, 16, 1)
    with torch.inference_mode():
        for _ in range(4):
            before = compiled(*given)
        saved = module.blocks[1].up.weight.clone()
        changed = saved * 3
        if how == "in_place":
            module.blocks[1].up.weight.copy_(changed)
        elif how == "data":
            module.blocks[1].up.weight.data = changed
        else:
            module.blocks[1].up.weight = nn.Parameter(changed, requires_grad=False)
        for _ in range(3):
            after = compiled(*given)
            assert close(after, module(*given)) and not close(after, before)
        module.blocks[1].up.weight.copy_(saved)
        assert close(compiled(*given), before)


def test_options_and_attributes_are_seen(pair):
    module, compiled = pair
    given = inputs(2, 16, 2)
    with torch.inference_mode():
        for options in ({}, {"flip": 1}, {"strength": 2.0}, {"strength": 3.0}, {}, {"other": object()}):
            for _ in range(3):
                assert close(compiled(*given, dict(options)), module(*given, dict(options))), options
        for gain in (1.0, 5.0, 1.0):
            module.gain = gain
            for _ in range(3):
                assert close(compiled(*given), module(*given)), gain


class Shifted(nn.Module):
    """A block that takes a tensor of the options, as the embeddings of PixArt do in diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, options: dict) -> torch.Tensor:
        return self.linear(x) * options["factor"]


class Conditioned(Backbone):
    """Uses tensors of its options itself, as UNets of diffusers use `added_cond_kwargs`, and so does a block of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shifted = Shifted()

    def forward(self, x: torch.Tensor, t: torch.Tensor, options: dict) -> torch.Tensor:
        more = options["more"]["shift"] if "more" in options else 0.0
        return super().forward(self.shifted(x + options["bias"], options), t, {}) + more


def test_an_expanded_input_is_fed_like_any_other(pair):
    """A batch of one timestep, as pipelines of diffusers give it."""
    module, compiled = pair
    x, _ = inputs(2, 16, 6)
    with torch.inference_mode():
        for number in range(5):
            t = torch.full((1,), number / 7).cuda().expand(2)
            assert close(compiled(x, t), module(x, t)), number
    assert any(step.graph is not None for step in compiled._nexfort_engine.graphs._steps.values())


def test_tensors_of_the_options_are_inputs():
    torch.manual_seed(0)
    module = Conditioned().cuda().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(module)
    generator = torch.Generator().manual_seed(5)

    def number(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).cuda()

    kinds = [
        lambda: {"factor": number(8), "bias": number(8)},
        lambda: {"factor": number(8), "bias": number(16, 8)},
        lambda: {"factor": number(8), "bias": number(8), "more": {"shift": number(1)}},
        lambda: {"factor": number(8), "bias": number(1).expand(8)},
    ]
    x, t = inputs(2, 16, 4)
    with torch.inference_mode():
        for kind in (0, 0, 0, 0, 1, 0, 3, 1, 1, 2, 2, 2, 2, 0, 3, 0, 3, 2, 2, 2):
            options = kinds[kind]()
            same = {**options, **({"more": dict(options["more"])} if "more" in options else {})}
            result = compiled(x, t, options)
            assert close(result, module(x, t, same)), kind
            assert options.keys() == same.keys() and all(options[k] is same[k] for k in options if k != "more")
    steps = compiled._nexfort_engine.graphs._steps.values()
    assert sum(step.graph is not None for step in steps) >= 2, compiled.report.as_dict()["notes"]
    assert not any("CUDA graph" in note for note in compiled.report.as_dict()["notes"])
    assert not compiled.report.as_dict()["eager"]


def test_a_hook_ends_replaying(pair):
    module, compiled = pair
    given = inputs(2, 16, 3)
    calls = []
    with torch.inference_mode():
        for _ in range(3):
            compiled(*given)
        hook = module.enter.register_forward_hook(lambda *_: calls.append(1))
        compiled(*given)
        hook.remove()
    assert calls == [1]


def test_memory_comes_back(pair):
    _, compiled = pair
    with torch.inference_mode():
        for length in range(16, 400, 16):
            for _ in range(2):
                compiled(*inputs(2, length, 0))
    graphs = compiled._nexfort_engine.graphs
    assert len(graphs._steps) <= 4
    graphs.release()
    assert not graphs._steps


class Waiting(Backbone):
    """Its code between regions waits for the GPU, which no capture survives."""

    def forward(self, x: torch.Tensor, t: torch.Tensor, options: dict | None = None) -> torch.Tensor:
        return super().forward(x, t, options) * (2.0 if t.sum().item() > 0 else 1.0)


def test_code_that_waits_is_refused_and_the_step_completes():
    module = Waiting().cuda().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(module)
    given = inputs(2, 16, 4)
    with torch.inference_mode():
        for _ in range(5):
            assert close(compiled(*given), module(*given))
    assert any("no CUDA graph" in note for note in compiled.report.as_dict()["notes"])
    assert not any(step.graph for step in compiled._nexfort_engine.graphs._steps.values())


def test_a_gone_graph_leaves_no_memory():
    module = Backbone(width=512).cuda().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(module)
    given = inputs(8, 4096, 5)
    with torch.inference_mode():
        compiled(*given)
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        for _ in range(3):
            compiled(*given)
        torch.cuda.empty_cache()
        with_graph = torch.cuda.mem_get_info()[0]
        assert before - with_graph > 2**25, "the graph holds the activations of a step"
        compiled._nexfort_engine.graphs.release()
        torch.cuda.empty_cache()
        assert before - torch.cuda.mem_get_info()[0] < 2**24


def test_a_cancel_while_a_step_is_captured_reaches_the_host(monkeypatch):
    module = Backbone().cuda().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(module)
    given, asked = inputs(2, 16, 6), []

    def cancel() -> None:
        asked.append(True)
        if len(asked) == 3:
            raise KeyboardInterrupt

    with torch.inference_mode():
        for _ in range(2):  # the second would be captured in the third
            compiled(*given)
        engine = compiled._nexfort_engine
        engine.graphs.release()
        compiled(*given)
        ask_instead(monkeypatch, engine, cancel=cancel)
        with pytest.raises(KeyboardInterrupt):
            compiled(*given)
        for _ in range(3):
            assert close(compiled(*given), module(*given))
    assert any(step.graph is not None for step in engine.graphs._steps.values())


def test_what_is_put_on_the_network_later_is_seen(pair):
    module, compiled = pair
    given = inputs(2, 16, 7)
    with torch.inference_mode():
        for _ in range(3):
            compiled(*given)
        before = {id(step) for step in compiled._nexfort_engine.graphs._steps.values()}
        module.forward_orig = lambda *_: None
        assert close(compiled(*given), module(*given))
        assert {id(step) for step in compiled._nexfort_engine.graphs._steps.values()} != before
        del module.forward_orig
        for _ in range(2):
            module.blocks[1].up.weight.data = module.blocks[1].up.weight.data.t().contiguous().t()
            assert close(compiled(*given), module(*given))


def test_graphs_that_are_garbage_do_not_go_while_another_is_captured():
    given = inputs(2, 16, 9)
    old, new = ({"compiled": nexfort_engine.compile(Backbone().cuda().eval().requires_grad_(False))} for _ in range(2))
    thresholds = gc.get_threshold()
    with torch.inference_mode():
        for _ in range(3):
            old["compiled"](*given)
        for _ in range(2):
            new["compiled"](*given)
        gc.collect()
        old["itself"] = old
        del old
        gc.set_threshold(1, 1, 1)
        try:
            new["compiled"](*given)
        finally:
            gc.set_threshold(*thresholds)
    engine = new["compiled"]._nexfort_engine
    assert any(step.graph is not None for step in engine.graphs._steps.values())
    assert not new["compiled"].report.as_dict()["eager"]


def test_a_region_that_fails_while_it_is_captured_stays_compiled(monkeypatch):
    from nexfort_engine.runtime.artifact import Binding

    module = Backbone().cuda().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(module)
    given, run = inputs(2, 18, 10), Binding.run

    def failing(*args):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the capture is over")
        return run(*args)

    monkeypatch.setattr(Binding, "run", failing)
    with torch.inference_mode():
        for _ in range(4):
            assert close(compiled(*given), module(*given))
    report = compiled.report.as_dict()
    assert not report["eager"] and any("the capture is over" in note for note in report["notes"])


OFFSETS = torch.arange(8.0)


class Positioned(Backbone):
    """Its code between regions makes small tensors on the CPU in each step, as Wan's and LTX's in ComfyUI does."""

    def forward(self, x: torch.Tensor, t: torch.Tensor, options: dict | None = None) -> torch.Tensor:
        angles = t[:, None] * torch.pow(10000, -torch.arange(8).to(t).div(8))  # as Wan's timestep
        place = torch.zeros_like(x[0])
        place[-1] = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]) / 8
        place[0, 0] = 2.5
        place[1].copy_(torch.linspace(0, 1, 8, dtype=torch.float64))
        x = x * torch.tensor([0.5, 1.0], dtype=torch.float64).to(x).repeat(4) + place
        x = x + angles.cos()[:, None] * torch.tensor([0.1, 0.2], device=x.device).repeat(4)
        one = torch.arange(8).to(x)
        one.mul_(0.1).add_(x[0, 0])  # in place, on what was copied
        x = x + one + x[:, [0, 1]].mean(1, keepdim=True)
        x[:, [2, 3]] = 0.5
        return super().forward(x, t, options)


class Copying(Backbone):
    """Its code between regions copies what is no constant of the step."""

    def __init__(self, what) -> None:
        super().__init__()
        self.__dict__["what"] = what
        self.table = torch.arange(8.0)
        self._late: list = []

    def forward(self, x: torch.Tensor, t: torch.Tensor, options: dict | None = None) -> torch.Tensor:
        return super().forward(x + self.what(self).to(x), t, options)


def _late(module) -> torch.Tensor:
    """A table that the first step makes and the others find."""
    if not module._late:
        module._late.append(torch.arange(8.0))
    return module._late[0]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_constants_that_glue_copies_are_in_the_graph(mode):
    torch.manual_seed(0)
    module = Positioned().cuda().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(module)
    with mode():
        for seed in range(6):
            for batch, length in ((2, 16), (1, 24)):
                given = inputs(batch, length, seed)
                assert close(compiled(*given), module(*given)), (seed, batch)
    steps = list(compiled._nexfort_engine.graphs._steps.values())
    assert sum(step.graph is not None for step in steps) == 2, compiled.report.as_dict()["notes"]
    assert all(step.sent for step in steps)
    assert not any("CUDA graph" in note for note in compiled.report.as_dict()["notes"])
    compiled._nexfort_engine.graphs.release()
    with mode():
        for seed in range(3):
            given = inputs(2, 16, seed)
            assert close(compiled(*given), module(*given))


@pytest.mark.parametrize(
    "what, reason",
    [
        (lambda module: 0.0 * torch.randn(8), "copies between the GPU and main memory"),
        (lambda module: OFFSETS, "copies between the GPU and main memory"),
        (lambda module: module.table, "copies between the GPU and main memory"),
        (lambda module: torch.arange(8) * module.table, "copies between the GPU and main memory"),
        (_late, "copies between the GPU and main memory"),
        (lambda module: 0.0 * torch.full((8,), time.perf_counter()) + 1.0, ""),
        (lambda module: 1e-9 * torch.full((8,), time.perf_counter() % 1), "another one in each step"),
    ],
    ids=["random", "outside", "attribute", "computed", "late", "same bits", "another"],
)
def test_other_copies_are_refused_and_the_step_completes(what, reason):
    module = Copying(what).cuda().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(module)
    given = inputs(2, 16, 4)
    with torch.inference_mode():
        for _ in range(6):
            assert close(compiled(*given), module(*given))
    notes = "; ".join(compiled.report.as_dict()["notes"])
    graphs = [step for step in compiled._nexfort_engine.graphs._steps.values() if step.graph is not None]
    assert (reason in notes and not graphs) if reason else (graphs and "CUDA graph" not in notes), notes


class GatedBlock(nn.Module):
    """A block whose first product is a kernel that writes descriptors, where there is such a kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(value * nn.functional.gelu(gate))


class Gated(nn.Module):
    """Three such blocks."""

    def __init__(self, width: int = 640) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_kernels_that_write_descriptors_are_captured(monkeypatch):
    if torch.cuda.get_device_capability() not in DESCRIPTORS:
        pytest.skip("such kernels are for cards of compute capability 9.0")
    torch.manual_seed(0)
    launched, own = [], CachingAutotuner.run

    def run(self, *args, **kwargs):
        launched.append(writes_descriptors(self))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "run", run)
    module = Gated().cuda().half().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(module)
    with torch.inference_mode():
        for seed in range(6):
            x = torch.randn(2, 4096, 640, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).half()
            found = compiled(x)
            assert close(found.float(), module(x).float())
    assert any(launched), "no kernel wrote descriptors: the test proves nothing"
    assert all(step.graph is not None for step in compiled._nexfort_engine.graphs._steps.values())


@pytest.mark.skipif("PYTORCH_CUDA_ALLOC_CONF" in os.environ, reason="an allocator was chosen")
def test_all_of_this_with_the_allocator_that_comfyui_chooses():
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    files = [__file__, str(Path(__file__).with_name("test_invariant_cache_on_gpu.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.startswith("............"), "its tests were run, not skipped"
