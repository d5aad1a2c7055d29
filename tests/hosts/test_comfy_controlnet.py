# SPDX-License-Identifier: Apache-2.0
"""`attach_control` on ComfyUI's own control nets, under its own sampler: what moves eager is followed compiled.

What nodes and other packs do to a *model* under control nets is in test_comfy_patches.py, what becomes of memory in
test_comfy_memory.py.
"""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import control_nets
import pytest
import torch
from backbones import make
from control_nets import ALL, HOLDS_ITS_OWN, KINDS, hint, model_for, picture
from large_rows import few
from patchers import CONFIG, MOVES, STEPS, TOLERANCE, distance, nothing_new, sample
from restarted import counting
from subjects import distance as tensors_distance

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.dispatch import forward_shim
from nexfort_engine.hosts.comfy import controlnet
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.lowering import inductor

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache", "quick")]
FAST = CompileConfig.parse("jit")


class Pair:
    """A control net, its compiled copy and a model for both, before the first picture."""

    def __init__(self, name: str, config: CompileConfig = CONFIG) -> None:
        self.name, self.patcher, self.plain = name, model_for(name), KINDS[name][0]()
        self.compiled = controlnet.attach_control(self.plain, config)
        report = controlnet.report_of(self.compiled)
        assert report is not None
        self.report = report

    def eager(self, **given: Any) -> torch.Tensor:
        """The picture under the plain control net."""
        return picture(self.patcher, self.plain, **given)

    def ours(self, **given: Any) -> torch.Tensor:
        """The picture under the compiled one."""
        return picture(self.patcher, self.compiled, **given)

    def follows(self, **given: Any) -> None:
        """Assert that the compiled one gives eager's picture."""
        assert distance(self.ours(**given), self.eager(**given)) < TOLERANCE, given


def begun(name: str) -> tuple[Pair, Any]:
    """A pair after its first picture, and that moment of its report."""
    pair = Pair(name)
    pair.follows()
    assert not pair.report.as_dict()["eager"]
    return pair, pair.report.mark()


def assert_clean() -> None:
    """No engine stands in any block's place."""
    assert not forward_shim._installed


# ---- attach ----------


@pytest.mark.parametrize("name", ALL)
def test_attach_gives_a_copy_and_compiles_nothing(name: str) -> None:
    plain = KINDS[name][0]()
    before, networks = dict(vars(plain)), controlnet.networks_of(plain)
    keys = [list(network.state_dict()) for network in networks.values()]
    with counting() as counted:
        compiled = controlnet.attach_control(plain, CONFIG)
    assert counted.as_dict() == {"exports": 0, "lowerings": 0}
    assert compiled is not plain and isinstance(compiled, type(plain))
    assert vars(plain) == before and controlnet.report_of(plain) is None
    found = controlnet.report_of(compiled)
    assert found is not None and not found.as_dict()["calls"] and not found.as_dict()["artefacts"]
    assert list(map(id, compiled.get_models())) == list(map(id, plain.get_models()))
    mine = [vars(compiled)[attribute] for attribute in networks]
    assert [list(network.state_dict()) for network in mine] == keys
    assert all(network is not vars(plain)[at] for at, network in zip(networks, mine, strict=True))


@pytest.mark.parametrize("name", HOLDS_ITS_OWN)
def test_a_control_net_that_holds_its_network_keeps_its_exact_type(name: str) -> None:
    """Packs that convert control nets compare types."""
    plain = KINDS[name][0]()
    assert type(controlnet.attach_control(plain, CONFIG)) is type(plain)


@pytest.mark.parametrize("name", ALL)
def test_the_picture_is_eager_s_and_bypass_is_eager_to_the_bit(name: str) -> None:
    pair = Pair(name)
    wanted = pair.eager()
    assert distance(wanted, sample(pair.patcher)) > MOVES, "the control net does nothing"
    assert distance(pair.eager(image=hint(1)), wanted) > TOLERANCE, "its hint does nothing"
    assert distance(pair.ours(), wanted) < TOLERANCE
    found = pair.report.as_dict()
    assert found["calls"] == (1 if name == "t2i" else STEPS), "a T2I adapter is called once a run"
    assert found["regions"] and not found["eager"]
    pair.follows(image=hint(1))
    assert torch.equal(pair.eager(), wanted), "bypassing the node gives another picture"
    assert_clean()


@pytest.mark.parametrize("name", few(list(KINDS), ("flux", "t2i")))
def test_a_node_that_runs_again_finds_what_there_is(name: str) -> None:
    pair, _ = begun(name)
    wanted = pair.ours()
    with counting() as counted:
        for again in (pair.plain, pair.compiled):
            compiled = controlnet.attach_control(again, CONFIG)
            assert torch.equal(picture(pair.patcher, compiled), wanted)
            found = controlnet.report_of(compiled)
            assert found is not None and found.as_dict()["artefacts_compiled"] == (
                0 if name == "lora" else pair.report.as_dict()["artefacts_compiled"]
            )
    assert counted.as_dict() == {"exports": 0, "lowerings": 0}


@pytest.mark.parametrize("value", [None, 3, "a control net", torch.nn.Linear(2, 2)])
def test_what_is_no_control_net_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=rf"got a {type(value).__name__}, expected the CONTROL_NET output of a loader"):
        controlnet.attach_control(value, CONFIG)


@pytest.mark.parametrize("name", ALL)
def test_freezing_is_told_to_have_no_effect(name: str) -> None:
    compiled = controlnet.attach_control(KINDS[name][0](), CompileConfig.parse("O2:freezing"))
    found = controlnet.report_of(compiled)
    assert found is not None
    (row,) = found.as_dict()["inactive"]
    assert row["token"] == "freezing" and "ComfyUI's MODEL" in row["reason"]


def test_switched_off_it_gives_back_what_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = control_nets.t2i()
    assert controlnet.attach_control(plain, CompileConfig.parse({"disable": True})) is plain
    pair, _ = begun("t2i")
    calls = pair.report.as_dict()["calls"]
    monkeypatch.setenv("NEXFORT_DISABLE", "1")
    assert controlnet.attach_control(plain, CONFIG) is plain
    assert torch.equal(pair.ours(), pair.eager()) and pair.report.as_dict()["calls"] == calls


# ---- what changes from run to run ----------


@pytest.mark.parametrize("name", few(list(KINDS), ["flux"]))
def test_sizes_batches_and_prompt_lengths_compile_nothing(name: str) -> None:
    pair, mark = begun(name)
    base = pair.eager()
    calls: list[dict[str, Any]] = [
        {"call": {"size": (24, 16)}},
        {"call": {"size": (16, 24), "length": 77}},
        {"call": {"cfg": 1.0}},  # batch 1
        {"call": {"seed": 1, "prompt": 1}},
        {"image": hint(2, 2)},  # two images: the hint has the latents' batch
        {"strength": 0.3},
        {"span": (0.6, 1.0), "call": {"steps": 4}},
    ]
    for given in calls:
        wanted = pair.eager(**given)
        assert wanted.shape != base.shape or distance(wanted, base) > TOLERANCE, given
        pair.follows(**given)
    nothing_new(pair.report.since(mark))


def test_control_nets_in_a_chain_compiled_and_not() -> None:
    one, other = Pair("unet"), Pair("t2i")
    patcher = one.patcher
    rows = [(one.plain, other.plain), (other.plain, one.plain), (one.plain, one.plain)]
    seen = [picture(patcher, *row) for row in (*rows, (one.plain,), (other.plain,))]
    assert all(distance(a, b) > TOLERANCE for a, b in zip(seen, (*seen[2:], *seen[:2]), strict=True))
    compiled = {id(one.plain): one.compiled, id(other.plain): other.compiled}
    for row, wanted in zip(rows, seen, strict=False):
        assert distance(picture(patcher, *(compiled[id(link)] for link in row)), wanted) < TOLERANCE
        assert distance(picture(patcher, compiled[id(row[0])], row[1]), wanted) < TOLERANCE
        assert distance(picture(patcher, row[0], compiled[id(row[1])]), wanted) < TOLERANCE
    assert not one.report.as_dict()["eager"] and not other.report.as_dict()["eager"]


def test_the_plain_control_net_before_ours_stays_eager() -> None:
    """Both hold the same network; only the compiled one's own call is the engine's."""
    pair, mark = begun("unet")
    picture(pair.patcher, pair.plain, pair.compiled)
    assert pair.report.since(mark)["calls"] == STEPS


def test_a_union_type_that_is_set_behind_our_node_acts() -> None:
    pair, mark = begun("flux")
    seen = [pair.eager()]
    for kind in (0, 2):

        def typed(control: Any, kind: int = kind) -> Any:  # as SetUnionControlNetType does it
            copied = control.copy()
            copied.set_extra_arg("control_type", [kind])
            return copied

        wanted = picture(pair.patcher, typed(pair.plain))
        assert all(distance(wanted, other) > TOLERANCE for other in seen), "the type does nothing"
        seen.append(wanted)
        assert distance(picture(pair.patcher, typed(pair.compiled)), wanted) < TOLERANCE
    new = pair.report.since(mark)
    assert not new["eager"] and {row["region"] for row in new["artefacts"]} <= {"controlnet_mode_embedder"}


@pytest.mark.parametrize("name", few(list(KINDS), ("flux", "t2i")))
def test_with_the_model_compiled_too(name: str) -> None:
    pair = Pair(name)
    wanted, model = pair.eager(), host.attach(pair.patcher, CONFIG)
    assert distance(picture(model, pair.compiled), wanted) < TOLERANCE
    report = host.report_of(model)
    assert report is not None and report.as_dict()["calls"] == STEPS and not report.as_dict()["eager"]
    assert pair.report.as_dict()["calls"] and not pair.report.as_dict()["eager"]
    assert distance(picture(model, pair.plain), wanted) < TOLERANCE
    assert_clean()


@pytest.mark.parametrize("name", few(list(KINDS), ("flux", "lora")))
def test_unloaded_and_loaded_again(name: str) -> None:
    import comfy.model_management as management

    pair, mark = begun(name)
    wanted = pair.ours()
    management.unload_all_models()  # as POST /free does it
    management.soft_empty_cache()
    assert torch.equal(pair.ours(), wanted)
    nothing_new(pair.report.since(mark))


@pytest.mark.parametrize("name", few(list(KINDS), ("flux", "lora")))
def test_another_network_of_the_same_kind_starts_warm(name: str) -> None:
    begun(name)
    with counting() as counted:
        pair, _ = begun(name)
    assert counted.as_dict() == {"exports": 0, "lowerings": 0}
    found = pair.report.as_dict()
    assert found["artefacts_loaded"] and not found["artefacts_compiled"]


def test_a_control_lora_that_is_run_often_reports_each_artefact_once() -> None:
    pair, mark = begun("lora")
    for _ in range(3):
        pair.ours()
    new = pair.report.since(mark)
    assert new["calls"] == 3 * STEPS and not new["regions"]
    nothing_new(new)
    assert [name for name, one in host.reports() if one is pair.report] == ["ControlLora"]


def test_a_control_net_that_is_given_the_model_as_an_argument() -> None:
    plain = control_nets.qwen_fun()
    sampling = model_for("flux").model.model_sampling
    model = SimpleNamespace(model_sampling=sampling, diffusion_model=make("comfy_qwen").module)
    compiled = controlnet.attach_control(plain, CONFIG)
    report = controlnet.report_of(compiled)
    assert report is not None
    wanted = control_nets.called(plain, model)
    assert len(wanted) > 1 and all(bool(tensor.abs().max() > 0) for tensor in wanted)
    assert tensors_distance(control_nets.called(compiled, model), wanted) < TOLERANCE
    assert report.as_dict()["calls"] == 1 and report.as_dict()["regions"] and not report.as_dict()["eager"]
    mark = report.mark()
    for given in ({"batch": 1}, {"size": (16, 24)}, {"batch": 3, "size": (24, 16)}):
        found = control_nets.called(compiled, model, **given)
        assert tensors_distance(found, control_nets.called(plain, model, **given)) < TOLERANCE
    nothing_new(report.since(mark))


def test_weights_that_are_cast_on_the_way() -> None:
    """As ComfyUI holds a control net in half precision that the device cannot compute in."""
    import comfy.ops

    plain = control_nets.unet(dtype=torch.float16, operations=comfy.ops.manual_cast)
    plain.manual_cast_dtype = torch.float32
    patcher = model_for("unet")
    compiled = controlnet.attach_control(plain, CONFIG)
    assert distance(picture(patcher, compiled), picture(patcher, plain)) < TOLERANCE
    report = controlnet.report_of(compiled)
    assert report is not None and report.as_dict()["calls"] == STEPS and not report.as_dict()["eager"]


# ---- what goes wrong ----------


class Broken(Exception):
    """What a network of these tests raises."""


@pytest.mark.parametrize("name", HOLDS_ITS_OWN)
def test_a_network_that_raises_raises_the_same(name: str) -> None:
    def broken(*_: Any) -> None:
        raise Broken("of its own")

    pair, mark = begun(name)
    wanted = pair.ours()
    (network,) = controlnet.networks_of(pair.plain).values()
    hook = network.register_forward_pre_hook(broken)
    for run in (pair.eager, pair.ours):
        with pytest.raises(Broken, match="of its own"):
            run()
    hook.remove()
    assert_clean()
    assert torch.equal(pair.ours(), wanted)
    nothing_new(pair.report.since(mark))


def test_a_call_that_the_network_refuses_is_refused_in_the_same_words() -> None:
    pair, _ = begun("flux")
    said = []
    for control in (pair.plain, pair.compiled):
        typed = control.copy()
        typed.set_extra_arg("control_type", [99])
        with pytest.raises(IndexError) as refused:
            picture(pair.patcher, typed)
        said.append(str(refused.value))
    assert said[0] == said[1]
    pair.follows()
    assert_clean()


def test_a_control_object_without_a_network_runs_as_before_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    import comfy.controlnet

    class Bare(comfy.controlnet.ControlBase):
        def copy(self) -> Any:
            copied = Bare()
            self.copy_to(copied)
            return copied

        def get_control(self, x: torch.Tensor, *_: Any) -> Any:
            middle = (x.shape[0], 64, x.shape[2] // 2, x.shape[3] // 2)
            made = 3 * torch.randn(middle, generator=torch.Generator().manual_seed(1))
            return self.control_merge({"middle": [made]}, None, None)

    patcher, plain = model_for("unet"), Bare()
    compiled = controlnet.attach_control(plain, CONFIG)
    assert distance(picture(patcher, plain), sample(patcher)) > MOVES
    with caplog.at_level(logging.WARNING, "nexfort"):
        for _ in range(2):
            assert torch.equal(picture(patcher, compiled), picture(patcher, plain))
    report = controlnet.report_of(compiled)
    assert report is not None
    (row,) = report.as_dict()["eager"]
    assert row["region"] == "(whole module)" and "no network was found" in row["reason"]
    assert len([record for record in caplog.records if "no network was found" in record.getMessage()]) == 1


def test_a_network_with_a_replaced_forward_runs_as_before_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    plain, patcher = control_nets.unet(), model_for("unet")
    network, before = plain.control_model, picture(patcher, plain)
    network.forward = lambda *args, **kwargs: {  # as packs do it
        place: [3 * tensor for tensor in tensors]
        for place, tensors in type(network).forward(network, *args, **kwargs).items()
    }
    wanted = picture(patcher, plain)
    assert distance(wanted, before) > TOLERANCE
    with caplog.at_level(logging.WARNING, "nexfort"):
        compiled = controlnet.attach_control(plain, CONFIG)
    assert "replaced forward" in caplog.text
    assert torch.equal(picture(patcher, compiled), wanted)


def test_cancel_while_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management as management

    pair = Pair(
        "unet", CompileConfig.parse({"dynamic": False, "mode": "max-autotune"})
    )  # nothing of it is in the store
    wanted, began, release = pair.eager(), threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        began.set()
        release.wait(60)
        raise inductor.LoweringFailed("it was only a test")

    def press() -> None:
        assert began.wait(60)
        management.interrupt_current_processing()

    thread = threading.Thread(target=press, daemon=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inductor, "lower", slow)
            thread.start()
            with pytest.raises(management.InterruptProcessingException):
                pair.ours()
    finally:
        release.set()
        thread.join(70)
        management.interrupt_current_processing(False)
    assert_clean()
    assert torch.equal(pair.eager(), wanted)


# ---- copies ----------


def test_a_copy_for_another_device_has_an_engine_of_its_own_that_knows_comfyui() -> None:
    pair, _ = begun("unet")
    if not hasattr(pair.compiled, "deepclone_multigpu"):
        pytest.skip("this ComfyUI has no clones for several GPUs")
    clone = pair.compiled.deepclone_multigpu(torch.device("cpu"))
    mine, other = pair.compiled.control_model, clone.control_model
    assert other.uncompiled() is not mine.uncompiled() and other._nexfort_engine is not mine._nexfort_engine
    assert other._nexfort_engine.state.provider is not None
    assert other._nexfort_engine.state.store is mine._nexfort_engine.state.store
    with counting() as counted:
        assert distance(picture(pair.patcher, clone), pair.eager()) < TOLERANCE
    assert counted.as_dict() == {"exports": 0, "lowerings": 0}
    report = controlnet.report_of(clone)
    assert report is not pair.report and report is not None and report.as_dict()["calls"] == STEPS
