# SPDX-License-Identifier: Apache-2.0
"""`attach` on ComfyUI's own model patchers and samplers, in this process; test_comfy_vae.py has VAEs,
test_comfy_memory.py what becomes of memory.

The network is a small transformer with ComfyUI's calling convention, and its own Flux class where the family matters.
A server, its loaders and nodes are in test_server.py.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from backbones import make
from patchers import CONFIG, MOVES, STEPS, TOLERANCE, distance, patcher_around, sample
from restarted import counting
from subjects import graphs_as_they_are
from tiny_autoencoders import taesd, vae

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.dispatch import forward_shim, slowdown
from nexfort_engine.dispatch.step_times import STEPS as STEPS_COMPARED
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.hosts.comfy.patch_names import PatchNames
from nexfort_engine.lowering import inductor

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
FAST = CompileConfig.parse("jit")


@pytest.fixture
def patcher() -> Any:
    return patcher_around(make("torch_dit").module)


def report(patcher: Any) -> dict[str, Any]:
    """The report of an attached patcher that has run."""
    found = host.report_of(patcher)
    assert found is not None
    return found.as_dict()


def assert_clean(patcher: Any) -> None:
    """Nothing of the engine acts in the network, and this patcher knows nothing of it."""
    assert not forward_shim._installed
    assert not [p for p, sub in patcher.model.diffusion_model.named_modules() if "forward" in vars(sub)]
    assert host.KEY not in patcher.attachments
    assert not any(host.KEY in table for table in patcher.wrappers.values())


# ---- attach ----------


def test_attach_gives_a_clone_and_compiles_nothing(patcher: Any) -> None:
    keys, options = list(patcher.model.state_dict()), repr(patcher.model_options)
    with counting() as counted:
        compiled = host.attach(patcher, CONFIG)
    assert counted.as_dict() == {"exports": 0, "lowerings": 0}
    assert compiled is not patcher and compiled.model is patcher.model and compiled.is_clone(patcher)
    assert host.report_of(patcher) is None
    assert report(compiled)["calls"] == 0 and not report(compiled)["regions"] and not report(compiled)["artefacts"]
    assert repr(patcher.model_options) == options and list(patcher.model.state_dict()) == keys
    assert_clean(patcher)


def test_the_latent_is_eager_s_and_bypass_is_eager_to_the_bit(patcher: Any) -> None:
    wanted = sample(patcher)
    assert distance(sample(patcher, prompt=1), wanted) > MOVES and distance(sample(patcher, seed=1), wanted) > MOVES
    compiled = host.attach(patcher, CONFIG)
    first = sample(compiled)
    assert distance(first, wanted) < TOLERANCE
    found = report(compiled)
    assert found["calls"] == STEPS and found["regions"] and not found["eager"]
    assert torch.equal(sample(patcher), wanted), "bypassing the node gives another picture"
    assert torch.equal(sample(compiled), first)
    assert report(compiled)["calls"] == 2 * STEPS
    assert_clean(patcher)


def test_bypassed_steps_tell_how_long_eager_takes(patcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.2]
    monkeypatch.setattr(slowdown, "begin", lambda device: lambda now=seconds[0]: lambda: now)
    wanted = sample(patcher)
    compiled = host.attach(patcher, CONFIG)
    for _ in range(STEPS_COMPARED // STEPS + 1):
        sample(compiled)
    assert not report(compiled)["pace"]
    seconds[0] = 0.1
    for _ in range(2):
        assert torch.equal(sample(patcher), wanted)
        sample(patcher, size=(24, 16))
    (row,) = report(compiled)["pace"]
    assert row["slower"] and row["source"] == slowdown.WITHOUT and row["compiled_ms"] == pytest.approx(200)
    assert_clean(patcher)


def test_the_log_ends_a_sampling_with_its_speed(
    patcher: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = [0.1]
    monkeypatch.setattr(slowdown, "begin", lambda device: lambda now=seconds[0]: lambda: now)
    compiled = host.attach(patcher, CONFIG)
    with caplog.at_level(logging.INFO, "nexfort"):
        for _ in range(3):
            sample(compiled)
        seconds[0] = 0.2
        for _ in range(3):
            sample(patcher)
        seconds[0] = 0.1
        sample(compiled)
    lines = [record.getMessage() for record in caplog.records if "loaded" in record.getMessage()]
    assert len(lines) == 4, "a sampling without the node has no line"
    assert lines[0].startswith(f"Nexfort: {STEPS} steps") and "not measured yet; " in lines[0]
    assert lines[-1] == f"Nexfort: {STEPS} steps of 0.10 s, 2.0x; 0 compiled, 0 loaded"
    assert_clean(patcher)


def test_patches_have_a_name_that_says_which_they_are(patcher: Any) -> None:
    def named(*patches: tuple[float, float]) -> str | None:
        one = patcher.clone()
        key = next(key for key in one.model.state_dict() if key.endswith("weight"))
        for number, strength in patches:
            one.add_patches({key: ("diff", (torch.full_like(one.model.state_dict()[key], number),))}, strength)
        one.model.current_patcher = one
        return PatchNames(one.model).name()

    assert named() == "" and named((1.0, 0.5)) == named((1.0, 0.5))
    assert len({named((1.0, 0.5)), named((1.0, 1.0)), named((2.0, 0.5)), named((1.0, 0.5), (2.0, 0.5))}) == 4


@pytest.mark.slow
@pytest.mark.large  # test_comfy_quantised.py has it for a Flux in int8
def test_flux_of_comfyui_serves_every_size_length_and_guidance() -> None:
    patcher = patcher_around(make("comfy_flux").module, flux=True)
    compiled = host.attach(patcher, CONFIG)
    assert distance(sample(compiled), sample(patcher)) < TOLERANCE
    assert not report(compiled)["eager"]
    live = host.report_of(compiled)
    assert live is not None
    mark = live.mark()
    for call in ({"size": (24, 16)}, {"size": (17, 23), "length": 77}, {"cfg": 1.0}, {"seed": 1, "prompt": 1}):
        assert distance(sample(compiled, **call), sample(patcher, **call)) < TOLERANCE, call
    new = live.since(mark)
    assert not new["artefacts"] and not new["variants"] and not new["eager"]
    assert_clean(patcher)


def test_a_node_that_runs_again_finds_its_engine(patcher: Any) -> None:
    first = host.attach(patcher, CONFIG)
    wanted = sample(first)
    live = host.report_of(first)
    assert live is not None
    mark = live.mark()
    with counting() as counted:
        for again in (host.attach(patcher, CONFIG), host.attach(patcher.clone(), CONFIG), host.attach(first, CONFIG)):
            assert torch.equal(sample(again), wanted)
            assert host.report_of(again) is live
    assert counted.as_dict() == {"exports": 0, "lowerings": 0}
    new = live.since(mark)
    assert new["calls"] == 3 * STEPS and not new["artefacts"] and not new["regions"]


def test_attaching_twice_wraps_once(patcher: Any) -> None:
    from comfy.patcher_extension import WrappersMP

    compiled = host.attach(host.attach(patcher, FAST), CONFIG)
    assert len(compiled.get_wrappers(WrappersMP.APPLY_MODEL, host.KEY)) == 1
    sample(compiled)
    assert report(compiled)["calls"] == STEPS and report(compiled)["config"]["mode"] == "O2"


def test_two_configs_on_one_model(patcher: Any) -> None:
    wanted = sample(patcher)
    one, two = host.attach(patcher, CONFIG), host.attach(patcher, FAST)
    for _ in range(2):
        assert distance(sample(one), wanted) < TOLERANCE and distance(sample(two), wanted) < TOLERANCE
    assert host.report_of(one) is not host.report_of(two)
    assert [report(p)["config"]["mode"] for p in (one, two)] == ["O2", "jit"]
    assert [report(p)["calls"] for p in (one, two)] == [2 * STEPS, 2 * STEPS]
    keys = [{row["key"] for row in report(p)["regions"]} for p in (one, two)]
    assert not keys[0] & keys[1]
    assert torch.equal(sample(patcher), wanted)


def test_reports_name_every_engine_that_is_alive(patcher: Any) -> None:
    compiled = host.attach(patcher, CONFIG)
    sample(compiled)
    found = [name for name, one in host.reports() if one is host.report_of(compiled)]
    assert found == [type(patcher.model).__name__]


def test_freezing_is_told_to_have_no_effect_where_nothing_is_kept(patcher: Any) -> None:
    config = CompileConfig.parse("O2:freezing")
    of_vae = host.attach_vae(vae(taesd(4)), config).first_stage_model.report.as_dict()
    (row,) = of_vae["inactive"]
    assert row["token"] == "freezing" and "ComfyUI's MODEL" in row["reason"] and of_vae["config"]["mode"] == config.mode
    assert not report(host.attach(patcher, config))["inactive"]


def test_switched_off_it_gives_back_what_it_gets(patcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.attach(patcher, CompileConfig.parse({"disable": True})) is patcher
    compiled = host.attach(patcher, CONFIG)
    sample(compiled)
    wanted, given_vae = sample(patcher), vae(taesd(4))
    monkeypatch.setenv("NEXFORT_DISABLE", "1")
    assert host.attach(patcher, CONFIG) is patcher and host.attach_vae(given_vae, CONFIG) is given_vae
    calls = report(compiled)["calls"]
    assert torch.equal(sample(compiled), wanted) and report(compiled)["calls"] == calls


def test_core_s_compile_is_taken_off_this_branch(patcher: Any, caplog: pytest.LogCaptureFixture) -> None:
    from comfy.patcher_extension import WrappersMP
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    wanted = sample(patcher)
    core = patcher.clone()
    set_torch_compile_wrapper(model=core, backend="inductor")
    with caplog.at_level(logging.WARNING):
        compiled = host.attach(core, CONFIG)
    assert not compiled.get_wrappers(WrappersMP.APPLY_MODEL, "torch.compile")
    assert len(core.get_wrappers(WrappersMP.APPLY_MODEL, "torch.compile")) == 1, "the other branch keeps its own"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "nexfort"]
    assert "TorchCompileModel" in line and "taken off" in line
    assert distance(sample(compiled), wanted) < TOLERANCE and not report(compiled)["eager"]


def test_a_copy_of_the_model_has_engines_of_its_own(patcher: Any) -> None:
    import copy

    compiled = host.attach(patcher, CONFIG)
    wanted = sample(compiled)
    other = patcher_around(copy.deepcopy(patcher.model.diffusion_model))
    assert report(host.attach(other, CONFIG))["calls"] == 0
    again = host.attach(other, CONFIG)
    assert distance(sample(again), wanted) < TOLERANCE
    assert host.report_of(again) is not host.report_of(compiled)


# ---- patches and LoRA ----------


def test_a_lora_added_after_the_first_run_acts_as_in_eager(patcher: Any) -> None:
    compiled = host.attach(patcher, CONFIG)
    before = sample(compiled)
    live = host.report_of(compiled)
    assert live is not None
    weight = patcher.model.diffusion_model.blocks[0].qkv.weight
    change = {"diffusion_model.blocks.0.qkv.weight": (2.0 * torch.randn(weight.shape),)}

    def with_lora(base: Any) -> Any:
        clone = base.clone()
        assert clone.add_patches(change, 1.0)
        return clone

    mark = live.mark()
    wanted = sample(with_lora(patcher))
    assert distance(wanted, sample(patcher)) > MOVES
    assert distance(sample(with_lora(compiled)), wanted) < TOLERANCE
    assert torch.equal(sample(compiled), before)
    new = live.since(mark)
    assert not new["artefacts"] and not new["eager"]


def test_an_attention_patch_added_later_acts_as_in_eager(patcher: Any) -> None:
    compiled = host.attach(patcher, CONFIG)
    before = sample(compiled)

    def patched(base: Any) -> Any:
        clone = base.clone()
        clone.set_model_attn1_patch(lambda q, k, v, extra: (q, k, v * 4.0))
        return clone

    wanted = sample(patched(patcher))
    assert distance(wanted, sample(patcher)) > MOVES
    assert distance(sample(patched(compiled)), wanted) < TOLERANCE
    assert torch.equal(sample(compiled), before)


# ---- cancel ----------


class SlowLowering:
    """Stands for a lowering that takes a minute: `began` says when it is under way, `release` ends it."""

    def __init__(self) -> None:
        self.began, self.release = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self.began.set()
        self.release.wait(60)
        raise inductor.LoweringFailed("it was only a test")


def _press_cancel(slow: SlowLowering, pressed: list[float]) -> None:
    import comfy.model_management

    assert slow.began.wait(60)
    time.sleep(0.3)
    pressed.append(time.monotonic())
    comfy.model_management.interrupt_current_processing()


def test_cancel_while_lowering_stops_within_a_second_and_the_model_stays_usable(
    patcher: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import comfy.model_management as management

    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    wanted, slow, pressed = sample(patcher), SlowLowering(), []
    compiled = host.attach(patcher, CompileConfig.parse({"dynamic": False}))  # nothing of it is in memory
    thread = threading.Thread(target=_press_cancel, args=(slow, pressed), daemon=True)
    with graphs_as_they_are():
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(inductor, "lower", slow)
                thread.start()
                with pytest.raises(management.InterruptProcessingException):
                    sample(compiled)
                stopped = time.monotonic()
        finally:
            slow.release.set()
            thread.join(70)
            management.interrupt_current_processing(False)
        assert pressed and stopped - pressed[0] < 1.0
        assert_clean(patcher)
        assert torch.equal(sample(patcher), wanted)
        assert distance(sample(compiled), wanted) < TOLERANCE
    assert report(compiled)["artefacts_compiled"] > 0 and not report(compiled)["eager"]
    assert_clean(patcher)
