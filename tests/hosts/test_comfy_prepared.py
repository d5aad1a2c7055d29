# SPDX-License-Identifier: Apache-2.0
"""Weights that are packed once and kept, in ComfyUI: a LoRA, its strength and hooks are seen as if none were kept.

Where ComfyUI keeps the weights elsewhere, it is not asked again for those that are kept packed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backbones import make
from card_memory import PAGE, PagedMemory, loaded_in_part, page, unload
from patchers import distance, patcher_around, sample, with_lora
from pretended_graph import Graph, pretend

from nexfort_engine import loans, prepared
from nexfort_engine.config import CompileConfig
from nexfort_engine.hosts import comfy as host
from nexfort_engine.hosts.comfy_weights import ComfyWeights
from nexfort_engine.quant import precision, products

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
aten = torch.ops.aten
FP8_ERROR = 0.2


def times_rows(x: Any, weight: Any, bias: Any, like: torch.Tensor) -> Any:
    """The product that only a card has, by its meaning."""
    a, b = (aten.mul.Tensor(aten.to.dtype(values, torch.float32), scale) for values, scale in (x, weight))
    result = aten.to.dtype(aten.mm.default(a, aten.t.default(b)), like.dtype)
    return result if bias is None else aten.add.Tensor(result, bias)


@pytest.fixture
def patcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Flux whose products are taken however small they are, and on the CPU."""
    own = CompileConfig.lowering_options
    more = {"nexfort.low_precision": True, "nexfort.prepare": True}
    monkeypatch.setattr(CompileConfig, "lowering_options", lambda self, device: {**own(self, device), **more})
    monkeypatch.setattr(products, "missing", lambda _: None)
    monkeypatch.setattr(precision, "gain", lambda *_: 1.0)
    monkeypatch.setattr(precision, "times_rows", times_rows)
    monkeypatch.setattr(prepared, "LEAST", 1)
    monkeypatch.setattr(loans, "_SMALL", 256)  # biases, not the weights of products
    monkeypatch.setenv("NEXFORT_WORKERS", "0")
    network = make("comfy_flux").module.bfloat16()
    network.dtype = torch.bfloat16
    return patcher_around(network, flux=True)


def kept(patcher: Any) -> list[int]:
    """The serial numbers of what is kept, for every region that keeps something."""
    (engine,) = patcher.model.diffusion_model.__dict__[host._ENGINES].values()
    bindings = [binding for region in engine.regions for binding in region.bindings if binding.prepares]
    return [binding.kept.serial if binding.kept else 0 for binding in bindings]


def test_a_lora_and_its_strength_are_seen_as_if_nothing_were_kept(
    patcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = host.attach(patcher, CompileConfig.parse("O3"))
    first = sample(clone)
    before = kept(clone)
    assert before and all(before) and distance(first, sample(patcher)) < FP8_ERROR
    assert torch.equal(sample(clone), first) and kept(clone) == before, "made once"
    results = {}
    for strength in (0.0, 0.5, 1.0):
        changed = with_lora(clone, strength, size=0.2)
        results[strength] = sample(changed)
        assert torch.equal(sample(changed), results[strength])
        assert not set(kept(clone)) & set(before), "made again"
        before = kept(clone)
        with monkeypatch.context() as patch:
            patch.setattr(ComfyWeights, "version", lambda _: None)
            assert torch.equal(sample(changed), results[strength]), "as if nothing were kept"
            assert not any(kept(clone))
    assert torch.equal(results[0.0], first)
    assert distance(results[0.5], first) > FP8_ERROR and distance(results[1.0], results[0.5]) > FP8_ERROR / 2
    assert torch.equal(sample(clone), first), "and the model without it is what it was"


def test_hooks_that_change_weights_between_calls_keep_nothing(patcher: Any) -> None:
    version = ComfyWeights(patcher.model).version
    import comfy.model_management as management

    management.load_models_gpu([patcher])
    assert version() is None, "nobody runs it"
    patcher.model.current_patcher = patcher
    said = version()
    assert said is not None and version() == said
    changed = with_lora(patcher, 0.5, size=0.2)
    management.load_models_gpu([changed])
    patcher.model.current_patcher = changed
    assert version() not in (None, said)
    patcher.model.current_patcher = patcher.clone()
    patcher.model.current_patcher.hook_patches = {"a hook": {}}
    assert version() is None
    patcher.model.current_patcher = None


def test_what_is_kept_goes_with_the_model(patcher: Any) -> None:
    import comfy.model_management as management

    clone = host.attach(patcher, CompileConfig.parse("O3"))
    for last in (clone, patcher):
        sample(clone)
        sample(last)
        assert all(kept(clone))
        management.unload_all_models()
        assert not any(kept(clone))


# ---- kept elsewhere ----------------------------------------------------------------------------------------


class Elsewhere:
    """A compiled clone whose weights ComfyUI keeps elsewhere. asked: the layers that it was asked for, in order."""

    def __init__(self, clone: Any, memory: PagedMemory | None = None) -> None:
        self.clone, self.memory = clone, memory
        self.asked: list[str] = []

    def sampled(self, clone: Any = None) -> tuple[torch.Tensor, set[str]]:
        """The latent, and the layers that were asked for meanwhile."""
        self.asked.clear()
        return sample(clone or self.clone), set(self.asked)


def _asking(found: Elsewhere, patch: pytest.MonkeyPatch) -> None:
    lend = ComfyWeights.lend
    names = {id(layer): name for name, layer in found.clone.model.diffusion_model.named_modules()}

    def noted(self: ComfyWeights, layers: list[Any], device: torch.device) -> Any:
        found.asked += [names[id(layer)] for layer in layers]
        return lend(self, layers, device)

    patch.setattr(ComfyWeights, "lend", noted)


def stays_paged(layers: list[Any], patch: pytest.MonkeyPatch) -> None:
    """A patcher that loads other patches leaves the layers under dynamic VRAM, to be fetched anew."""
    import comfy.model_patcher

    kind = comfy.model_patcher.ModelPatcher
    load = kind.load

    def loaded(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        for layer in layers:
            layer.comfy_cast_weights, layer._v_signature = True, None

    patch.setattr(kind, "load", loaded)


@pytest.fixture(params=["offloaded", "paged", "no room for pages"])
def elsewhere(request: pytest.FixtureRequest, patcher: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    """Of nothing loaded, of all under dynamic VRAM, and of that on a card with little room."""
    clone = host.attach(patcher, CompileConfig.parse("O3"))
    if request.param == "offloaded":
        found, state = Elsewhere(clone), loaded_in_part(0.0)
    else:
        found, state = Elsewhere(clone, PagedMemory(1 << 20)), contextlib.nullcontext()
    with state:
        if found.memory is not None:
            stays_paged(page(patcher, found.memory, monkeypatch), monkeypatch)
            if request.param != "paged":
                found.memory.fits = 2 * PAGE
        _asking(found, monkeypatch)
        yield found
        unload()


PACKED = "double_blocks.0.img_mlp.0"


def is_packed(name: str) -> bool:
    return name.endswith(("mlp.0", "mlp.2", "qkv", "proj", "linear1", "linear2"))


def test_the_host_is_not_asked_again_for_what_is_kept_packed(elsewhere: Elsewhere) -> None:
    first, asked = elsewhere.sampled()
    assert PACKED in asked and all(kept(elsewhere.clone))
    again, asked_again = elsewhere.sampled()
    assert torch.equal(again, first)
    assert not [name for name in asked_again if is_packed(name)]
    if elsewhere.memory is not None:
        assert not +elsewhere.memory.pins, "what was taken out is given back"


def test_without_stand_ins_the_picture_is_the_same(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loans.Layers, "stand_ins", lambda *_: {})
        wanted, _ = elsewhere.sampled()
        assert torch.equal(elsewhere.sampled()[0], wanted)
        made = kept(elsewhere.clone)
        assert all(made)
        (engine,) = elsewhere.clone.model.diffusion_model.__dict__[host._ENGINES].values()
    engine.release()
    for _ in range(3):
        assert torch.equal(elsewhere.sampled()[0], wanted)
    assert all(kept(elsewhere.clone)) and not set(kept(elsewhere.clone)) & set(made)


def test_a_lora_is_seen_wherever_the_weights_are(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = elsewhere.sampled()
    changed = with_lora(elsewhere.clone, 1.0, size=0.2)
    found, asked = elsewhere.sampled(changed)
    assert PACKED in asked and distance(found, first) > FP8_ERROR
    assert torch.equal(elsewhere.sampled(changed)[0], found)
    with monkeypatch.context() as patch:
        patch.setattr(ComfyWeights, "version", lambda _: None)
        assert torch.equal(elsewhere.sampled(changed)[0], found), "as if nothing were kept"
    assert torch.equal(elsewhere.sampled()[0], first), "and the model without it is what it was"


def test_pages_of_what_is_kept_packed_may_go(elsewhere: Elsewhere) -> None:
    first, _ = elsewhere.sampled()
    if elsewhere.memory is None:
        unload()
        assert not any(kept(elsewhere.clone))
    else:
        elsewhere.sampled()
        elsewhere.memory.take_away()
    before = kept(elsewhere.clone)
    again, asked = elsewhere.sampled()
    assert torch.equal(again, first)
    assert elsewhere.memory is None or (kept(elsewhere.clone) == before and not any(map(is_packed, asked)))


def test_a_graph_holds_no_pages_of_what_is_kept_packed(patcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    memory = PagedMemory(1 << 20)
    found = Elsewhere(host.attach(patcher, CompileConfig.parse("O3")), memory)
    layers = page(patcher, memory, monkeypatch)
    stays_paged(layers, monkeypatch)
    _asking(found, monkeypatch)
    first = sample(found.clone, steps=4)
    assert len(Graph.made) == 1, "captured once the weights were packed, and the others asked for by themselves"
    memory.take_away()
    replayed, held = Graph.replay, set()

    def watched(self: Graph) -> None:
        held.update(page for page in range(memory.get_nr_pages()) if memory.pinned(page))
        replayed(self)

    monkeypatch.setattr(Graph, "replay", watched)
    assert torch.equal(sample(found.clone, steps=4), first)
    assert held and held <= pages_of([layer for layer in layers if not is_packed(layer.seed_key)])
    assert held < pages_of(layers) and not +memory.pins


def pages_of(layers: list[Any]) -> set[int]:
    places = [layer._v for layer in layers]
    return {page for _, at, size in places for page in range(at // PAGE, (at + size - 1) // PAGE + 1)}
