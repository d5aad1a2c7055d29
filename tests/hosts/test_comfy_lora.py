# SPDX-License-Identifier: Apache-2.0
"""LoRA as ComfyUI loads it, in every format and at every place of a workflow, on its own patchers and sampler.

What is loaded is random: the keys and the shapes are those of files that are in use.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from card_memory import loaded_in_part, unload
from large_rows import few
from lora_files import FORMATS, File, both, bypassed, file_for, hooked, kohya, loaded, lora, peft
from patchers import (
    FAMILIES,
    FEW,
    MOVES,
    TOLERANCE,
    Pair,
    around_only,
    distance,
    nothing_new,
    one_family,
    regions_of,
    sample,
)

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
# ---- on, off, stronger, stacked --------------------------------------------------------------------------------------


def _rows() -> list[Any]:
    """Every format on one family and one format on a few; the other pairs run by `make test-large`."""
    every = [(name, kind) for name in FAMILIES for kind in FORMATS]
    return few(every, [row for row in every if row[0] == "comfy_flux" or (row[1] == "lora" and row[0] in FEW)])


@pytest.mark.parametrize(("name", "kind"), _rows())
def test_every_format_is_honoured(pair: Callable[[str], Pair], name: str, kind: str) -> None:
    at = pair(name)
    nothing_new(at.honours(loaded(file_for(at.patcher, kind))))


@one_family
def test_on_stronger_stacked_and_off(pair: Callable[[str], Pair], name: str) -> None:
    at = pair(name)
    plain, before = sample(at.patcher), sample(at.clone)
    one, other = file_for(at.patcher), file_for(at.patcher, "loha", seed=1, names=kohya)
    changes = {
        "on": loaded(one),
        "weaker": loaded(one, 0.5),
        "reversed": loaded(one, -0.7),
        "stacked": both(loaded(one, 0.5), loaded(other, 0.8)),
        "the other": loaded(other),
    }
    last = plain
    for what, change in changes.items():
        wanted = sample(change(at.patcher))
        assert distance(wanted, last) > MOVES, what
        assert distance(sample(change(at.clone)), wanted) < TOLERANCE, what
        last = wanted
    assert torch.equal(sample(loaded(one, 0.0)(at.clone)), before)
    at.is_left_by(plain, before)
    nothing_new(at.since(at.blank))


def test_convolutions_norms_and_what_stands_between_the_blocks(pair: Callable[[str], Pair]) -> None:
    at = pair("comfy_unet")
    convolutions = file_for(at.patcher, names=kohya, only=lambda name, weight: weight.ndim == 4)
    between = file_for(at.patcher, seed=1, only=lambda name, weight: "embed" in name or "proj_in" in name)
    norms = file_for(at.patcher, "difference", only=lambda name, weight: weight.ndim == 1)
    for file in (convolutions, between, norms):
        nothing_new(at.honours(loaded(file)))


def test_a_file_of_diffusers_for_parts_of_flux_s_fused_weights(pair: Callable[[str], Pair]) -> None:
    at = pair("comfy_flux")
    part, generator = torch.empty(32, 32), torch.Generator().manual_seed(5)
    draw = functools.partial(torch.randn, generator=generator)
    file: File = {}
    for i in range(2):
        for end in ("attn.to_q", "attn.to_v", "attn.add_k_proj", "attn.to_out.0"):
            file |= peft(f"transformer.transformer_blocks.{i}.{end}", part, draw)
    nothing_new(at.honours(loaded(file)))


# ---- conditions ------------------------------------------------------------------------------------------------------


@one_family
def test_hooks_act_on_one_condition_alone(pair: Callable[[str], Pair], name: str) -> None:
    at = pair(name)
    plain, before = sample(at.patcher), sample(at.clone)
    file, frames = file_for(at.patcher), {"steps": 4}
    everywhere = sample(loaded(file)(at.patcher))
    wanted = sample(at.patcher, edit=hooked(file))
    assert distance(wanted, plain) > MOVES and distance(wanted, everywhere) > MOVES
    assert distance(sample(at.clone, edit=hooked(file)), wanted) < TOLERANCE
    stepwise = hooked(file, strengths=(0.2, 1.0))
    wanted = sample(at.patcher, edit=stepwise, **frames)
    assert distance(wanted, sample(at.patcher, edit=hooked(file), **frames)) > MOVES
    assert distance(sample(at.clone, edit=stepwise, **frames), wanted) < TOLERANCE
    at.is_left_by(plain, before)
    nothing_new(at.since(at.blank))


# ---- bypass: the layers' own forward is replaced ---------------------------------------------------------------------


@one_family
def test_blocks_are_compiled_around_the_layers_that_a_bypass_lora_is_on(pair: Callable[[str], Pair], name: str) -> None:
    at = pair(name)
    file = file_for(at.patcher)
    touched = {r for r in regions_of(at) if any(f"diffusion_model.{r}." in key for key in file)}
    assert touched and touched != regions_of(at)
    beside, merged = sample(bypassed(file)(at.patcher)), sample(loaded(file)(at.patcher))
    assert distance(beside, merged) < TOLERANCE
    around_only(at.honours(bypassed(file)), touched)
    nothing_new(at.honours(loaded(file)))  # and ComfyUI leaves the layers' own forwards on them


@pytest.mark.large  # the test before this one has one inside a block
def test_a_bypass_lora_on_a_layer_that_is_a_region_itself(pair: Callable[[str], Pair]) -> None:
    at = pair("comfy_flux")
    file = {}
    for name in ("diffusion_model.img_in", "diffusion_model.double_blocks.1.img_mlp.0"):
        weight = at.patcher.model.state_dict()[f"{name}.weight"]
        file |= lora(name, weight, functools.partial(torch.randn, generator=torch.Generator().manual_seed(7)))
    new = at.honours(bypassed(file))
    around_only(new, {"double_blocks.1"})  # what stands around a whole region is outside of its artefact
    nothing_new(at.honours(loaded(file)))


# ---- layers of another shape -----------------------------------------------------------------------------------------


def reshaping() -> File:
    """What Flux's depth and canny LoRA do: `img_in` takes an image beside the latent."""
    x, draw = "diffusion_model.img_in", functools.partial(torch.randn, generator=torch.Generator().manual_seed(9))
    return {**peft(x, torch.empty(32, 2 * 16), draw), f"{x}.reshape_weight": torch.tensor([32, 32])}


def beside_an_image(positive: Any, negative: Any) -> Any:
    """What the node for inpainting and control models adds to the prompts."""
    import node_helpers

    image = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(11))
    return tuple(
        node_helpers.conditioning_set_values(cond, {"concat_latent_image": image}) for cond in (positive, negative)
    )


def test_a_lora_that_reshapes_a_layer_compiles_that_layer_alone_again(pair: Callable[[str], Pair]) -> None:
    at = pair("comfy_flux")
    change = loaded(reshaping())
    new = at.honours(change, edit=beside_an_image)
    assert {row["region"] for row in new["artefacts"]} == {"img_in"} and not new["eager"], new
    nothing_new(at.honours(change, edit=beside_an_image))  # the second time it is known


# ---- what does not belong there --------------------------------------------------------------------------------------


def test_a_lora_for_another_architecture_does_nothing_and_is_told_as_in_eager(
    pair: Callable[[str], Pair], caplog: pytest.LogCaptureFixture
) -> None:
    at = pair("comfy_flux")
    plain, before = sample(at.patcher), sample(at.clone)
    told = []
    strange = file_for(pair("comfy_sd3").patcher)
    for base, wanted in ((at.patcher, plain), (at.clone, before)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert torch.equal(sample(loaded(strange)(base)), wanted)
        told.append([record.getMessage() for record in caplog.records])
    assert told[0] == told[1] and sum("lora key not loaded" in text for text in told[0]) == len(strange)
    at.is_left_by(plain, before)


def test_a_lora_of_wrong_shapes_does_nothing_and_is_told_as_in_eager(
    pair: Callable[[str], Pair], caplog: pytest.LogCaptureFixture
) -> None:
    at = pair("comfy_flux")
    plain, before = sample(at.patcher), sample(at.clone)
    file = {key: torch.cat([v, v]) if key.endswith("up.weight") else v for key, v in file_for(at.patcher).items()}
    told = []
    for base, wanted in ((at.patcher, plain), (at.clone, before)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert torch.equal(sample(loaded(file)(base)), wanted)
        told.append([record.getMessage() for record in caplog.records])
    assert told[0] == told[1] and sum(text.startswith("ERROR lora") for text in told[0]) == len(file) // 3
    at.is_left_by(plain, before)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("name", few(["comfy_flux", "comfy_unet"], ["comfy_flux"]))
def test_weights_that_turn_nan_give_nan_as_in_eager_and_leave_nothing(
    pair: Callable[[str], Pair], name: str, share: float
) -> None:
    at = pair(name)
    plain, before = sample(at.patcher), sample(at.clone)
    file = {key: v * float("nan") if key.endswith("up.weight") else v for key, v in file_for(at.patcher).items()}
    unload()
    with loaded_in_part(share):
        for base in (at.patcher, at.clone):
            assert sample(loaded(file)(base)).isnan().all()
        unload()
    at.is_left_by(plain, before)
    nothing_new(at.since(at.blank))
