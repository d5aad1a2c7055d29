# SPDX-License-Identifier: Apache-2.0
"""Pages of ComfyUI's dynamic VRAM that are given back, because what lay there is kept packed or laid out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from card_memory import PAGE
from kept_weights import KINDS, Kind, Paged, engine_of, kept
from large_rows import few
from patchers import CONFIG

from nexfort_engine.dispatch import prepack_cache
from nexfort_engine.dispatch import region as dispatch
from nexfort_engine.dispatch.memory_reclaim import MemoryReclaim
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.hosts.comfy import offload as comfy_offload
from nexfort_engine.hosts.comfy import weights as comfy_weights
from nexfort_engine.hosts.comfy.weights import ComfyWeights
from nexfort_engine.weights import lease

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def roomy(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Paged:
    """Under dynamic VRAM, on a card with much room."""
    return Paged(kind.made(monkeypatch), monkeypatch, kind)


def _laid_out(patch: pytest.MonkeyPatch) -> tuple[Kind, Paged]:
    """A network in full precision, in pages."""
    kind = dataclasses.replace(KINDS["laid out"], config=CONFIG)
    return kind, Paged(kind.made(patch), patch, kind)


def _make_dynamic(patch: pytest.MonkeyPatch) -> None:
    """From here on pages are dynamic VRAM's, which on a CPU are none."""
    patch.setattr(comfy_offload, "FROM", ("cpu",))
    for module in (comfy_offload, comfy_weights):
        patch.setattr(module, "is_dynamic", lambda _: True)


@pytest.mark.parametrize("kind", few(KINDS, ["laid out"]), indirect=True)
def test_pages_of_what_is_kept_are_given_back_once(roomy: Paged, kind: Kind) -> None:
    memory = roomy.memory
    first, asked = roomy.sampled(steps=1)
    assert kind.one in asked and len(memory.given_back) == 1
    left = set(memory.resident)
    assert memory.given_back[0] == PAGE * (len(memory.filled) - len(left))
    _, asked = roomy.sampled(steps=3)
    assert asked and roomy.pages_of(asked) <= left == memory.resident, "all that is asked for still"
    assert left <= roomy.others, "and nothing of what is kept"
    assert torch.equal(roomy.sampled(steps=1)[0], first)
    assert set(memory.filled.values()) == {1}, "nothing was read again"
    assert len(memory.given_back) == 1 and not +memory.pins


@pytest.mark.large  # the others are in half precision
def test_in_full_precision_weights_are_laid_out_once_where_pages_are_given_back_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, roomy = _laid_out(monkeypatch)
    first, asked = roomy.sampled()
    assert kind.one in asked and not any(kept(roomy.clone)) and not roomy.memory.given_back
    _make_dynamic(monkeypatch)
    assert torch.equal(roomy.sampled()[0], first) and all(kept(roomy.clone)) and len(roomy.memory.given_back) == 1
    roomy.memory.take_away()
    again, asked = roomy.sampled()
    assert torch.equal(again, first) and asked and not asked & roomy.kept


def test_what_makes_no_room_is_laid_out_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers lie in pages that others need, so a copy would be memory more; the others' pages go as before."""
    kind, roomy = _laid_out(monkeypatch)
    _make_dynamic(monkeypatch)
    asked_of: list[list[Any]] = []

    def pays(_: ComfyWeights, groups: list[list[Any]]) -> list[bool]:
        asked_of.append(groups)
        return [kind.one not in {layer.seed_key.removeprefix("diffusion_model.") for layer in g} for g in groups]

    monkeypatch.setattr(ComfyWeights, "is_release_profitable", pays)
    first, _ = roomy.sampled(steps=2)
    serials, (groups, *_) = kept(roomy.clone), asked_of
    assert serials.count(0) == 1 and len(groups) == len(serials) and all(groups)
    own = [{layer.seed_key.removeprefix("diffusion_model.") for layer in group} for group in groups]
    roomy.memory.take_away()
    again, asked = roomy.sampled(steps=2)
    assert torch.equal(again, first) and kept(roomy.clone) == serials
    assert kind.one in asked and not any(asked & names for names in own if kind.one not in names)


def test_what_makes_room_is_judged_with_all_that_is_kept_and_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after a step that kept a part of it alone; a verdict holds in the memory that it was found in."""
    _, roomy = _laid_out(monkeypatch)
    _make_dynamic(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(ComfyWeights, "is_release_profitable", lambda _, groups: [False] * len(groups))
        room = iter([False])
        patch.setattr(prepack_cache, "_has_room", lambda *_: next(room, True))
        first, _ = roomy.sampled(steps=1)  # there is no room for what the first region keeps
        assert kept(roomy.clone).count(0) == 1, "the others stay"
        again, _ = roomy.sampled(steps=1)
        assert not any(kept(roomy.clone)) and torch.equal(again, first), "all of them were judged, and are in vain"
        roomy.sampled(steps=2)
        assert not any(kept(roomy.clone))
    monkeypatch.setattr(ComfyWeights, "layout", property(lambda _: "another memory"))
    found, _ = roomy.sampled(steps=2)
    assert all(kept(roomy.clone)) and torch.equal(found, roomy.sampled(steps=2)[0])


def test_which_layers_pay_goes_by_the_pages_of_their_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its neighbours; a host that fails to say leaves all kept, with a note."""
    kind, roomy = _laid_out(monkeypatch)
    _make_dynamic(monkeypatch)
    roomy.sampled(steps=1)
    provider = engine_of(roomy.clone).state.provider
    groups = [[layer] for layer in roomy.layers if layer.seed_key.removeprefix("diffusion_model.") in roomy.kept]
    roomy.memory.resident = set(range(roomy.memory._next // PAGE + 1))
    pays = provider.is_release_profitable(groups)
    assert True in pays and provider.layout == id(roomy.memory)
    for (layer,), going in zip(groups, pays, strict=True):
        _, at, size = layer._v
        own = sum(byte // PAGE not in roomy.others for byte in range(at, at + size))
        assert not going or 2 * own >= size
    monkeypatch.setattr(ComfyWeights, "layout", property(lambda _: 1 / 0))
    changed = kind.changed(roomy.clone)
    roomy.sampled(changed, steps=2)
    assert all(kept(roomy.clone))
    assert any("was not compared" in note for note in engine_of(roomy.clone).report.as_dict()["notes"])


@pytest.mark.large  # above pages are given back once, and test_comfy_prepack.py has LoRAs
def test_a_lora_has_pages_given_back_once_more(roomy: Paged, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = roomy.memory
    first, _ = roomy.sampled()
    left = set(memory.resident)
    changed = kind.changed(roomy.clone)
    found, asked = roomy.sampled(changed)
    assert kind.one in asked and len(memory.given_back) == 2 and memory.resident == left
    assert torch.equal(roomy.sampled(changed)[0], found) and len(memory.given_back) == 2
    with monkeypatch.context() as patch:
        patch.setattr(ComfyWeights, "weights_version", lambda _: None)
        assert torch.equal(roomy.sampled(changed)[0], found), "as if nothing were kept"
        assert memory.resident > left, "each step asks for all"
        assert len(memory.given_back) == 2
    assert torch.equal(roomy.sampled()[0], first)
    assert len(memory.given_back) == 3 and memory.resident == left


@pytest.mark.large  # two networks at once; the tests of one say whose pages go
def test_pages_of_another_model_stay(roomy: Paged, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = roomy.sampled()
    other = Paged(kind.made(monkeypatch), monkeypatch, kind)
    left, given_back = set(roomy.memory.resident), list(roomy.memory.given_back)
    assert torch.equal(other.sampled()[0], wanted) and len(other.memory.given_back) == 1
    assert roomy.memory.resident == left and roomy.memory.given_back == given_back
    assert torch.equal(roomy.sampled()[0], wanted) and set(roomy.memory.filled.values()) == {1}


@pytest.mark.parametrize("why", few(["nobody can say", "no room", "memory was short", "all code needs them"], 2))
def test_where_nothing_is_kept_no_page_is_given_back(
    roomy: Paged, kind: Kind, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "nobody can say":
        monkeypatch.setattr(ComfyWeights, "weights_version", lambda _: None)
    elif why == "no room":
        monkeypatch.setattr(prepack_cache, "room_for", lambda *_: False)
    elif why == "memory was short":
        host.engine_for(roomy.clone.model.diffusion_model, kind.config, roomy.clone.model).state.stop_keeping()
    else:
        monkeypatch.setattr(lease.Layers, "placeholders_for", lambda *_: {})
    roomy.sampled(steps=3)
    assert not roomy.memory.given_back and roomy.memory.resident == roomy.pages_of(set(roomy.asked))


def test_what_was_let_go_of_before_the_step_ended_is_not_given_back(
    roomy: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = MemoryReclaim.hold_once

    def released(memory: MemoryReclaim) -> None:
        memory.release()  # by another thread
        end(memory)

    monkeypatch.setattr(MemoryReclaim, "hold_once", released)
    roomy.sampled()
    assert not roomy.memory.given_back


def test_a_step_that_did_not_end_is_made_up_for(roomy: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        *_, last = roomy.clone.model.diffusion_model.children()
        patch.setattr(last, "forward", _interrupted)
        roomy.sampled()
    assert any(kept(roomy.clone)) and not roomy.memory.given_back and not +roomy.memory.pins
    roomy.sampled()
    assert len(roomy.memory.given_back) == 1


def _interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", ["verified", "planned"])
def test_eager_code_leaves_no_pages_behind(roomy: Paged, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A verification asks for all weights, and so does a plan, after which perhaps nothing is packed anew."""
    import comfy.ops

    cast = comfy.ops.cast_bias_weight

    def asking(layer: Any, *args: Any, **kwargs: Any) -> Any:  # as ComfyUI's layers do on a GPU
        if "_v" in vars(layer) and roomy.memory.fault(layer._v):
            roomy.memory.unpin(layer._v)
        return cast(layer, *args, **kwargs)

    monkeypatch.setattr(comfy.ops, "cast_bias_weight", asking)
    first, _ = roomy.sampled()
    left, ours, resident = set(roomy.memory.resident), engine_of(roomy.clone), []
    if what == "verified":
        ours.verify_next()
    else:
        call, once = dispatch.Region.call, []

        def planned(region: Any, plain: Any, args: Any, kwargs: Any, session: Any) -> Any:
            if not once:
                once.append(ours.builder.planner.calls(session))
            return call(region, plain, args, kwargs, session)

        monkeypatch.setattr(dispatch.Region, "call", planned)
    end = MemoryReclaim.hold_once

    def held(memory: MemoryReclaim) -> None:
        resident.append(set(roomy.memory.resident))
        end(memory)

    monkeypatch.setattr(MemoryReclaim, "hold_once", held)
    assert torch.equal(roomy.sampled()[0], first)
    assert any(pages > left for pages in resident) and roomy.memory.resident == left
