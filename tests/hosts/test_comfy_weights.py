# SPDX-License-Identifier: Apache-2.0
"""Weights that ComfyUI keeps elsewhere: offloaded, patched on the way in, or stored in another dtype than computed in.

ComfyUI's own patcher puts the layers in these states; that it loads only a part is asked of it, as on a small card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy_networks
import pytest
import torch
from backbones import make
from card_memory import PAGE, PagedMemory, loaded_in_part, page, unload
from patchers import CONFIG, MOVES, STEPS, TOLERANCE, distance, patcher_around, reported, sample, with_lora
from subjects import Subject, graphs_as_they_are
from subjects import distance as moved

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.hosts.comfy.weights import ComfyWeights

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]


def due(patcher: Any) -> int:
    """How many layers are left to cast or patch by themselves."""
    layers = [m for m in patcher.model.diffusion_model.modules() if hasattr(m, "comfy_cast_weights")]
    return sum(bool(m.comfy_cast_weights or m.weight_function) for m in layers)


@pytest.fixture
def compiled() -> Iterator[tuple[Any, Any]]:
    """An eager patcher and its compiled clone after the first picture, all weights loaded."""
    with graphs_as_they_are():
        patcher = patcher_around(make("comfy_flux").module, flux=True)
        clone = host.attach(patcher, CONFIG)
        assert distance(sample(clone), sample(patcher)) < TOLERANCE
        assert due(patcher) == 0 and not reported(clone)["eager"]
        yield patcher, clone


def nothing_new(patcher: Any, mark: Any) -> None:
    report = host.report_of(patcher)
    assert report is not None
    new = report.since(mark)
    assert not new["artefacts"] and not new["variants"] and not new["eager"], new


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_model_that_is_loaded_in_part_runs_the_same_artefacts(compiled: tuple[Any, Any], share: float) -> None:
    patcher, clone = compiled
    wanted = sample(patcher)
    mark = host.report_of(clone).mark()  # type: ignore[union-attr]
    unload()
    with loaded_in_part(share):
        assert torch.equal(sample(patcher), wanted)
        assert due(patcher) > 4
        assert distance(sample(clone), wanted) < TOLERANCE
        report = host.report_of(clone)
        assert report is not None and host.verify_next(report)
        assert distance(sample(clone), wanted) < TOLERANCE
        (verified,) = report.as_dict()["verifications"]
        assert verified["distance"] < TOLERANCE and len(verified["regions"]) > 4
        assert not [row for row in verified["regions"] if row["over"] or row["unjudged"]]
        unload()
    assert distance(sample(clone), wanted) < TOLERANCE
    nothing_new(clone, mark)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_lora_is_honoured_however_much_is_loaded(compiled: tuple[Any, Any], share: float) -> None:
    patcher, clone = compiled
    plain, before = sample(patcher), sample(clone)
    mark = host.report_of(clone).mark()  # type: ignore[union-attr]
    unload()
    with loaded_in_part(share) if share < 1.0 else contextlib.nullcontext():
        for strength in (1.0, 0.5, -1.0):
            wanted = sample(with_lora(patcher, strength))
            assert distance(wanted, plain) > MOVES
            assert distance(sample(with_lora(clone, strength)), wanted) < TOLERANCE, strength
        unload()
    assert torch.equal(sample(clone), before), "a LoRA is still felt after it was taken off"
    nothing_new(clone, mark)


def test_a_function_attached_to_a_resident_weight_is_honoured(compiled: tuple[Any, Any]) -> None:
    patcher, clone = compiled
    plain, before = sample(patcher), sample(clone)
    mark = host.report_of(clone).mark()  # type: ignore[union-attr]
    region = next(
        r for e in host._live.listed() for r in e.regions if r.module is patcher.model.diffusion_model.double_blocks[0]
    )
    assert region.weights.layers is not None and region.weights.layers.resident()
    layer = patcher.model.diffusion_model.double_blocks[0].img_mlp[0]
    layer.weight_function.append(lambda weight: weight * 3.0)
    try:
        assert not region.weights.layers.resident()
        wanted = sample(patcher)
        assert distance(wanted, plain) > MOVES
        assert distance(sample(clone), wanted) < TOLERANCE
    finally:
        layer.weight_function.clear()
    assert torch.equal(sample(clone), before)
    nothing_new(clone, mark)


def test_weights_stored_in_another_dtype_are_cast_as_in_eager() -> None:
    import comfy.ops

    network = comfy_networks.flux(2, dtype=torch.bfloat16, operations=comfy.ops.manual_cast)
    network.load_state_dict(make("comfy_flux").module.state_dict())
    with graphs_as_they_are():
        patcher = patcher_around(network, flux=True)
        patcher.model.manual_cast_dtype = torch.float32
        wanted = sample(patcher)
        assert next(network.parameters()).dtype == torch.bfloat16
        clone = host.attach(patcher, CONFIG)
        assert distance(sample(clone), wanted) < TOLERANCE
        found = reported(clone)
        assert not found["eager"] and found["artefacts_compiled"] > 0
        before, mark = sample(clone), host.report_of(clone).mark()  # type: ignore[union-attr]
        patched = sample(with_lora(patcher, 1.0))
        assert distance(patched, wanted) > MOVES
        assert distance(sample(with_lora(clone, 1.0)), patched) < TOLERANCE
        assert torch.equal(sample(clone), before), "a LoRA is still felt after it was taken off"
        assert torch.equal(sample(patcher), wanted), "bypassing the node gives another picture"
        nothing_new(clone, mark)


def test_an_artefact_without_a_lender_is_the_one_with_a_lender_and_is_not_used_where_a_layer_would_patch() -> None:
    """One store serves `nexfort_engine.compile` and the node; the former runs the layers' own code and must see it."""
    with graphs_as_they_are():
        leased = host.attach(patcher_around(make("comfy_flux").module, flux=True), CONFIG)
        sample(leased)
        made = {row["key"] for row in reported(leased)["artefacts"]}
        alone = Subject(make("comfy_flux"))
        alone.run()
        assert made & {row["key"] for row in alone.report.as_dict()["artefacts"]}, "nothing was shared"
        mlp = alone.module.double_blocks[0].img_mlp[0]
        mlp.weight_function = [lambda weight: weight * 3.0]
        assert moved(alone.eager(), alone.eager_before) > MOVES
        assert alone.same() < TOLERANCE


def test_what_went_over_a_stream_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.ops

    patcher = patcher_around(make("comfy_flux").module, flux=True)
    provider = ComfyWeights(patcher.model)
    layers = [m for m in patcher.model.diffusion_model.modules() if provider.can_lease(m)][:2]
    buffer, given_back = torch.zeros(1 << 16), []

    def through_a_buffer(layer: Any, **_: Any) -> Any:
        view = buffer[: layer.weight.numel()].view(layer.weight.shape)
        return view.copy_(layer.weight), layer.bias, ("a stream", None, None)

    monkeypatch.setattr(comfy.ops, "cast_bias_weight", through_a_buffer)
    monkeypatch.setattr(comfy.ops, "uncast_bias_weight", lambda layer, *_: given_back.append(layer))
    for layer in layers:
        layer.comfy_cast_weights = True
    monkeypatch.setattr(provider, "dtype", lambda layer, name: torch.bfloat16)  # so that they have to be cast
    leased = provider.acquire(layers, torch.device("cpu")).tensors
    assert all(torch.equal(tensors["weight"], layer.weight) for tensors, layer in zip(leased, layers, strict=True))
    assert given_back == layers


def test_room_is_what_pages_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management

    patcher = patcher_around(make("comfy_flux").module, flux=True)
    provider, card = ComfyWeights(patcher.model), torch.device("cuda", 0)
    assert provider.room(card) == 0, "nobody runs it"
    patcher.model.current_patcher = patcher
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *_: 3 << 30)
    monkeypatch.setattr(type(patcher), "get_free_memory", lambda *_: 5 << 30)  # with what dynamic VRAM could give
    assert provider.room(card) == 2 << 30 and provider.room(torch.device("cpu")) == 0
    patcher.model.current_patcher = None


# ---- dynamic VRAM --------------------------------------------------------------------------------------------


@pytest.fixture
def paged(compiled: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, PagedMemory, list[Any]]:
    """The same under dynamic VRAM: eager, compiled, the memory, the layers; everything fits."""
    patcher, clone = compiled
    memory = PagedMemory(1 << 20)
    return patcher, clone, memory, page(patcher, memory, monkeypatch)


def settled(memory: PagedMemory, layers: list[Any]) -> bool:
    """Whether everything that was taken out was given back."""
    return not +memory.pins and not any("_prefetch" in vars(layer) for layer in layers)


def test_pages_that_stay_are_filled_once(
    paged: tuple[Any, Any, PagedMemory, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.ops

    patcher, clone, memory, layers = paged
    mark, wanted = host.report_of(clone).mark(), sample(patcher)  # type: ignore[union-attr]
    assert memory.faults == 0, "without a GPU eager takes a copy"
    assert distance(sample(clone), wanted) < TOLERANCE
    assert memory.faults >= len(layers) > 10 and settled(memory, layers)
    monkeypatch.setattr(comfy.ops, "cast_modules_with_vbar", None)  # nothing is fetched any more
    before, blocks = memory.faults, len(patcher.model.diffusion_model.single_blocks) * 2 + 4
    again = sample(clone)
    assert blocks * STEPS <= memory.faults - before < len(layers) * STEPS, "layers that share a page are asked for once"
    assert distance(again, wanted) < TOLERANCE and settled(memory, layers)
    nothing_new(clone, mark)


@pytest.mark.parametrize("name", ["vbar_fault", "vbar_unpin"])
def test_blocks_run_eager_with_the_reason_where_aimdo_lacks_a_function(
    name: str, paged: tuple[Any, Any, PagedMemory, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU eager asks for no pages, and so the picture is there."""
    import comfy_aimdo.model_vbar

    patcher, clone, memory, layers = paged
    wanted = sample(patcher)
    monkeypatch.delattr(comfy_aimdo.model_vbar, name)
    assert distance(sample(clone), wanted) < TOLERANCE and settled(memory, layers) and memory.faults == 0
    report = host.report_of(clone).as_dict()  # type: ignore[union-attr]
    assert {row["reason"] for row in report["eager"] if f"comfy_aimdo has no {name}" in row["reason"]}
    assert not [row for row in report["eager"] if "Error" in row["reason"]]


def test_what_the_host_notes_of_main_memory_beside_a_plan_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each layer has its place there, and all of a network one state."""
    import comfy.ops

    # where nothing is known or stored it is planned
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "store"))
    config = CompileConfig.parse({"options": {"compile.prompt_once": False}})

    asked, pins, own = [0], {"weights": {"asked": 0}}, comfy.ops.cast_bias_weight

    def cast(*args: Any, **kwargs: Any) -> Any:
        asked[0] = pins["weights"]["asked"] = asked[0] + 1
        return own(*args, **kwargs)

    patcher = patcher_around(make("comfy_flux").module, flux=True)
    with graphs_as_they_are():
        for layer in page(patcher, PagedMemory(1 << 20), monkeypatch):
            layer._pins, layer._pin_state = pins, {"weights": (object(), [], [-1])}
        clone = host.attach(patcher, config)
        monkeypatch.setattr(comfy.ops, "cast_bias_weight", cast)
        sample(clone)
    assert pins["weights"]["asked"] == asked[0] > 0 and not reported(clone)["eager"]


def test_what_lies_in_pages_is_no_weight_of_a_block(monkeypatch: pytest.MonkeyPatch, compiled: tuple[Any, Any]) -> None:
    """A model under dynamic VRAM from its first step, part of it fetched by its own code before it is compiled."""
    known = {row["key"] for row in reported(compiled[1])["artefacts"]}
    patcher = patcher_around(make("comfy_flux").module, flux=True)
    with graphs_as_they_are():
        wanted = sample(patcher)
        memory = PagedMemory(1 << 20)
        layers = page(patcher, memory, monkeypatch)
        clone = host.attach(patcher, CONFIG)
        fetched = [layer for layer in layers if ComfyWeights(patcher.model).can_lease(layer)][::2]
        ComfyWeights(patcher.model).acquire(fetched, torch.device("cpu")).release()
        assert all(isinstance(vars(layer)["_v_weight"], torch.Tensor) for layer in fetched)
        for layer in layers[1::2]:  # what has no room was made ready in main memory, as ComfyUI 0.20 does it
            layer._pin = torch.zeros(8, dtype=torch.uint8)
        for _ in range(2):  # after the first every layer has its copies
            assert distance(sample(clone), wanted) < TOLERANCE and settled(memory, layers)
        found = reported(clone)
        assert not found["eager"] and {row["key"] for row in found["artefacts"]} == known


def test_pages_that_went_away_are_filled_anew(paged: tuple[Any, Any, PagedMemory, list[Any]]) -> None:
    _, clone, memory, layers = paged
    mark, before = host.report_of(clone).mark(), sample(clone)  # type: ignore[union-attr]
    for _ in range(2):
        memory.take_away()
        assert torch.equal(sample(clone), before) and settled(memory, layers)
    nothing_new(clone, mark)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_has_no_room_goes_through_a_buffer(paged: tuple[Any, Any, PagedMemory, list[Any]], share: float) -> None:
    _, clone, memory, layers = paged
    mark, before = host.report_of(clone).mark(), sample(clone)  # type: ignore[union-attr]
    memory.take_away()
    memory.fits = int(share * PAGE * -(-sum(layer._v[2] for layer in layers) // PAGE))
    assert torch.equal(sample(clone), before) and settled(memory, layers)
    assert torch.equal(sample(clone), before) and settled(memory, layers)
    nothing_new(clone, mark)


def test_a_lora_is_honoured_under_dynamic_vram(paged: tuple[Any, Any, PagedMemory, list[Any]]) -> None:
    from comfy.model_patcher import LowVramPatch

    patcher, clone, memory, layers = paged
    mark, before = host.report_of(clone).mark(), sample(clone)  # type: ignore[union-attr]
    plain = {id(layer): layer.weight.clone() for layer in layers}
    patched = [layer for layer in layers if f"{layer.seed_key}.weight" in with_lora(patcher, 1.0).patches]
    for strength in (1.0, -0.5):
        patches = with_lora(patcher, strength).patches
        for layer in patched:
            key = f"{layer.seed_key}.weight"
            layer.weight_lowvram_function = LowVramPatch(key, patches)
            layer._v_signature = None  # as a patcher's load leaves it when its patches changed
        first = sample(clone)
        assert settled(memory, layers) and torch.equal(sample(clone), first)
        for layer in patched:
            layer.weight.copy_(LowVramPatch(f"{layer.seed_key}.weight", patches)(layer.weight.clone()))
        wanted = sample(patcher)
        for layer in patched:
            layer.weight.copy_(plain[id(layer)])
        assert distance(wanted, before) > MOVES and distance(first, wanted) < TOLERANCE, strength
    for layer in patched:
        layer.weight_lowvram_function = layer._v_signature = None
    assert torch.equal(sample(clone), before)
    nothing_new(clone, mark)


def test_what_comfyui_fetched_ahead_is_used_and_left_to_it(paged: tuple[Any, Any, PagedMemory, list[Any]]) -> None:
    import comfy.ops

    _, clone, memory, layers = paged
    before = sample(clone)
    memory.take_away()
    ahead = [layer for layer in layers if "double_blocks.0." in layer.seed_key]
    comfy.ops.cast_modules_with_vbar(ahead, None, torch.device("cpu"), None, False)
    assert torch.equal(sample(clone), before)
    assert len(+memory.pins) == len(ahead) == sum("_prefetch" in vars(layer) for layer in layers)


def test_a_step_that_fails_gives_its_pages_back(
    paged: tuple[Any, Any, PagedMemory, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.ops

    _, clone, memory, layers = paged
    before = sample(clone)
    memory.take_away()
    resolve, seen = comfy.ops.resolve_cast_module_with_vbar, []

    def fails(layer: Any, *args: Any, **words: Any) -> Any:
        seen.append(layer)
        if len(seen) == 5:
            raise torch.OutOfMemoryError("no memory for a buffer")
        return resolve(layer, *args, **words)

    monkeypatch.setattr(comfy.ops, "resolve_cast_module_with_vbar", fails)
    with pytest.raises(torch.OutOfMemoryError):
        sample(clone)
    assert settled(memory, layers)
    assert torch.equal(sample(clone), before)
