# SPDX-License-Identifier: Apache-2.0
"""Weights packed or laid out once and kept, in ComfyUI: a LoRA, its strength and hooks are seen as if none were kept.

Where ComfyUI keeps the weights elsewhere, it is not asked again for those that are kept so.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from card_memory import PAGE, loaded_in_part, unload
from kept_weights import KINDS, Elsewhere, Kind, Paged, engine_of, kept, packing_flux
from large_rows import few
from patchers import CONFIG, distance, sample

from nexfort_engine.dispatch import prepack_cache
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.hosts.comfy.weights import ComfyWeights
from nexfort_engine.weights import lease

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]


# what is laid out and what is packed: for the tests that show most; the others have one kind in `make test`
both = pytest.mark.parametrize("kind", few(KINDS, KINDS.keys()), indirect=True)


@pytest.fixture(params=few(KINDS, ["packed in fp8"]))
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def patcher(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Any:
    return kind.made(monkeypatch)


@pytest.fixture
def flux(monkeypatch: pytest.MonkeyPatch) -> Any:
    return packing_flux(monkeypatch)


def test_in_full_precision_the_picture_is_what_it_is_without(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["laid out"]
    patcher = kind.made(monkeypatch)
    without, frozen = host.attach(patcher, CONFIG), host.attach(patcher, kind.config)
    for changed in (lambda one: one, kind.changed, lambda one: one):
        assert distance(sample(changed(frozen)), sample(changed(without))) < 1e-5
    engines = patcher.model.diffusion_model.__dict__[host._ENGINES]
    prepare = [b for region in engines[CONFIG].regions for b in region.bindings if b.prepares]
    assert prepare and not any(b.kept for b in prepare), "not beside the weights themselves"
    assert all(b.kept for region in engines[kind.config].regions for b in region.bindings if b.prepares)
    assert not engines[kind.config].report.as_dict()["inactive"]


@both
def test_a_lora_and_its_strength_are_seen_as_if_nothing_were_kept(
    patcher: Any, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = host.attach(patcher, kind.config)
    first = sample(clone)
    before = kept(clone)
    assert before and all(before) and distance(first, sample(patcher)) < kind.error
    assert torch.equal(sample(clone), first) and kept(clone) == before, "made once"
    results = {}
    for strength in (0.0, 0.5, 1.0):
        changed = kind.changed(clone, strength)
        results[strength] = sample(changed)
        assert torch.equal(sample(changed), results[strength])
        assert not set(kept(clone)) & set(before), "made again"
        before = kept(clone)
        with monkeypatch.context() as patch:
            patch.setattr(ComfyWeights, "weights_version", lambda _: None)
            assert torch.equal(sample(changed), results[strength]), "as if nothing were kept"
            assert not any(kept(clone))
    assert torch.equal(results[0.0], first)
    assert distance(results[0.5], first) > kind.error and distance(results[1.0], results[0.5]) > kind.error / 2
    assert torch.equal(sample(clone), first), "and the model without it is what it was"


def test_hooks_that_change_weights_between_calls_keep_nothing(patcher: Any, kind: Kind) -> None:
    version = ComfyWeights(patcher.model).weights_version
    import comfy.model_management as management

    management.load_models_gpu([patcher])
    assert version() is None, "nobody runs it"
    patcher.model.current_patcher = patcher
    said = version()
    assert said is not None and version() == said
    changed = kind.changed(patcher, 0.5)
    management.load_models_gpu([changed])
    patcher.model.current_patcher = changed
    assert version() not in (None, said)
    patcher.model.current_patcher = patcher.clone()
    patcher.model.current_patcher.hook_patches = {"a hook": {}}
    assert version() is None
    patcher.model.current_patcher = None


def test_what_is_kept_goes_with_the_model(patcher: Any, kind: Kind) -> None:
    import comfy.model_management as management

    clone = host.attach(patcher, kind.config)
    for last in (clone, patcher):
        sample(clone)
        sample(last)
        assert all(kept(clone))
        management.unload_all_models()
        assert not any(kept(clone))


# ---- kept elsewhere ----------------------------------------------------------------------------------------


@pytest.fixture(params=["all pages stay", "few pages stay"])
def paged(request: pytest.FixtureRequest, patcher: Any, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Paged:
    """Under dynamic VRAM, on a card with much room and with little."""
    found = Paged(patcher, monkeypatch, kind)
    if request.param == "few pages stay":
        found.memory.fits = 2 * PAGE
    return found


def test_the_host_is_not_asked_again_for_what_is_kept(paged: Paged, kind: Kind) -> None:
    first, asked = paged.sampled()
    assert kind.one in asked and all(kept(paged.clone))
    again, asked_again = paged.sampled()
    assert torch.equal(again, first)
    assert not asked_again & paged.kept
    assert not +paged.memory.pins, "what was taken out is given back"


def test_without_stand_ins_the_picture_is_the_same(paged: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lease.Layers, "placeholders_for", lambda *_: {})
        wanted, _ = paged.sampled()
        assert torch.equal(paged.sampled()[0], wanted)
        made = kept(paged.clone)
        assert all(made)
    engine_of(paged.clone).release()
    for _ in range(3):
        assert torch.equal(paged.sampled()[0], wanted)
    assert all(kept(paged.clone)) and not set(kept(paged.clone)) & set(made)


def test_a_lora_is_seen_wherever_the_weights_are(paged: Paged, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = paged.sampled()
    changed = kind.changed(paged.clone)
    found, asked = paged.sampled(changed)
    assert kind.one in asked and distance(found, first) > kind.error
    assert torch.equal(paged.sampled(changed)[0], found)
    with monkeypatch.context() as patch:
        patch.setattr(ComfyWeights, "weights_version", lambda _: None)
        assert torch.equal(paged.sampled(changed)[0], found), "as if nothing were kept"
    assert torch.equal(paged.sampled()[0], first), "and the model without it is what it was"


def test_pages_of_what_is_kept_packed_may_go(paged: Paged) -> None:
    first, _ = paged.sampled()
    paged.sampled()
    paged.memory.take_away()
    before = kept(paged.clone)
    again, asked = paged.sampled()
    assert torch.equal(again, first)
    assert kept(paged.clone) == before and not asked & paged.kept


def test_what_is_kept_lasts_from_picture_to_picture(flux: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's dynamic patcher makes tiny weights anew in each load, which no packed one is made of."""
    import comfy.utils

    found = Paged(flux, monkeypatch)
    norms = [(name, sub) for name, sub in flux.model.named_modules() if name.endswith("norm")]
    tiny = [name for name, sub in norms if getattr(sub, "weight", None) is not None]

    def load_again() -> None:
        for name in tiny:
            layer = comfy.utils.get_attr(flux.model, name)
            layer.__dict__.pop("_v", None)
            comfy.utils.set_attr_param(flux.model, f"{name}.weight", layer.weight.clone())

    load_again()
    found.sampled()
    before = kept(found.clone)
    load_again()
    _, asked = found.sampled()
    assert tiny and kept(found.clone) == before and not asked & found.kept


def test_what_is_fetched_for_each_call_is_not_kept_where_nothing_gives_way(
    patcher: Any, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dynamic VRAM a model that does not fit leaves no more room than a step needs."""
    found = Elsewhere(patcher, monkeypatch, kind)
    acquire = ComfyWeights.acquire

    def for_this_call(*args: Any) -> Any:
        taken = acquire(*args)
        taken.kept = False
        return taken

    monkeypatch.setattr(ComfyWeights, "acquire", for_this_call)
    with loaded_in_part(0.0):
        first, _ = found.sampled()
        again, asked = found.sampled()
        assert torch.equal(again, first) and kind.one in asked and not any(kept(found.clone))
        monkeypatch.setattr(ComfyWeights, "room", lambda *_: 1 << 40)
        assert torch.equal(found.sampled()[0], first) and all(kept(found.clone))
        again, asked = found.sampled()
        assert torch.equal(again, first) and not asked & found.kept
        unload()


def test_only_layers_that_code_can_do_without_are_left_out(flux: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Paged(flux, monkeypatch)
    found.sampled()
    region = next(r for r in engine_of(found.clone).regions if r.path == "double_blocks.0")
    (binding,) = region.bindings
    with region.weights.resident([torch.zeros(1)]) as weights:
        due, layers = region.weights.due(), region.weights.layers
        large = {i for _, at in due for i in at.values() if weights[i].numel() > 256}
        everything = layers.placeholders_for(due, weights, set())
        assert large <= everything.keys() and not any(everything[i].numel() for i in large)
        assert all(torch.equal(t, weights[i]) for i, t in everything.items() if i not in large)
        assert not large & binding.needed
        for one in large:  # which code still reads as it is
            layer = next(set(at.values()) for _, at in due if one in at.values())
            assert layers.placeholders_for(due, weights, {one}).keys() == everything.keys() - layer
        region.weights.parts = object()  # places would be those of the plain tensors that weights consist of
        assert prepack_cache.placeholders_for(region, binding, weights) is lease.NO_PLACEHOLDERS


def test_a_layer_of_two_blocks_is_needed_if_one_of_them_needs_it(flux: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = flux.model.diffusion_model.double_blocks
    other.img_mlp[0] = one.img_mlp[0]
    found = Paged(flux, monkeypatch)
    found.sampled()
    engine = engine_of(found.clone)
    first, second = [r for r in engine.regions if r.path.startswith("double_blocks")]
    table = one.img_mlp[0]._parameters
    of = [[b for r in some for b in r.bindings] for some in ((first, second), (first,))]
    both, first_alone = map(engine.table.released_weights, of)
    assert any(own is table for own, _ in both) and first_alone
    assert not any(own is table for own, _ in first_alone)


# ---- what changes weights without ComfyUI's telling ----------------------------------------------------------


@pytest.mark.parametrize("place", few(["resident", "offloaded", "paged"], ["paged"]))
def test_a_function_on_a_weight_is_asked_in_each_call(
    place: str, patcher: Any, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Paged(patcher, monkeypatch, kind) if place == "paged" else Elsewhere(patcher, monkeypatch, kind)
    block = kind.one[: kind.one.index(".", kind.one.index(".") + 1)]
    layers = [
        sub for n, sub in patcher.model.diffusion_model.named_modules() if n.startswith(block) and n in found.kept
    ]
    factor = [1.0]

    def told_nobody(weight: torch.Tensor) -> torch.Tensor:
        return weight * factor[0]

    with loaded_in_part(0.0) if place == "offloaded" else contextlib.nullcontext(), monkeypatch.context() as patch:
        first, _ = found.sampled()
        load = type(patcher).load

        def loaded(*args: Any, **kwargs: Any) -> None:
            load(*args, **kwargs)
            for layer in layers:
                layer.weight_function = [told_nobody]

        patch.setattr(type(patcher), "load", loaded)
        for layer in layers:
            layer.weight_function = [told_nobody]
        for factor[0] in (4.0, 0.25):
            given, _ = found.sampled()
            engine_of(found.clone).release()
            wanted, _ = found.sampled()
            assert torch.equal(given, wanted) and distance(given, first) > kind.error
        unload()


# ---- who else needs the memory -------------------------------------------------------------------------------


def test_what_stands_in_goes_with_the_model(patcher: Any, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Paged(patcher, monkeypatch, kind)
    found.sampled()
    found.sampled()
    bindings = [binding for region in engine_of(found.clone).regions for binding in region.bindings if binding.kept]
    held = [weakref.ref(t) for b in bindings for t in (*b.kept.placeholders.values(), *b.kept.tensors) if t.numel()]
    assert held
    unload()
    gc.collect()
    assert not [one for one in held if one() is not None]


def test_another_model_gives_way(patcher: Any, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes a model under dynamic VRAM off the device for another one."""
    first = Paged(patcher, monkeypatch, kind)
    wanted, _ = first.sampled()
    assert all(kept(first.clone))
    second = host.attach(kind.made(monkeypatch), kind.config)
    monkeypatch.setattr(prepack_cache, "room_for", lambda *_: not any(kept(first.clone)))
    sample(second)
    assert all(kept(second)) and not any(kept(first.clone))
    assert torch.equal(first.sampled()[0], wanted)


def test_pages_that_are_asked_for_in_each_call_are_no_room(paged: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[int] = []
    monkeypatch.setattr(prepack_cache, "room_for", lambda _, more: offered.append(more(torch.device("cpu"))) or True)
    monkeypatch.setattr(prepack_cache, "placeholders_for", lambda *_: lease.NO_PLACEHOLDERS)  # as for quantised weights
    paged.sampled(steps=1)
    assert offered and not any(offered)
