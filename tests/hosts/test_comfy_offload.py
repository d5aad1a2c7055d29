# SPDX-License-Identifier: Apache-2.0
"""Without dynamic VRAM, weights that are kept prepared go to main memory, and come back to whoever wants them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from typing import Any

import pytest
import torch
from card_memory import unload
from kept_weights import KINDS, Elsewhere, Kind, engine_of, kept
from large_rows import few
from patchers import CONFIG, distance, sample
from pretended_graph import Graph, pretend
from torch import nn

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.cudagraphs import few_steps
from nexfort_engine.engine import Engine
from nexfort_engine.hosts.comfy import offload as comfy_offload
from nexfort_engine.hosts.comfy import weights as comfy_weights
from nexfort_engine.weights import offload

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]


# in full precision weights of convolutions are laid out in the place of the model's own, and not beside them
ALL = {**KINDS, "laid out in O2": dataclasses.replace(KINDS["laid out"], config=CONFIG)}


# what is laid out and what is packed: for the tests that show most; the others have one kind in `make test`
both = pytest.mark.parametrize("kind", few(ALL, KINDS.keys()), indirect=True)


@pytest.fixture(params=few(ALL, ["packed in fp8"]))
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


class Offloaded(Elsewhere):
    """On a card, or main memory is taken for one's. wanted: the picture that eager code makes."""

    def __init__(self, kind: Kind, patch: pytest.MonkeyPatch, card: str = "cpu") -> None:
        patch.setattr(comfy_offload, "FROM", (card,))
        patch.setattr(offload, "LEAST", 1)
        self.plain = kind.made(patch)
        self.plain.load_device = torch.device(card)
        self.places = {weight.data_ptr() for weight in self.plain.model.diffusion_model.parameters()}
        self.wanted = sample(self.plain)
        super().__init__(self.plain, patch, kind)
        self.network = self.plain.model.diffusion_model

    @property
    def offload(self) -> Any:
        return engine_of(self.clone).state.provider._offload

    @property
    def away(self) -> set[str]:
        return {name for name, layer in self.network.named_modules() if offload.is_away(layer)}

    def settled(self, clone: Any = None) -> torch.Tensor:
        """The picture of a run whose weights have left in one before."""
        for _ in range(2):  # copied beside it, and gone after it
            self.sampled(clone)
            self.offload.join(60)
        return self.sampled(clone)[0]

    def spoiled(self, patch: pytest.MonkeyPatch) -> None:
        """Nobody is to read what is away, but for those who see whether it changed."""
        patch.setattr(offload.Offload, "poll_versions", lambda _: None)
        for name in self.away:
            for weight in self.network.get_submodule(name).parameters():
                weight.data.fill_(torch.nan)


@pytest.fixture
def offloaded(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Offloaded:
    return Offloaded(kind, monkeypatch)


@both
def test_what_is_kept_prepared_leaves_and_the_picture_stays(
    offloaded: Offloaded, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = offloaded.sampled()
    assert distance(first, offloaded.wanted) < kind.error
    before = kept(offloaded.clone)
    assert torch.equal(offloaded.settled(), first)
    assert kind.one in offloaded.away
    offloaded.spoiled(monkeypatch)
    again, asked = offloaded.sampled()
    assert torch.equal(again, first) and not asked
    if kind.dims == 4:
        regions = engine_of(offloaded.clone).regions
        held = {t.data_ptr() for r in regions for b in r.bindings if b.kept for t in b.kept.tensors}
        gone = [offloaded.network.get_submodule(name).weight for name in offloaded.away]
        assert len(held & offloaded.places) >= 0.9 * sum(weight.dim() == kind.dims for weight in gone), (
            "where those were"
        )
    assert kept(offloaded.clone) == before, "made once"
    assert not engine_of(offloaded.clone).report.as_dict()["notes"]


def test_who_runs_the_layers_own_code_has_them_back(offloaded: Offloaded, kind: Kind) -> None:
    first = offloaded.settled()
    assert offloaded.away
    assert torch.equal(sample(offloaded.plain), offloaded.wanted), "without Nexfort the picture is what it was"
    assert not offloaded.away and not any("forward" in vars(layer) for layer in offloaded.network.modules())
    assert torch.equal(offloaded.settled(), first) and kind.one in offloaded.away, "and they leave again"


def test_a_lora_is_seen_and_goes_as_if_nothing_had_left(
    offloaded: Offloaded, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = offloaded.settled()
    changed = kind.changed(offloaded.clone)
    found = offloaded.settled(changed)
    assert kind.one in offloaded.away and distance(found, first) > kind.error
    with monkeypatch.context() as patch:
        patch.setattr(comfy_weights.ComfyWeights, "weights_version", lambda _: None)
        assert torch.equal(offloaded.sampled(changed)[0], found), "as if nothing were kept"
        assert not offloaded.away
    assert torch.equal(offloaded.settled(), first)
    assert torch.equal(sample(offloaded.plain), offloaded.wanted)


@torch.inference_mode()
def test_weights_that_change_while_they_are_copied_do_not_leave(
    offloaded: Offloaded, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI patches them in their place or puts others there; what was copied is not what they are."""
    changed = kind.changed(offloaded.clone)
    first, found = offloaded.sampled()[0], offloaded.sampled(changed)[0]
    for clone, wanted in ((offloaded.clone, first), (changed, found)):
        offloaded.sampled(clone, steps=1)  # copies are begun
        offloaded.offload.join(60)
        other, picture = (changed, found) if clone is offloaded.clone else (offloaded.clone, first)
        assert torch.equal(offloaded.sampled(other)[0], picture)
        assert torch.equal(offloaded.settled(other), picture) and torch.equal(offloaded.settled(clone), wanted)
    copies = offloaded.offload
    copies.without([], "another version")
    layer = offloaded.network.get_submodule(kind.one)
    offload.take_back(layer)
    own, edits = layer.weight.data.clone(), copies.edits
    for number, change in enumerate(("the place", "the parameter", "before", "afterwards", "meanwhile")):
        if change == "meanwhile":  # and back again
            monkeypatch.setattr(threading.Thread, "start", lambda _: None)
        copies.without([layer], f"version {number}")
        if change == "meanwhile":
            layer.weight.data.mul_(2.0)
            copies._copies._copy(None)
            layer.weight.data.copy_(own)
        elif change == "before":
            copies.join(60)
            copies._copies._made[0]["weight"].mul_(2.0)  # what the thread saw
            layer.weight.data.mul_(2.0)
        copies.join(60)
        if change == "the place":
            layer.weight.data = layer.weight.data.clone()
        elif change == "the parameter":
            layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
        elif change == "afterwards":
            layer.weight.data.mul_(2.0)
        assert copies.without([layer], f"version {number}") == 0 and not offload.is_away(layer), change
        assert copies.edits == (edits := edits + (number > 1)), "and what is kept of them is not theirs"
        copies.forget()


@pytest.mark.parametrize("when", few(["away", "copied", "before it leaves"], ["copied"]))
def test_weights_that_are_changed_in_their_place_are_seen_in_the_next_picture(
    offloaded: Offloaded, kind: Kind, when: str
) -> None:
    first = offloaded.settled() if when == "away" else offloaded.sampled(steps=1)[0]
    offloaded.offload.join(60)
    assert bool(offloaded.away) is (when == "away")
    with torch.inference_mode():
        for name in offloaded.kept:
            offloaded.network.get_submodule(name).weight.data.mul_(1.5)
    found = offloaded.settled()
    assert kind.one in offloaded.away
    wanted = sample(offloaded.plain)
    assert distance(found, wanted) < kind.error < distance(found, offloaded.wanted)
    assert first is not None


def test_comfyui_moves_and_copies_them_wherever_they_are(offloaded: Offloaded, kind: Kind) -> None:
    first = offloaded.settled()
    saved = {name: weight.clone() for name, weight in offloaded.plain.model_state_dict().items()}
    twin = copy.deepcopy(offloaded.network.get_submodule(kind.one))
    assert twin.forward.__self__ is twin
    x = torch.randn(2, twin.weight.shape[1], *[8] * (kind.dims - 2)).to(twin.weight.dtype)
    assert offload.is_away(offloaded.network.get_submodule(kind.one))
    given = twin(x)
    assert not offload.is_away(twin) and kind.one in offloaded.away
    assert torch.equal(given, offloaded.network.get_submodule(kind.one)(x)) and kind.one not in offloaded.away
    assert torch.equal(offloaded.settled(), first)
    for take_off in (unload, lambda: offloaded.clone.partially_unload(torch.device("cpu"), 1 << 40)):
        take_off()
        assert torch.equal(offloaded.sampled()[0], first)
        assert torch.equal(sample(offloaded.plain), offloaded.wanted)
        take_off()
        assert torch.equal(sample(offloaded.plain), offloaded.wanted) and not offloaded.away
        unload()
        assert torch.equal(offloaded.settled(), first) and offloaded.away
    for name, weight in offloaded.plain.model_state_dict().items():
        assert torch.equal(weight, saved[name])


def test_a_graph_reads_nothing_that_left(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    offloaded = Offloaded(kind, monkeypatch)
    first = sample(offloaded.clone, steps=3)
    assert len(Graph.made) == 1
    offloaded.offload.join(60)
    assert torch.equal(sample(offloaded.clone, steps=3), first) and offloaded.away
    assert torch.equal(sample(offloaded.clone, steps=3), first) and len(Graph.made) == 2, "captured once more"
    offloaded.spoiled(monkeypatch)
    assert torch.equal(sample(offloaded.clone, steps=3), first) and len(Graph.made) == 2


def test_while_another_step_is_under_way_nothing_leaves(offloaded: Offloaded, kind: Kind) -> None:
    first = offloaded.settled()
    engine = engine_of(offloaded.clone)
    other = Engine(engine.root, CompileConfig.parse("jit"), engine.state.store)
    for one in (engine, other):
        assert torch.equal(sample(offloaded.plain), offloaded.wanted) and not offloaded.away
        with one.active():
            assert torch.equal(offloaded.settled(), first) and not offloaded.away
        assert torch.equal(offloaded.settled(), first) and kind.one in offloaded.away


def test_what_is_given_up_is_not_copied_any_more(offloaded: Offloaded) -> None:
    offloaded.sampled(steps=1)
    assert offloaded.offload._copies is not None
    offloaded.offload.join(60)
    unload()
    assert offloaded.offload._copies is None and not offloaded.away


def test_a_verified_step_finds_them_and_they_leave_again(offloaded: Offloaded, kind: Kind) -> None:
    first = offloaded.settled()
    engine_of(offloaded.clone).verify_next()
    assert torch.equal(offloaded.sampled()[0], first)
    (told,) = engine_of(offloaded.clone).report.as_dict()["verifications"]
    assert told["distance"] < kind.error and not [row for row in told["regions"] if row["over"]]
    assert torch.equal(offloaded.settled(), first) and kind.one in offloaded.away


@pytest.mark.gpu
def test_what_is_kept_prepared_leaves_a_card(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_steps, "MANY", 0)  # the first picture has its graph
    offloaded = Offloaded(kind, monkeypatch, "cuda")
    with monkeypatch.context() as patch:
        patch.setattr(offload.Offload, "ready", property(lambda _: False))
        first, _ = offloaded.sampled(steps=5)
        offloaded.offload.join(60)
        assert not offloaded.away
        held = torch.cuda.memory_allocated()
    for _ in range(2):
        assert torch.equal(offloaded.sampled(steps=5)[0], first)
    layers = [offloaded.network.get_submodule(name) for name in offloaded.away]
    weights = [weight for layer in layers for weight in layer.parameters()]
    assert kind.one in offloaded.away and {weight.device.type for weight in weights} == {"cpu"}
    assert held - torch.cuda.memory_allocated() >= sum(weight.nbytes for weight in weights) // 2
    engine = engine_of(offloaded.clone)
    assert [step.graph is not None for step in engine.graphs._steps.values()] == [True]
    offloaded.spoiled(monkeypatch)
    assert torch.equal(offloaded.sampled(steps=5)[0], first), "nor does a graph read them"
    unload()
    changed = kind.changed(Offloaded(kind, monkeypatch, "cuda").clone)
    found = sample(changed, steps=5)
    assert distance(found, first) > kind.error and torch.equal(sample(changed, steps=5), found)
    plain = Offloaded(kind, monkeypatch, "cuda")
    plain.settled()
    assert plain.away and torch.equal(sample(plain.plain), plain.wanted) and not plain.away
    assert {weight.device.type for weight in plain.network.parameters()} == {"cuda"}


@pytest.mark.parametrize(
    "why", few(["a card is to hold it", "main memory is short", "dynamic", "little", "quantised"], 2)
)
def test_where_they_stay(offloaded: Offloaded, kind: Kind, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    import comfy.model_management as management

    if why == "a card is to hold it":
        offloaded.clone.offload_device = torch.device("cuda")
        monkeypatch.setattr(management, "load_models_gpu", lambda *_, **__: None)
    elif why == "main memory is short":
        monkeypatch.setattr(management, "get_free_memory", lambda *_, **__: 1)
    elif why == "dynamic":
        monkeypatch.setattr(type(offloaded.clone), "is_dynamic", lambda _: True)
    elif why == "little":
        monkeypatch.setattr(offload, "LEAST", 1 << 40)
    else:
        monkeypatch.setattr(comfy_offload, "is_plain", lambda _: False)
    offloaded.settled()
    assert not offloaded.away and offloaded.offload._copies is None
    if kind.config is CONFIG and why != "dynamic":
        assert not any(kept(offloaded.clone))


@pytest.mark.parametrize("kind", few(KINDS, ["laid out"]), indirect=True)
def test_what_cannot_be_copied_stays(
    offloaded: Offloaded, kind: Kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    to = torch.Tensor.to

    def short(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("copy") and args == (torch.device("cpu"),):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", short)
    assert distance(offloaded.settled(), offloaded.wanted) < kind.error and not offloaded.away
    assert any("could not be copied to main memory" in record.message for record in caplog.records)


def test_weights_that_are_wanted_back_each_time_stay_at_last(offloaded: Offloaded) -> None:
    first, stayed = offloaded.settled(), 0
    while offloaded.away and stayed < 20:
        sample(offloaded.plain)
        assert torch.equal(offloaded.settled(), first)
        stayed += 1
    assert 0 < stayed < 20 and not offloaded.away


def test_comfyui_is_told_how_much_of_the_card_a_model_has(offloaded: Offloaded, kind: Kind) -> None:
    import comfy.model_management as management

    model, (loaded,) = offloaded.plain.model, management.current_loaded_models[:1]
    size = loaded.model_loaded_memory()
    assert size == offloaded.plain.model_size()
    offloaded.settled()
    gone = sum(w.nbytes for name in offloaded.away for w in offloaded.network.get_submodule(name).parameters())
    assert gone and model.model_loaded_weight_memory == size - gone
    assert loaded.model_memory_required(offloaded.plain.load_device) == gone, "so others leave before it comes back"
    sample(offloaded.plain)
    assert not offloaded.away
    changed = kind.changed(offloaded.clone)
    offloaded.settled(changed)
    offloaded.settled()
    unload()
    assert model.model_loaded_weight_memory == 0


def test_others_leave_before_weights_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management as management

    asked: list[Any] = []
    home = comfy_offload.ComfyHome(lambda: None)  # type: ignore[arg-type]
    monkeypatch.setattr(management, "free_memory", lambda *a, **k: asked.append((a, k)))
    monkeypatch.setattr(management, "get_free_memory", lambda *_: 1 << 30)
    card = torch.device("meta")
    home.make_room(card, 1 << 20)
    assert not asked, "there is room"
    home.make_room(card, 1 << 30)
    home.make_room(torch.device("cpu"), 1 << 40)
    assert asked == [(((1 << 30) + management.extra_reserved_memory(), card), {"keep_loaded": []})]


@pytest.mark.parametrize("free", few([1.2, 1.05], [1.05]))
def test_main_memory_that_copies_took_is_not_asked_for_again(
    offloaded: Offloaded, kind: Kind, monkeypatch: pytest.MonkeyPatch, free: float
) -> None:
    import comfy.model_management as management

    size = offloaded.plain.model_size()

    def left(*_: Any, **__: Any) -> float:
        return size * (1.0 if offloaded.offload._times else free)

    monkeypatch.setattr(management, "get_free_memory", left)
    offloaded.settled()
    assert kind.one in offloaded.away


def test_weights_that_change_all_the_time_stay(offloaded: Offloaded, kind: Kind) -> None:
    weight, turns = offloaded.network.get_submodule(kind.one).weight, 0
    while not offloaded.offload.stays("any version") and turns < 20:
        offloaded.sampled(steps=1)
        offloaded.offload.join(60)
        with torch.inference_mode():
            weight.data.mul_(1.01)
        turns += 1
    assert 0 < turns < 20
    offloaded.settled()
    assert not offloaded.away


def test_weights_with_gaps_stay(offloaded: Offloaded, kind: Kind) -> None:
    layer = offloaded.network.get_submodule(kind.one)
    home = engine_of(offloaded.clone).state.provider._home
    assert home.resident([layer], lambda _: True) == [layer]
    layer.weight = nn.Parameter(layer.weight.data[:1].expand_as(layer.weight), requires_grad=False)
    assert home.resident([layer], lambda _: True) == []


def test_a_layer_that_is_a_region_stays_and_is_not_copied(offloaded: Offloaded) -> None:
    offloaded.sampled(steps=1)
    regions = {id(region.module) for region in engine_of(offloaded.clone).regions}
    assert not [layer for layer in offloaded.offload._copies._layers if id(layer) in regions]
    offloaded.settled()
    assert not [region.path for region in engine_of(offloaded.clone).regions if offload.is_away(region.module)]


def test_a_forward_that_somebody_put_back_goes_with_the_next_call(offloaded: Offloaded, kind: Kind) -> None:
    """As ComfyUI's adapters do that are no patches: what was there before them is put there again."""
    first, layer = offloaded.settled(), offloaded.network.get_submodule(kind.one)
    before = layer.forward
    offload.take_back(layer)
    layer.forward = before
    assert torch.equal(sample(offloaded.plain), offloaded.wanted) and "forward" not in vars(layer)
    assert torch.equal(offloaded.settled(), first) and kind.one in offloaded.away


def test_a_network_is_pickled_as_if_nothing_had_left(offloaded: Offloaded, kind: Kind) -> None:
    offloaded.settled()
    layer = offloaded.network.get_submodule(kind.one)
    again = pickle.loads(pickle.dumps(layer))
    assert not offload.is_away(again) and torch.equal(again.weight, layer.weight) and offload.is_away(layer)
    x = torch.randn(2, layer.weight.shape[1], *[8] * (kind.dims - 2)).to(layer.weight.dtype)
    assert torch.equal(again(x), layer(x))


def test_what_is_away_already_is_no_reason_for_others_to_stay(
    offloaded: Offloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a card that is none: there weights lie on another device than those that are away."""
    offloaded.settled()
    provider, network = engine_of(offloaded.clone).state.provider, offloaded.network
    names = sorted(offloaded.away)
    offload.take_back(network.get_submodule(names[-1]))
    network.get_submodule(names[-1]).to("meta")
    monkeypatch.setattr(comfy_offload, "FROM", ("meta",))
    found = provider._home.resident([network.get_submodule(name) for name in names], provider.can_lease)
    assert [network.get_submodule(name) for name in names] == found
