# SPDX-License-Identifier: Apache-2.0
"""Attention that is measured, in graphs and in whole networks: the operator stands where it may and is asked there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_kernels import Kernels
from gpu_blocks import BLOCKS, MASKED, captured, looking, masked, transformer
from large_rows import few
from option_edits import override
from torch import nn

import nexfort_engine
from nexfort_engine.attention import operator
from nexfort_engine.attention.backends import KERNELS, OWN, Call
from nexfort_engine.attention.tuner import Told
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.cudagraphs.capture_check import CaptureCheck
from nexfort_engine.passes.tuned_attention import measured_attentions, quantised_attentions

TESTS = Path(__file__).resolve().parent.parent
TORCHS = torch.ops.aten.scaled_dot_product_attention.default
_OPTIONS = CompileConfig.lowering_options


def count(graph: Any, target: Any) -> int:
    return sum(node.target is target for node in graph.graph.nodes)


# ---- the pass ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "number"), [("transformer", 1), ("masked", 2), ("wide", 1), ("feed_forward", 0)])
def test_attentions_are_written_anew_once(kind: str, number: int) -> None:
    graph = captured(kind).graph
    assert count(graph, TORCHS) == number
    assert measured_attentions(graph) == number and measured_attentions(graph) == 0
    graph.graph.lint()
    assert (count(graph, TORCHS), count(graph, operator.operator())) == (0, number)


def test_the_operator_is_told_what_torchs_was() -> None:
    graph = captured("masked").graph
    found = [(*node.args[3:], *node.kwargs.values()) for node in graph.graph.nodes if node.target is TORCHS]
    assert len(found) == 2
    quantised_attentions(graph)
    one, other = (node.args for node in graph.graph.nodes if node.target is operator.operator())
    assert one[3].meta["val"].dtype is torch.bool and one[4:7] == (False, 0.1, True) and one[8] is True
    assert other[3:7] == (None, True, None, False) and other[8] is True


def _dropped(node: Any) -> None:
    node.args = (*node.args, None, 0.5)


def _named(node: Any) -> None:
    node.kwargs = {**node.kwargs, "dropout_p": 0.5}


def _scaled_by_the_call(node: Any) -> None:
    node.kwargs = {**node.kwargs, "scale": node.args[0]}


def _single(node: Any) -> None:
    for part in node.args[:3]:
        part.meta["val"] = part.meta["val"].float()


def _of_three_dimensions(node: Any) -> None:
    for part in node.args[:3]:
        part.meta["val"] = part.meta["val"][:, 0]


def _of_one_query(node: Any) -> None:
    node.args[0].meta["val"] = node.args[0].meta["val"][:1]


@pytest.mark.parametrize(
    "change", few([_dropped, _named, _scaled_by_the_call, _single, _of_three_dimensions, _of_one_query], 2)
)
def test_what_the_operator_would_not_compute_stays(change: Callable[[Any], None]) -> None:
    graph = captured("transformer").graph
    change(next(node for node in graph.graph.nodes if node.target is TORCHS))
    assert measured_attentions(graph) == 0 and count(graph, TORCHS) == 1


class _Lifted(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, weights: list[torch.Tensor], inputs: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = self.function(weights, *inputs)
        return result


def _inputs(kind: str, batch: int, length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(batch + length)
    shapes, width = BLOCKS[kind][2] if kind in BLOCKS else MASKED[kind][2], 128
    weights = [torch.randn(shape).div(shape[-1] ** 0.5 if len(shape) == 2 else 10).half() for shape in shapes]
    if kind == "looking":
        return weights, [torch.randn(batch, 512, length, 4).half()]
    x = torch.randn(batch, length, width).half()
    kept = torch.rand(batch, length) > 0.3
    kept[:, 0] = True
    return weights, [x, torch.tensor(0.5) if kind == "transformer" else kept]


@pytest.mark.parametrize(("kind", "function"), [("transformer", transformer), ("masked", masked), ("looking", looking)])
def test_graphs_give_what_they_gave_at_other_sizes(kind: str, function: Any) -> None:
    weights, inputs = _inputs(kind, 2, 16)
    sized = {"looking": (2,)}.get(kind, (0, 1))
    free = [dict.fromkeys(sized, torch.export.Dim.AUTO) if t.dim() else {} for t in inputs]
    dims = ([{} for _ in weights], free)
    with torch.no_grad():
        before = torch.export.export(_Lifted(function), (weights, inputs), dynamic_shapes=dims).module()
        exported = torch.export.export(_Lifted(function), (weights, inputs), dynamic_shapes=dims).graph_module
        assert measured_attentions(exported) > 0
        for batch, length in ((2, 16), (2, 12), (3, 9)) if kind != "looking" else ((2, 16), (2, 12), (2, 9)):
            weights, inputs = _inputs(kind, batch, length)
            wanted = before(weights, inputs)
            (found,) = exported(*weights, *inputs)
            assert torch.equal(found, wanted) and found.stride() == wanted.stride()


# ---- whole networks ----------------------------------------------------------------------------------------


def measured(patch: pytest.MonkeyPatch) -> None:
    """Attention is measured in artefacts for the CPU, too."""
    patch.setattr(CompileConfig, "lowering_options", _with_the_switch)


def _with_the_switch(config: CompileConfig, device_type: str) -> dict[str, object]:
    found = _OPTIONS(config, device_type)
    on = config.option("attention.measure") is True
    return {**found, "nexfort.measured_attention": on}


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Kernels for the CPU, and an empty cache."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    found = Kernels(fast=50)
    monkeypatch.setattr(operator, "chooser", found.chooser())
    measured(monkeypatch)
    return found


def network(name: str) -> Any:
    from backbones import make

    tiny = make(name)
    tiny.to(torch.float16)
    return tiny


def given(tiny: Any, **call: Any) -> Any:
    args, kwargs = tiny.make_inputs(**call)
    half = [a.half() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    return half, {
        k: v.half() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in kwargs.items()
    }


ON = {"options": {"attention.measure": True}}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("torch_dit", marks=pytest.mark.large),  # the contracts have it without the option
        *(pytest.param(name, marks=[pytest.mark.comfy, pytest.mark.large]) for name in ("comfy_flux", "comfy_unet")),
    ],
)
@torch.inference_mode()
def test_an_attention_override_of_the_users_wins(name: str, kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """Neither is the operator asked where the override acts, nor does anything of it stay."""
    if name.startswith("comfy"):
        request.getfixturevalue("comfyui")
    tiny = network(name)
    compiled = nexfort_engine.compile(tiny.module, options=ON)
    args, kwargs = given(tiny)
    first = compiled(*args, **kwargs)
    assert kernels.asked["fast"] > 0 and "fast, 50 microseconds" in str(compiled.report)
    assert not compiled.report.as_dict()["eager"]
    asked, options = kernels.asked["fast"], {}
    override(options)
    args, kwargs = given(tiny, options=options)
    wanted = tiny.module(*args, **kwargs)
    args, kwargs = given(tiny, options=options)
    found = compiled(*args, **kwargs)
    assert kernels.asked["fast"] == asked and not compiled.report.as_dict()["eager"]
    apart = (found.float() - wanted.float()).norm() / wanted.float().norm()
    moved = (first.float() - wanted.float()).norm() / wanted.float().norm()
    assert apart < 0.01 < moved / 10
    args, kwargs = given(tiny)
    assert torch.equal(compiled(*args, **kwargs), first) and kernels.asked["fast"] > asked


@pytest.mark.large  # it is off where nobody asks for it
@torch.inference_mode()
def test_without_the_option_nothing_is_asked(kernels: Kernels) -> None:
    tiny = network("torch_dit")
    args, kwargs = given(tiny)
    nexfort_engine.compile(tiny.module)(*args, **kwargs)
    assert not kernels.asked and not kernels.measured


AGAIN = """
import json, sys
import pytest, torch
import test_tuned_attention as test
from attention_kernels import Kernels
from nexfort_engine.attention import operator as attention
import nexfort_engine

kernels = Kernels(fast=500)
attention.chooser = kernels.chooser()
test.measured(pytest.MonkeyPatch())
tiny = test.network("torch_dit")
args, kwargs = test.given(tiny)
compiled = nexfort_engine.compile(tiny.module, options=test.ON)
with torch.inference_mode():
    result = compiled(*args, **kwargs)
data = compiled.report.as_dict()
print(json.dumps({
    "compiled": data["artefacts_compiled"], "loaded": data["artefacts_loaded"], "eager": data["eager"],
    "asked": kernels.asked["fast"], "measured": kernels.measured, "notes": data["notes"],
    "sum": result.double().sum().item(),
}))
"""


# another process takes what was chosen in attention/test_tuning_cache.py, and loads artefacts in contracts.py
@pytest.mark.large
@torch.inference_mode()
def test_a_fresh_process_loads_what_calls_the_operator_and_takes_what_was_chosen(kernels: Kernels) -> None:
    tiny = network("torch_dit")
    args, kwargs = given(tiny)
    compiled = nexfort_engine.compile(tiny.module, options=ON)
    result = compiled(*args, **kwargs)
    path = os.pathsep.join(map(str, (TESTS / "passes", TESTS / "support", TESTS.parent)))
    variables = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, env=variables, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["compiled"], found["measured"], found["eager"]) == (0, 0, []) and found["loaded"] > 0
    assert found["asked"] == 2 and found["sum"] == result.double().sum().item()
    told = [text for text in compiled.report.as_dict()["notes"] if text.startswith("attention")]
    assert told and told == [text for text in found["notes"] if text.startswith("attention")]


# ---- the operator ------------------------------------------------------------------------------------------


def test_a_capture_check_sees_one_operator_and_nothing_of_the_measuring(kernels: Kernels) -> None:
    """Or the first step at some sizes, which measures, would not be taken for one that a graph can hold."""
    q = torch.randn(2, 2, 8, 16)
    with CaptureCheck() as check, torch.inference_mode():
        found = operator.operator()(q, q, q, None, False, None, False, [0, 2, 1, 3], False)
    assert check.reason is None and found.shape == q.shape


def test_masks_of_fewer_dimensions_are_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Asked:
        def run(self, call: Call, order: Any, quantised: bool, told: Told) -> torch.Tensor:
            seen.append(call)
            return call.query

    monkeypatch.setattr(operator, "chooser", Asked())
    q, mask = torch.randn(2, 2, 8, 16), torch.randn(8, 8)
    operator.attention(q, q, q, mask, False, None, False, [0, 1, 2, 3], False)
    assert seen[0].mask.shape == (1, 1, 8, 8) and torch.equal(seen[0].mask[0, 0], mask)


def test_the_registry_for_cards_names_what_the_user_can_switch_off() -> None:
    cuda = torch.backends.cuda
    switches = {
        "cudnn": cuda.enable_cudnn_sdp,
        "flash": cuda.enable_flash_sdp,
        "efficient": cuda.enable_mem_efficient_sdp,
    }
    named = {kernel.name: kernel for kernel in KERNELS["cuda"]()}
    assert set(switches) <= set(named) and OWN not in named
    assert not any(named[name].quantises for name in switches)
    for name, switch in switches.items():
        switch(False)
        try:
            assert not named[name].enabled() and all(named[o].enabled() for o in switches if o != name)
        finally:
            switch(True)
        assert named[name].enabled()
