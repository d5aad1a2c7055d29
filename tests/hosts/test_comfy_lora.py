# SPDX-License-Identifier: Apache-2.0
"""LoRA as ComfyUI loads it, in every format and at every place of a workflow, on its own patchers and sampler.

What is loaded is random: the keys and the shapes are those of files that are in use.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from patchers import FAMILIES, MOVES, TOLERANCE, Pair, distance, eager_only, nothing_new, regions_of, sample

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
RANK = 4
File = dict[str, torch.Tensor]
Draw = Callable[..., torch.Tensor]


# ---- files -----------------------------------------------------------------------------------------------------------


def lora(x: str, weight: torch.Tensor, d: Draw) -> File:
    """As kohya's trainer writes it; the change is about as large as the weight."""
    out, wide = weight.shape[0], weight[0].numel()
    up, down = d(out, RANK), d(RANK, wide) / math.sqrt(wide * RANK)
    if weight.ndim == 4:  # a convolution's
        up, down = up[:, :, None, None], down.reshape(RANK, *weight.shape[1:])
    return {f"{x}.lora_up.weight": up, f"{x}.lora_down.weight": down, f"{x}.alpha": torch.tensor(float(RANK))}


def peft(x: str, weight: torch.Tensor, d: Draw) -> File:
    """As diffusers' trainers write it."""
    made = lora(x, weight, d)
    return {f"{x}.lora_B.weight": made[f"{x}.lora_up.weight"], f"{x}.lora_A.weight": made[f"{x}.lora_down.weight"]}


def dora(x: str, weight: torch.Tensor, d: Draw) -> File:
    """A LoRA with the norms of the weight's rows."""
    norms = weight.flatten(1).norm(dim=1).reshape(-1, *[1] * (weight.ndim - 1))
    return {**lora(x, weight, d), f"{x}.dora_scale": norms * (1.0 + 0.5 * d(*norms.shape).tanh())}


def loha(x: str, weight: torch.Tensor, d: Draw) -> File:
    """The product of two of low rank, element by element."""
    out, wide = weight.shape[0], weight[0].numel()
    parts = {"w1_a": d(out, RANK), "w1_b": d(RANK, wide), "w2_a": d(out, RANK), "w2_b": d(RANK, wide)}
    parts["w1_a"] /= RANK * math.sqrt(wide)
    return {f"{x}.hada_{name}": value for name, value in parts.items()}


def lokr(x: str, weight: torch.Tensor, d: Draw) -> File:
    """A Kronecker product."""
    out, wide = weight.shape[0], weight[0].numel()
    return {f"{x}.lokr_w1": d(2, 2), f"{x}.lokr_w2": d(out // 2, wide // 2) / math.sqrt(wide)}


def oft(x: str, weight: torch.Tensor, d: Draw) -> File:
    """Rotations of blocks of its rows."""
    return {f"{x}.oft_blocks": 0.5 * d(weight.shape[0] // 8, 8, 8), f"{x}.alpha": torch.tensor(0.0)}


def difference(x: str, weight: torch.Tensor, d: Draw) -> File:
    """The change itself, as extracted ones keep it for norms and biases."""
    return {f"{x}.diff": d(*weight.shape) / math.sqrt(weight[0].numel())}


def whole(x: str, weight: torch.Tensor, d: Draw) -> File:
    """Another weight in the place of the old one."""
    return {f"{x}.set_weight": d(*weight.shape) / math.sqrt(weight[0].numel())}


FORMATS = {f.__name__: f for f in (lora, peft, dora, loha, lokr, oft, difference, whole)}


def file_for(
    patcher: Any,
    kind: str = "lora",
    seed: int = 0,
    names: Callable[[str], str] = lambda name: name,
    only: Callable[[str, torch.Tensor], bool] = lambda name, weight: "blocks" in name and weight.ndim == 2,
) -> File:
    """A file that changes the weights that `only` picks; `names` gives a weight's name without its end in the file."""
    generator = torch.Generator().manual_seed(1000 + seed)
    draw = functools.partial(torch.randn, generator=generator)
    made: File = {}
    for name, weight in patcher.model.state_dict().items():
        if name.endswith(".weight") and only(name, weight):
            made |= FORMATS[kind](names(name.removesuffix(".weight")), weight, draw)
    assert len(made) > 4
    return made


def kohya(name: str) -> str:
    """lora_unet_double_blocks_0_img_attn_qkv"""
    return "lora_unet_" + name.removeprefix("diffusion_model.").replace(".", "_")


def loaded(file: File, strength: float = 1.0) -> Callable[[Any], Any]:
    """What LoRA nodes do."""

    def load(patcher: Any) -> Any:
        import comfy.sd

        return comfy.sd.load_lora_for_models(patcher, None, dict(file), strength, 0.0)[0]

    return load


def both(*changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One node after another."""
    return lambda patcher: functools.reduce(lambda made, change: change(made), changes, patcher)


# ---- on, off, stronger, stacked --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_format_is_honoured(pair: Callable[[str], Pair], name: str, kind: str) -> None:
    at = pair(name)
    nothing_new(at.honours(loaded(file_for(at.patcher, kind))))


@pytest.mark.parametrize("name", FAMILIES)
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


def hooked(file: File, *, strengths: tuple[float, ...] = (1.0,)) -> Callable[[Any, Any], Any]:
    """The LoRA acts on the prompt alone, not on the negative; each further strength from a later step on."""

    def edit(positive: Any, negative: Any) -> Any:
        import comfy.hooks
        from comfy_extras.nodes_hooks import ConditioningSetProperties

        hooks = comfy.hooks.create_hook_lora(lora=dict(file), strength_model=1.0, strength_clip=0.0)
        frames = comfy.hooks.HookKeyframeGroup()
        for i, strength in enumerate(strengths):
            frames.add(comfy.hooks.HookKeyframe(strength=strength, start_percent=i / len(strengths)))
        hooks.set_keyframes_on_hooks(frames)
        return ConditioningSetProperties().set_properties(positive, 1.0, "default", hooks=hooks)[0], negative

    return edit


@pytest.mark.parametrize("name", FAMILIES)
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


def bypassed(file: File, strength: float = 1.0) -> Callable[[Any], Any]:
    """What the bypass LoRA node does: the change is computed beside the layer, its weight stays."""

    def load(patcher: Any) -> Any:
        import comfy.sd

        return comfy.sd.load_bypass_lora_for_models(patcher, None, dict(file), strength, 0.0)[0]

    return load


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bypass_lora_runs_its_blocks_eager_while_it_is_on(pair: Callable[[str], Pair], name: str) -> None:
    at = pair(name)
    file = file_for(at.patcher)
    touched = {r for r in regions_of(at) if any(f"diffusion_model.{r}." in key for key in file)}
    assert touched and touched != regions_of(at)
    beside, merged = sample(bypassed(file)(at.patcher)), sample(loaded(file)(at.patcher))
    assert distance(beside, merged) < TOLERANCE
    eager_only(at.honours(bypassed(file)), touched, "a replaced forward")
    nothing_new(at.honours(loaded(file)))  # and ComfyUI leaves the layers' own forwards on them


def test_a_bypass_lora_on_a_layer_that_is_a_region_itself(pair: Callable[[str], Pair]) -> None:
    at = pair("comfy_flux")
    file = {}
    for name in ("diffusion_model.img_in", "diffusion_model.double_blocks.1.img_mlp.0"):
        weight = at.patcher.model.state_dict()[f"{name}.weight"]
        file |= lora(name, weight, functools.partial(torch.randn, generator=torch.Generator().manual_seed(7)))
    new = at.honours(bypassed(file))
    eager_only(new, {"img_in", "double_blocks.1"}, "a replaced forward")
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


def test_weights_that_turn_nan_give_nan_as_in_eager_and_leave_nothing(pair: Callable[[str], Pair]) -> None:
    at = pair("comfy_flux")
    plain, before = sample(at.patcher), sample(at.clone)
    file = {key: v * float("nan") if key.endswith("up.weight") else v for key, v in file_for(at.patcher).items()}
    for base in (at.patcher, at.clone):
        assert sample(loaded(file)(base)).isnan().all()
    at.is_left_by(plain, before)
    nothing_new(at.since(at.blank))
