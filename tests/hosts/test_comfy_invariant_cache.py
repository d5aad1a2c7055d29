# SPDX-License-Identifier: Apache-2.0
"""What is made of a prompt is made once for it in ComfyUI's own steps: on the CPU, with pretended graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backbones import make
from patchers import FAMILIES, TOLERANCE, distance, patcher_around, sample, with_lora
from pretended_graph import Graph, pretend

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.hosts.comfy import conditioning
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.lowering import prompt_subgraph

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui")]
CONFIG = CompileConfig.parse(None)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is lowered in these tests: others are to find none of it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _as_on_a_card(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """Prompts are sent to where images are, steps are graphs, and small products are taken out too."""
    pretend(monkeypatch)
    options = CompileConfig.lowering_options
    monkeypatch.setattr(
        conditioning, "_is_copied", lambda value, _: isinstance(value, torch.Tensor) and value.dim() == 3
    )
    monkeypatch.setattr(
        CompileConfig,
        "lowering_options",
        lambda self, device: {**options(self, device), "nexfort.prompt_once": self.prompt_once},
    )
    monkeypatch.setattr(prompt_subgraph, "LEAST", 1)
    monkeypatch.setenv("NEXFORT_WORKERS", "0")  # which would not know that
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(own_cache))


def invariants(compiled: Any) -> list[int]:
    """How many calls the graphs of a patcher keep."""
    steps = host._engines(compiled.model.diffusion_model)[CONFIG].graphs._steps.values()
    return [step.invariants.count if step.invariants is not None else 0 for step in steps if step.graph is not None]


# the fewest calls that are kept: of both of a UNet's blocks with attention and more, of both of Wan's, its projection;
# others' prompts are read with the time, or lie among the image's tokens, but for what projects them
@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("comfy_wan", 3),
        *(pytest.param(kind, 1, marks=pytest.mark.large) for kind in ("comfy_lumina", "comfy_sd3")),
        pytest.param("comfy_unet", 2, marks=pytest.mark.large),
    ],
)
def test_steps_are_what_they_were_whatever_changes(kind: str, least: int) -> None:
    patcher = patcher_around(make(kind).module, family=FAMILIES[kind])
    compiled = host.attach(patcher, CONFIG)

    def agrees(of: Any, by: Any, **given: Any) -> None:
        wanted = sample(of, steps=4, **given)
        assert distance(wanted, sample(by, steps=4, **given)) < TOLERANCE

    for prompt in (0, 1, 0):
        agrees(patcher, compiled, prompt=prompt, seed=prompt + 5)
    assert max(invariants(compiled)) >= least and len(Graph.made) == 2
    for strength in (0.5, 1.0) if least > 1 else ():
        changed = with_lora(patcher, strength)
        agrees(changed, host.attach(changed, CONFIG), prompt=1)
    agrees(patcher, compiled, prompt=1)
    for weight in patcher.model.diffusion_model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(1.1)  # by nobody's patch
    agrees(patcher, compiled, prompt=1)
    agrees(patcher, compiled, prompt=1, length=96)
    agrees(patcher, compiled, prompt=0, cfg=1.0)


@pytest.mark.large  # below is one that writes to it
def test_wrappers_of_others_see_the_prompt_as_it_was_given() -> None:
    """Then nothing is known of what the network is given, and steps are what they were."""
    from comfy.patcher_extension import WrappersMP

    network, seen = make("comfy_unet").module.bfloat16(), []
    network.dtype = torch.bfloat16
    patcher = patcher_around(network)

    def noted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(args[3].dtype)
        return executor(*args, **kwargs)

    compiled = host.attach(patcher, CONFIG)
    compiled.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "others", noted)
    sample(compiled, steps=4)
    assert set(seen) == {torch.float32} and invariants(compiled) == [0]


def test_a_wrapper_of_others_that_writes_to_the_prompt_is_heeded() -> None:
    from comfy.patcher_extension import WrappersMP

    factors: list[float] = []

    def louder(executor: Any, *args: Any, **kwargs: Any) -> Any:
        words = args[3].mul_(factors[-1])
        return executor(*args[:3], words, *args[4:], **kwargs)

    patcher = patcher_around(make("comfy_wan").module, family=FAMILIES["comfy_wan"])
    plain, compiled = patcher.clone(), host.attach(patcher, CONFIG)
    for one in (plain, compiled):
        one.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "others", louder)
    wanted = []
    for factor in (1.0, 1.0, 2.0, 0.5):
        factors.append(factor)
        wanted.append(sample(plain, steps=4))
        assert distance(wanted[-1], sample(compiled, steps=4)) < TOLERANCE
    assert all(distance(wanted[1], other) > 10 * TOLERANCE for other in wanted[2:]), "the factor does nothing"
