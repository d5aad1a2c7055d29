# SPDX-License-Identifier: Apache-2.0
"""What is no model, or none that a graph can hold: the eager result or a refusal, in one sentence, nothing lost.

The sentence says what was found, what was expected and what to do. Bad machines are in test_bad_machine.py, bad caches
in test_bad_cache.py.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_net
import torch
from backbones import make
from patchers import patcher_around, sample
from small_net import TOLERANCE, Small, assert_runs_eager, distance, run, sentence
from torch import nn

import nexfort_engine
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.hosts.comfy import model as comfy_host

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
cache, forgetful = small_net.cache, small_net.forgetful  # fixtures
CONFIG = CompileConfig.parse(None)


# ---- not a diffusion model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), ("object", "MODEL output")),
        (None, ("NoneType", "MODEL output")),
        ("a path.safetensors", ("str", "MODEL output")),
        (SimpleNamespace(add_wrapper_with_key=None, model=None), ("SimpleNamespace", "MODEL output")),
        (
            SimpleNamespace(add_wrapper_with_key=None, model=nn.Linear(2, 2)),
            ("Linear", "holds no diffusion model", "MODEL output"),
        ),
    ],
)
def test_what_is_no_model_is_refused(value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(TypeError) as refusal:
        comfy_host.attach(value, CONFIG)
    sentence(refusal.value, "Nexfort Compile Model got a", *words)


@pytest.mark.comfy
def test_a_text_encoder_in_a_patcher_is_refused_and_unharmed(comfyui: Path) -> None:
    import comfy.model_patcher

    cpu = torch.device("cpu")
    clip = comfy.model_patcher.ModelPatcher(Small(), load_device=cpu, offload_device=cpu)
    before = set(vars(clip.model)), dict(clip.wrappers)
    with pytest.raises(TypeError) as refusal:
        comfy_host.attach(clip, CONFIG)
    sentence(refusal.value, "Small", "holds no diffusion model", "connect the MODEL output")
    assert (set(vars(clip.model)), dict(clip.wrappers)) == before


@pytest.mark.parametrize("value", [object(), None, nn.Linear(2, 2), SimpleNamespace(first_stage_model="latents")])
def test_what_is_no_vae_is_refused(value: Any) -> None:
    with pytest.raises(TypeError) as refusal:
        comfy_host.attach_vae(value, CONFIG)
    sentence(refusal.value, f"Nexfort Compile VAE got a {type(value).__name__}", "expected the VAE output of a loader")


@pytest.mark.parametrize("value", [run, torch.nn.functional.gelu, None, {"unet": 1}, Small])
def test_compile_refuses_what_is_no_module(value: Any) -> None:
    with pytest.raises(TypeError) as refusal:
        nexfort_engine.compile(value)
    sentence(refusal.value, f"got a {type(value).__name__}", "expected a torch.nn.Module", "torch.compile")


@pytest.mark.parametrize("value", [Small(), None, "stabilityai/a-model", run])
def test_compile_pipe_refuses_what_is_no_pipeline(value: Any) -> None:
    with pytest.raises(TypeError) as refusal:
        nexfort_engine.compile_pipe(value)
    sentence(refusal.value, f"got a {type(value).__name__}", "expected a diffusers pipeline", "nexfort_engine.compile")


def test_compile_pipe_refuses_a_pipeline_without_a_part_it_knows() -> None:
    pipe = SimpleNamespace(components={"upscaler": None}, upscaler=Small(), unet=None)
    before = dict(vars(pipe))
    with pytest.raises(ValueError) as refusal:
        nexfort_engine.compile_pipe(pipe)
    sentence(refusal.value, "SimpleNamespace", "none of the parts", "unet, transformer", "expected at least one")
    assert vars(pipe) == before


# ---- nothing to compile --------------------------------------------------------------------------------------


class NoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.ReLU(), nn.Sigmoid()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return x


def test_a_model_without_weights_runs_as_it_is_and_a_note_says_so(cache: Path) -> None:
    compiled = nexfort_engine.compile(NoWeights())
    for _ in range(2):
        assert torch.equal(run(compiled), run(NoWeights()))
    found = compiled.report.as_dict()
    assert found["calls"] == 2 and not found["regions"] and not found["artefacts"] and not found["eager"]
    (note,) = found["notes"]
    sentence(note, "no region", "no weights", "runs as it is")
    assert not cache.exists()


class Stubborn(Small):
    """What it computes depends on a value: no graph holds it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.sum()) > 1e6 else super().forward(-x)


def test_a_model_that_no_graph_holds_runs_eager_with_its_reason(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compiled = nexfort_engine.compile(Stubborn())
    for _ in range(2):
        assert_runs_eager(compiled, "branches on the value of a tensor")
    assert compiled.report.as_dict()["eager"][0]["region"] == "(whole module)"
    assert "def forward" not in capfd.readouterr().err, "torch printed its graph"


# ---- a checkpoint of an unknown family ----------------------------------------------------------------------------


@pytest.mark.comfy
def test_an_unknown_family_is_compiled_by_its_structure(comfyui: Path) -> None:
    network = make("torch_dit").module  # none of ComfyUI's classes
    patcher = patcher_around(network)
    wanted = sample(patcher)
    assert distance(sample(patcher, seed=1), wanted) > 100 * TOLERANCE
    compiled = comfy_host.attach(patcher, CONFIG)
    assert distance(sample(compiled), wanted) < TOLERANCE
    report = comfy_host.report_of(compiled)
    assert report is not None
    found = report.as_dict()
    assert not found["eager"] and {"blocks.0", "blocks.1"} <= {row["name"] for row in found["regions"]}


class Alien(nn.Module):
    """A network nobody has seen: a list of nothing, weights of its own, and a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.ModuleList()
        self.mix = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor, **_: Any) -> torch.Tensor:
        push = 0.1 if float(context.mean()) > 0 else 0.2
        return self.mix(x) * self.gain + push * context.mean()


@pytest.mark.comfy
def test_a_network_that_cannot_be_compiled_samples_eagerly_with_a_reason(comfyui: Path, cache: Path) -> None:
    torch.manual_seed(0)
    network = Alien()
    patcher = patcher_around(network)
    keys, wanted = list(network.state_dict()), sample(patcher)
    compiled = comfy_host.attach(patcher, CONFIG)
    assert torch.equal(sample(compiled), wanted)
    report = comfy_host.report_of(compiled)
    assert report is not None
    found = report.as_dict()
    (row,) = found["eager"]
    sentence(row["reason"])
    assert not found["artefacts"] and list(network.state_dict()) == keys


# ---- options that are no options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"mode": "O2"', ("not valid JSON", "line 1 column 14", "expected for example")),
        ('{"mode": "O2",\n "dynamic": ture}', ("not valid JSON", "line 2 column 13", "near")),
        ("{'mode': 'O2'}", ("not valid JSON", "line 1 column 2", "double quotes")),
        ("[1, 2]", ("JSON list", "expected an object")),
        ('{"mode": "O2", "mode": "jit"}', ("'mode' twice", "expected each key once")),
        ('{"mod": "O2"}', ("unknown key 'mod'", "did you mean 'mode'", "Valid:")),
        ("max-autotun", ("'max-autotun'", "did you mean 'max-autotune'", "Valid:")),
    ],
)
def test_broken_options_are_refused_with_the_place(text: str, words: tuple[str, ...]) -> None:
    module = Small()
    before = set(vars(module)), list(module.state_dict())
    pipe = SimpleNamespace(components={}, unet=module)
    calls: list[Callable[[], Any]] = [
        lambda: nexfort_engine.compile(module, options=text),
        lambda: nexfort_engine.compile_pipe(pipe, options=text),
        lambda: CompileConfig.parse(text),
    ]
    for call in calls:
        with pytest.raises(ValueError) as refusal:
            call()
        sentence(str(refusal.value).replace("\n", " "), *words)
        assert "Traceback" not in str(refusal.value)
    assert (set(vars(module)), list(module.state_dict())) == before and vars(pipe)["unet"] is module


# ---- nothing stays behind -------------------------------------------------------------------------------------


def test_a_refused_or_eager_model_is_let_go(cache: Path) -> None:
    import weakref

    module = Stubborn()
    compiled = nexfort_engine.compile(module)
    run(compiled)
    gone = weakref.ref(module)
    del module, compiled
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
    assert gone() is None
