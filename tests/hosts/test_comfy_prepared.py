# SPDX-License-Identifier: Apache-2.0
"""Weights that are packed once and kept, in ComfyUI: a LoRA, its strength and hooks are seen as if none were kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backbones import make
from patchers import distance, patcher_around, sample, with_lora

from nexfort_engine import prepared
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
