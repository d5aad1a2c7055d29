# SPDX-License-Identifier: Apache-2.0
"""Artefacts made beside ComfyUI's own sampling: the first picture is eager's to the bit, the next ones are compiled."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backbones import make
from patchers import MOVES, STEPS, TOLERANCE, distance, in_the_middle, patcher_around, sample, with_lora
from subjects import graphs_as_they_are, ran
from tiny_autoencoders import taesd, vae

from nexfort_engine.compilation import handover
from nexfort_engine.compilation.background import Background
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.lowering import inductor
from nexfort_engine.system.traced_thread import kept_to_its_thread

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
CONFIG = CompileConfig.parse({"options": {"compile.background": True}})


@pytest.fixture
def lowering(tmp_path: Path) -> Iterator[threading.Event]:
    """Graphs run as they are, nothing is stored yet; what is lowered waits for this event."""
    tmp_path.chmod(0o700)
    opened = threading.Event()
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
        own = inductor.lower

        def slow(*args: Any) -> None:
            assert threading.current_thread() is threading.main_thread() or opened.wait(60)
            own(*args)

        patch.setattr(inductor, "lower", slow)
        yield opened
        opened.set()
        for thread in threading.enumerate():
            if thread.name == "nexfort-background":
                thread.join(60)


@pytest.fixture
def patcher() -> Any:
    return patcher_around(make("torch_dit").module)


def background_of(patcher: Any) -> Background:
    engine = host.engine_for(patcher.model.diffusion_model, CONFIG, patcher.model)
    assert engine.builder.background is not None
    return engine.builder.background


def finish(patcher: Any, opened: threading.Event) -> None:
    opened.set()
    assert background_of(patcher).join(60)


def report(patcher: Any) -> dict[str, Any]:
    found = host.report_of(patcher)
    assert found is not None
    return found.as_dict()


def test_what_a_short_picture_lacks_is_begun_in_its_last_step(patcher: Any, lowering: threading.Event) -> None:
    wanted = sample(patcher, steps=4)
    compiled, begun = host.attach(patcher, CONFIG), list[int]()
    following = in_the_middle(compiled, lambda: begun.append(background_of(patcher).begun))
    count, found = ran(lambda: sample(following, steps=4))
    assert count == 0 and torch.equal(found, wanted)
    assert begun == [0] and background_of(patcher).begun == 1
    finish(patcher, lowering)
    count, found = ran(lambda: sample(compiled, steps=4))
    assert count == 4 * len(report(compiled)["regions"]) and distance(found, wanted) < TOLERANCE


def test_a_picture_is_of_one_kind_and_a_seed_gives_the_same_bits(
    patcher: Any, lowering: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "SHORT", 0.0)
    wanted = {seed: sample(patcher, seed=seed, steps=4) for seed in (0, 1)}
    assert distance(wanted[0], wanted[1]) > MOVES
    compiled = host.attach(patcher, CONFIG)
    made_in_the_middle = in_the_middle(compiled, lambda: finish(patcher, lowering))
    count, first = ran(lambda: sample(made_in_the_middle, steps=4))
    assert count == 0 and torch.equal(first, wanted[0]), "it began eager"
    for seed in (0, 1):
        found = [ran(lambda seed=seed: sample(compiled, seed=seed, steps=4)) for _ in range(2)]
        assert distance(found[0][1], wanted[seed]) < TOLERANCE and torch.equal(found[0][1], found[1][1])
        assert [count for count, _ in found] == [4 * len(report(compiled)["regions"])] * 2
    told = report(compiled)
    assert not told["eager"] and told["artefacts_compiled"] and told["calls"] == 5 * 4


def test_the_steps_are_counted_by_the_noise_levels(patcher: Any, lowering: threading.Event) -> None:
    seen = []
    own = host.picture

    def picture(args: Any, kwargs: Any) -> Any:
        found = own(args, kwargs)
        assert found is not None
        seen.append((found.name, found.steps, found.ended()))
        return found

    compiled = host.attach(patcher, CONFIG)
    engine = host.engine_for(patcher.model.diffusion_model, CONFIG, patcher.model)
    with pytest.MonkeyPatch.context() as patch:
        object.__setattr__(engine.state.hooks, "picture", picture)
        for _ in range(2):
            sample(compiled, steps=5)
        object.__setattr__(engine.state.hooks, "picture", own)
        del patch
    assert [row[1:] for row in seen] == [(5, ended) for ended in range(5)] * 2
    assert len({id(name) for name, _, _ in seen}) == 2, "each run of a sampler is one picture"


def test_a_picture_begun_while_another_network_compiles_is_eager(patcher: Any, lowering: threading.Event) -> None:
    other = patcher_around(make("torch_dit", depth=3).module)
    wanted = sample(other)
    sample(host.attach(patcher, CONFIG))
    beside = host.attach(other, CONFIG)
    assert torch.equal(sample(beside), wanted)
    finish(patcher, lowering)
    for _ in range(3):
        sample(beside)
        finish(other, lowering)
    count, found = ran(lambda: sample(beside))
    assert count == STEPS * len(report(beside)["regions"]) and distance(found, wanted) < TOLERANCE


def test_a_lora_that_comes_meanwhile_is_in_the_picture(patcher: Any, lowering: threading.Event) -> None:
    plain = sample(patcher)
    changed = with_lora(patcher, 2.0)
    wanted = sample(changed)
    assert distance(wanted, plain) > MOVES
    assert torch.equal(sample(host.attach(patcher, CONFIG)), plain)
    compiled = host.attach(changed, CONFIG)
    assert torch.equal(sample(compiled), wanted), "it compiles meanwhile"
    finish(patcher, lowering)
    assert distance(sample(compiled), wanted) < TOLERANCE
    assert distance(sample(host.attach(patcher, CONFIG)), plain) < TOLERANCE


def test_bypassed_or_switched_off_meanwhile_it_is_eager(
    patcher: Any, lowering: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = sample(patcher)
    compiled = host.attach(patcher, CONFIG)
    sample(compiled)
    assert background_of(patcher).busy
    assert torch.equal(sample(patcher), wanted)
    with monkeypatch.context() as patch:
        patch.setenv("NEXFORT_DISABLE", "1")
        assert torch.equal(sample(compiled), wanted)
    finish(patcher, lowering)
    assert torch.equal(sample(patcher), wanted)
    with monkeypatch.context() as patch:
        patch.setenv("NEXFORT_DISABLE", "1")
        assert torch.equal(sample(compiled), wanted)
    assert distance(sample(compiled), wanted) < TOLERANCE


def test_a_cancel_is_answered_at_once_while_it_compiles(
    patcher: Any, lowering: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management as management

    monkeypatch.setattr(handover, "SHORT", 0.0)
    compiled, asked = host.attach(patcher, CONFIG), [0.0]

    def cancel() -> None:
        asked[0] = time.perf_counter()
        management.interrupt_current_processing()

    with pytest.raises(management.InterruptProcessingException):
        # ComfyUI asks for a cancel in layers and between nodes; here it is a node's wrapper that does
        sample(in_the_middle(compiled, lambda: (cancel(), management.throw_exception_if_processing_interrupted())))
    assert time.perf_counter() - asked[0] < 1 and background_of(patcher).busy
    finish(patcher, lowering)
    assert report(compiled)["artefacts_compiled"], "what was begun is made"
    wanted = sample(patcher)
    assert distance(sample(compiled), wanted) < TOLERANCE


def test_layers_look_for_a_cancel_while_a_block_is_captured() -> None:
    """They look for none where torch says that it compiles, and an export says it of the whole process."""
    import comfy.model_management as management
    import comfy.ops
    import torch.export._trace

    ended, begun = threading.Event(), threading.Event()

    def export() -> None:
        with kept_to_its_thread(), torch.export._trace._compiling_state_context():
            begun.set()
            ended.wait(30)

    thread = threading.Thread(target=export)
    thread.start()
    try:
        assert begun.wait(30)
        management.interrupt_current_processing()
        with pytest.raises(management.InterruptProcessingException):
            comfy.ops.disable_weight_init.Linear(4, 4)(torch.randn(2, 4))
    finally:
        management.interrupt_current_processing(False)
        ended.set()
        thread.join(30)


@torch.inference_mode()
def test_a_vae_decodes_a_picture_in_one_way(lowering: threading.Event) -> None:
    """Its tiles are calls of one node: what begins eager stays so."""
    from comfy_execution.utils import CurrentNodeContext

    plain = vae(taesd(4))
    latents = [torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    wanted = [plain.decode(latent) for latent in latents]
    compiled = host.attach_vae(plain, CONFIG)
    model = compiled.first_stage_model
    background = model._nexfort_engine.builder.background
    with CurrentNodeContext("a prompt", "7"):
        for latent, picture in zip(latents, wanted, strict=True):
            count, found = ran(lambda latent=latent: compiled.decode(latent))
            assert count == 0 and torch.equal(found, picture)
            lowering.set()
            assert background.join(60)
    for number in ("8", "9"):
        with CurrentNodeContext("a prompt", number):
            found = [ran(lambda latent=latent: compiled.decode(latent)) for latent in latents]
            assert all(count == found[0][0] > 0 for count, _ in found)
            assert all(distance(one, picture) < TOLERANCE for (_, one), picture in zip(found, wanted, strict=True))
    assert not model.report.as_dict()["eager"]
