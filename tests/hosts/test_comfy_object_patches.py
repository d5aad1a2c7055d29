# SPDX-License-Identifier: Apache-2.0
"""What a model patcher puts on a network itself, and takes off: other objects, functions of weights, another dtype.

The patcher stays what it was: nothing is loaded a second time, and dynamic VRAM is not switched off.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backbones import make
from card_memory import loaded_in_part, unload
from large_rows import few
from patchers import (
    CONFIG,
    TOLERANCE,
    Change,
    Pair,
    distance,
    nothing_new,
    patcher_around,
    regions_of,
    sample,
    with_method,
)

from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
MakePair = Callable[[str], Pair]
# a layer in a block, a group of layers in one, a block, and what stands between blocks
OBJECTS = {
    "comfy_flux": ("double_blocks.0.img_mlp.0", "double_blocks.0.img_mlp", "single_blocks.1", "img_in"),
    "comfy_unet": ("middle_block.1.transformer_blocks.0.attn2", "output_blocks.2.0", "time_embed"),
    "comfy_wan": ("blocks.0.ffn", "blocks.1", "head"),
}


def with_object(at: Pair, path: str, factor: float) -> Change:
    """A clone that runs another object in this place: the same one with its weights multiplied."""
    other = copy.deepcopy(at.network.get_submodule(path))
    for weight in other.parameters():
        weight.mul_(factor)
    return with_method("add_object_patch", f"diffusion_model.{path}", other)


@pytest.mark.parametrize(("name", "path"), few([(name, path) for name, paths in OBJECTS.items() for path in paths], 2))
def test_another_object_in_the_place_of_one(pair: MakePair, name: str, path: str) -> None:
    at = pair(name)
    plain, before = sample(at.patcher), sample(at.clone)
    for factor in (-2.0, 3.0):
        nothing_new(at.honours(with_object(at, path, factor)))
    at.is_left_by(plain, before)


def test_an_object_that_was_taken_off_is_let_go(pair: MakePair) -> None:
    at = pair("comfy_flux")
    gone = []
    for factor in (-2.0, 3.0):
        patched = with_object(at, "double_blocks.0.img_mlp", factor)(at.clone)
        sample(patched)
        gone.append(weakref.ref(patched.object_patches["diffusion_model.double_blocks.0.img_mlp"]))
        del patched
    sample(at.clone)
    gc.collect()
    assert [one() for one in gone] == [None, None]


@pytest.mark.parametrize("share", few([1.0, 0.5, 0.0], [0.5]))
def test_a_function_of_a_weight(pair: MakePair, share: float) -> None:
    """What packs for quantised or streamed weights add by the patcher's own method."""
    at = pair("comfy_flux")

    def louder(factor: float) -> Change:
        def change(patcher: Any) -> Any:
            clone = patcher.clone()
            for name in ("double_blocks.0.img_mlp.0.weight", "single_blocks.1.linear2.weight"):
                clone.add_weight_wrapper(f"diffusion_model.{name}", lambda weight: weight * factor)
            return clone

        return change

    plain, before = sample(at.patcher), sample(at.clone)
    unload()
    with loaded_in_part(share):
        for factor in (3.0, -2.0):
            nothing_new(at.honours(louder(factor)))
        unload()
    at.is_left_by(plain, before)


@pytest.mark.parametrize("name", few(list(OBJECTS), ["comfy_wan"]))
def test_another_dtype_to_compute_in(pair: MakePair, name: str) -> None:
    """Each kind of block is compiled once for it; after that to and fro costs nothing."""
    from comfy_extras.nodes_model_advanced import ModelComputeDtype

    at = pair(name)

    def computing(patcher: Any) -> Any:
        return ModelComputeDtype().patch(patcher, "bf16")[0]

    plain, before, mark = sample(at.patcher), sample(at.clone), at.mark()
    wanted = sample(computing(at.patcher))
    assert distance(wanted, plain) > 2 * TOLERANCE, "as half precision does"
    assert distance(sample(computing(at.clone)), wanted) < TOLERANCE
    new = at.since(mark)
    assert not new["eager"], new["eager"]
    assert 0 < len(new["artefacts"]) < len(regions_of(at)), new["artefacts"]
    at.is_left_by(plain, before)
    mark = at.mark()
    assert distance(sample(computing(at.clone)), wanted) < TOLERANCE
    assert distance(sample(host.attach(computing(at.patcher), CONFIG)), wanted) < TOLERANCE
    nothing_new(at.since(mark))


def test_a_dynamic_patcher_stays_dynamic_and_nothing_is_loaded_again() -> None:
    import comfy.model_patcher

    class Dynamic(comfy.model_patcher.ModelPatcher):
        """As ComfyUI's own, which is none on a CPU."""

        def is_dynamic(self) -> bool:
            return True

    def load_again(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model is loaded a second time")

    plain = patcher_around(make("comfy_flux").module, family="Flux")
    patcher = Dynamic(plain.model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))
    patcher.cached_patcher_init = (load_again, ())
    if hasattr(patcher, "get_clone_model_override"):
        with pytest.raises(AssertionError, match="a second time"):
            patcher.clone(disable_dynamic=True)
    clone = host.attach(patcher, CONFIG)
    assert type(clone) is Dynamic and clone.is_dynamic() and clone.model is patcher.model
    assert host.attach(clone, CONFIG).model is patcher.model
