# SPDX-License-Identifier: Apache-2.0
"""What nodes and other packs add to a model, through ComfyUI's own nodes, patchers, conditions and sampler.

Each is a contract: it moves the eager picture, the compiled one follows, blocks without code of others stay compiled,
and nothing is left when it is taken off.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from large_rows import few
from patchers import (
    FAMILIES,
    FEW,
    MOVES,
    TOLERANCE,
    Change,
    Pair,
    distance,
    eager_only,
    families,
    node,
    nothing_new,
    one_family,
    regions_of,
    sample,
    with_method,
    with_option,
)
from patches_of_users import (
    Adapter,
    Edit,
    chained,
    control_of,
    flipped,
    function_wrapper,
    left_half,
    skipped,
    stronger,
    with_values,
    wrapped,
)

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
MakePair = Callable[[str], Pair]


def attentions(pair: Pair) -> set[str]:
    """The regions of a UNet that attend."""
    return {name for name in regions_of(pair) if re.fullmatch(r"(input|middle|output)_block(s\.\d+)?\.1", name)}


def one_variant_a_kind(new: dict[str, Any], pair: Pair, eager: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Assert that only these regions ran eager, and that each kind of attention was compiled once more at most."""
    assert {row["region"] for row in new["eager"]} == eager, new["eager"]
    kinds = {row["name"]: row["kind"] for row in pair.report.as_dict()["regions"]}
    made = [row["region"] for row in new["artefacts"]]
    assert set(made) <= attentions(pair) and len(made) <= 2, made
    assert {row["region"] for row in new["variants"]} == set(made) and len({kinds[name] for name in made}) <= len(made)


# ---- patches of a UNet's attention -----------------------------------------------------------------------------------


IN_EVERY_ATTENTION: dict[str, Change] = {
    "attn1_patch": with_method("set_model_attn1_patch", lambda n, context, value, extra: (n, context, value * 3)),
    "attn1_output_patch": with_method("set_model_attn1_output_patch", lambda n, extra: n * 3),
    "attn2_output_patch": with_method("set_model_attn2_output_patch", lambda n, extra: n * 3),
    "HyperTile": node(
        "comfy_extras.nodes_hypertile.HyperTile", tile_size=32, swap_size=2, max_depth=1, scale_depth=False
    ),
}


@pytest.mark.parametrize("change", few(IN_EVERY_ATTENTION, ("HyperTile",)))
def test_patches_of_attention_run_attention_eager_and_nothing_else(pair: MakePair, change: Change) -> None:
    at = pair("comfy_unet")
    assert len(attentions(at)) == 11
    eager_only(at.honours(change), attentions(at), "which compiled code cannot hold")


IN_ONE_BLOCK: dict[str, tuple[Change, str]] = {
    "attn2_replace": (with_method("set_model_attn2_replace", Adapter(2.0), "input", 1), "input_blocks.1.1"),
    "attn1_replace": (with_method("set_model_attn1_replace", Adapter(2.0), "output", 2, 0), "output_blocks.2.1"),
    "PAG": (node("comfy_extras.nodes_pag.PerturbedAttentionGuidance", scale=9.0), "middle_block.1"),
    "SAG": (node("comfy_extras.nodes_sag.SelfAttentionGuidance", scale=3.0, blur_sigma=2.0), "middle_block.1"),
}


@pytest.mark.parametrize(("change", "block"), few(IN_ONE_BLOCK, ("attn1_replace",)))
def test_a_block_that_is_replaced_runs_eager_and_the_others_share_one_variant(
    pair: MakePair, change: Change, block: str
) -> None:
    at = pair("comfy_unet")
    one_variant_a_kind(at.honours(change), at, {block})


BETWEEN_BLOCKS: dict[str, Change] = {
    "FreeU": node("comfy_extras.nodes_freelunch.FreeU", b1=1.5, b2=1.8, s1=0.5, s2=0.2),
    "FreeU_V2": node("comfy_extras.nodes_freelunch.FreeU_V2", b1=1.5, b2=2.8, s1=0.5, s2=0.2),
    "input_block_patch": with_method("set_model_input_block_patch", lambda h, options: h * 1.5),
    "emb_patch": with_method("set_model_emb_patch", lambda emb, channels, options: emb * 3.0),
}


@pytest.mark.parametrize("change", few(BETWEEN_BLOCKS, ("FreeU_V2",)))
def test_patches_between_blocks_leave_all_compiled(pair: MakePair, change: Change) -> None:
    at = pair("comfy_unet")
    one_variant_a_kind(at.honours(change), at)


def test_an_adapter_that_changes_between_runs_is_followed(pair: MakePair) -> None:
    at = pair("comfy_unet")
    plain, before = sample(at.patcher), sample(at.clone)
    adapter = Adapter(1.0)

    def on(base: Any) -> Any:
        clone = base.clone()
        for place in (("input", 1), ("input", 4), ("middle", 0), ("output", 2), ("output", 5)):
            clone.set_model_attn2_replace(adapter, *place)
        return clone

    patched, compiled = on(at.patcher), on(at.clone)
    sample(compiled)
    mark, last = at.mark(), plain
    for what in ("as it is", "scale", "tensor in place", "another tensor", "another object", "off and on"):
        if what == "scale":
            adapter.scale = 3.0
        elif what == "tensor in place":
            adapter.tokens.mul_(-2.0)
        elif what == "another tensor":
            adapter.tokens = Adapter(1.0, seed=6).tokens * 4
        elif what == "another object":
            adapter = Adapter(-3.0, seed=7)
            patched, compiled = on(at.patcher), on(at.clone)
        elif what == "off and on":
            adapter.scale = 2.0
            assert torch.equal(sample(at.clone), before)
        wanted = sample(patched)
        assert distance(wanted, last) > MOVES, what
        assert distance(sample(compiled), wanted) < TOLERANCE, what
        last = wanted
    new = at.since(mark)
    assert not new["artefacts"] and len({row["region"] for row in new["eager"]}) == 5, new
    at.is_left_by(plain, before)


# ---- attention of others -------------------------------------------------------------------------------------------


def other(attention: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Another attention, which looks at what its block is told."""
    assert kwargs["transformer_options"]["cond_or_uncond"] in ([0], [0, 1], [1, 0])
    return attention(*args, **kwargs).flip(2)


@one_family
def test_attention_of_others_runs_inside_compiled_blocks(pair: MakePair, name: str) -> None:
    at = pair(name)
    first = at.honours(with_option("optimized_attention_override", flipped))
    blocks = {region for region in regions_of(at) if re.search(r"block|layers|refiner", region)}
    made = [row["region"] for row in first["artefacts"]]
    assert made and set(made) <= blocks and not first["eager"], first
    assert sorted(made) == sorted(row["region"] for row in first["variants"]), first
    assert any("optimized_attention_override'] is called" in note for note in first["notes"]), first["notes"]
    for call in ({}, {"cfg": 12.0, "batch": 3}, {"size": (24, 16), "cfg": 12.0}):
        nothing_new(at.honours(with_option("optimized_attention_override", other), **call))


@pytest.mark.parametrize("name", few(["comfy_unet", "comfy_flux", "comfy_wan"], ["comfy_wan"]))
def test_core_s_node_for_attention_leaves_blocks_compiled(pair: MakePair, name: str) -> None:
    advanced = pytest.importorskip("comfy_extras.nodes_model_advanced")
    if not hasattr(advanced, "ModelAttentionBackend"):
        pytest.skip("an older ComfyUI, which has no such node")
    at = pair(name)
    before, mark = sample(at.clone), at.mark()
    (chosen,) = advanced.ModelAttentionBackend().patch(at.clone, "pytorch attention")
    assert distance(sample(chosen), before) < TOLERANCE
    new = at.since(mark)
    assert new["artefacts"] and not new["eager"], new


# ---- patches of other families ---------------------------------------------------------------------------------------


_SKIP = {"start_percent": 0.0, "end_percent": 1.0, "rescaling_scale": 0.0, "scale": 9.0}
IN_A_DIT: dict[str, Change] = {
    "replaced": with_method("set_model_patch_replace", stronger, "dit", "double_block", 0),
    "skipped": with_method("set_model_patch_replace", skipped, "dit", "double_block", 1),
    "SkipLayerGuidance": node(
        "comfy_extras.nodes_slg.SkipLayerGuidanceDiT", double_layers="0", single_layers="1", **_SKIP
    ),
}


@pytest.mark.parametrize("name", few(["comfy_flux", "comfy_sd3", "comfy_qwen"], ["comfy_flux"]))
@pytest.mark.parametrize("change", IN_A_DIT.values(), ids=IN_A_DIT)
def test_blocks_of_a_dit_that_are_replaced_stay_compiled_inside(pair: MakePair, change: Change, name: str) -> None:
    new = pair(name).honours(change)
    if new["artefacts"]:  # around a replacement SD3 calls its blocks without an argument that it gives otherwise
        assert name == "comfy_sd3" and not new["eager"], new
        assert [row["region"] for row in new["artefacts"]] == [row["region"] for row in new["variants"]], new
        assert all("called in another way" in row["reason"] for row in new["variants"])
    else:
        nothing_new(new)


@pytest.mark.large  # two promises at once, each with a test of its own
def test_a_replaced_block_that_is_first_called_at_batch_one_is_compiled_for_larger_ones(pair: MakePair) -> None:
    at, change = pair("comfy_wan"), IN_A_DIT["replaced"]
    first = at.honours(change, cfg=1.0)  # the plan sees no code of others, so that this is captured as it is called
    assert [row["region"] for row in first["artefacts"]] == ["blocks.0"] and not first["eager"], first
    second = at.honours(change)
    assert [row["region"] for row in second["artefacts"]] == ["blocks.0"] and not second["eager"], second
    assert "where 1 was captured" in second["variants"][0]["reason"]
    for call in ({"cfg": 1.0}, {"cfg": 1.0, "batch": 3}, {"batch": 2}, {"size": (24, 16)}):
        nothing_new(at.honours(change, **call))


def test_an_attention_patch_of_flux(pair: MakePair) -> None:
    at = pair("comfy_flux")

    def patch(q: Any, k: Any, v: Any, **_: Any) -> dict[str, Any]:
        return {"q": q, "k": k, "v": v * 3}

    blocks = {region for region in regions_of(at) if "blocks" in region}
    eager_only(at.honours(with_method("set_model_attn1_patch", patch)), blocks, "attn1_patch")


# ---- around the network ----------------------------------------------------------------------------------------------


AROUND = {
    "diffusion_model": wrapped("diffusion_model"),
    "apply_model": wrapped("apply_model"),
    "model_function_wrapper": with_method("set_model_unet_function_wrapper", function_wrapper),
}


# ComfyUI calls no wrappers of the network itself in SD3
NOT_IN_SD3 = ("diffusion_model", "EasyCache")
EVERYWHERE = [(name, kind) for name in FAMILIES for kind in AROUND if name != "comfy_sd3" or kind not in NOT_IN_SD3]
CACHES = [
    (name, kind)
    for name in FAMILIES
    for kind in ("EasyCache", "LazyCache")
    if (name, kind) != ("comfy_sd3", "EasyCache")
]


@pytest.mark.parametrize(("name", "kind"), few(EVERYWHERE, list(zip(FEW + FEW[1:], AROUND, strict=True))))
def test_wrappers_of_others_act_and_cost_nothing(pair: MakePair, name: str, kind: str) -> None:
    nothing_new(pair(name).honours(AROUND[kind]))


@pytest.mark.parametrize(
    ("name", "kind"),
    few(
        CACHES,
        [("comfy_unet", "EasyCache"), ("comfy_flux", "LazyCache")],
    ),
)
def test_caching_of_steps(pair: MakePair, name: str, kind: str) -> None:
    at = pair(name)
    cached = node(
        f"comfy_extras.nodes_easycache.{kind}Node",
        **{"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False},
    )
    new = at.honours(cached, steps=8)
    if name == "comfy_unet":  # its blocks walk over all options, and one more is there
        one_variant_a_kind(new, at)
    else:
        nothing_new(new)
    # EasyCache leaves the network out inside the call that the report counts
    assert new["calls"] < 8 or kind == "EasyCache", "no step was left out"


# ---- conditions ------------------------------------------------------------------------------------------------------


def follows(at: Pair, edit: Edit, **call: Any) -> dict[str, Any]:
    """Assert the contract of a change of the conditions; what the report gained."""
    call = {"cfg": 12.0, **call}  # so that the prompt matters
    plain, before, mark = sample(at.patcher, **call), sample(at.clone, **call), at.mark()
    wanted = sample(at.patcher, edit=edit, **call)
    assert distance(wanted, plain) > MOVES, "the change does nothing, so that the contract says nothing"
    assert distance(sample(at.clone, edit=edit, **call), wanted) < TOLERANCE, at.since(mark)
    new = at.since(mark)
    at.is_left_by(plain, before, **call)
    return new


@families
def test_area_conditions(pair: MakePair, name: str) -> None:
    nothing_new(follows(pair(name), left_half, cfg=24.0))


# test_comfy_controlnet.py has one beside a UNet
@pytest.mark.parametrize(
    "name", few([name for name in FAMILIES if name not in ("comfy_wan", "comfy_lumina")], ["comfy_flux"])
)
def test_controlnets_one_two_and_for_a_part_of_the_steps(pair: MakePair, name: str) -> None:
    at, control = pair(name), control_of(name)
    rows = {
        "one": chained(control(1)),
        "weaker": chained(control(1, 0.4)),
        "two": chained(control(1), control(2, 0.7)),
        "first steps": chained(control(1, 1.0, (0.0, 0.2))),
        "last steps": chained(control(1, 6.0, (0.2, 1.0))),
    }
    seen: list[torch.Tensor] = []
    for what, edit in rows.items():
        nothing_new(follows(at, edit, steps=4))
        now = sample(at.patcher, edit=edit, steps=4)
        assert all(distance(now, other) > 10 * TOLERANCE for other in seen), what
        seen.append(now)


@pytest.mark.parametrize("method", few(["offset", "index", "uxo"], ["index"]))
def test_reference_latents_of_flux(pair: MakePair, method: str) -> None:
    at = pair("comfy_flux")
    draw = torch.Generator().manual_seed(8)
    pictures = [9 * torch.randn(1, 4, *size, generator=draw) for size in ((24, 24), (8, 24))]
    for count in (1, 2):
        edit = with_values(reference_latents=pictures[:count], reference_latents_method=method)
        new = follows(at, edit)
        nothing_new(new)


@pytest.mark.parametrize("method", few(["index", "negative_index", "index_timestep_zero"], ["negative_index"]))
def test_reference_latents_of_qwen(pair: MakePair, method: str) -> None:
    at = pair("comfy_qwen")
    draw = torch.Generator().manual_seed(8)
    pictures = [9 * torch.randn(1, 4, 1, *size, generator=draw) for size in ((24, 24), (8, 24))]
    made = []
    for count in (1, 2):
        new = follows(at, with_values(reference_latents=pictures[:count], reference_latents_method=method))
        assert not new["eager"], new
        made.append(new["artefacts"])
    # two times a row: what is captured at batch 2 does not serve batch 1, so that the first such step makes both
    assert not made[1] and {row["region"] for row in made[0]} == (
        {"transformer_blocks.0"} if method == "index_timestep_zero" else set()
    ), made


# ---- core's own compiling in the same graph --------------------------------------------------------------------------


def test_core_s_compile_node_behind_ours_is_left_alone_and_said(pair: MakePair) -> None:
    at = pair("comfy_flux")

    def core(patcher: Any) -> Any:
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        clone = patcher.clone(disable_dynamic=True)
        set_torch_compile_wrapper(model=clone, backend="eager")
        return clone

    plain, before, mark = sample(at.patcher), sample(at.clone), at.mark()
    with torch._dynamo.config.patch(disable=True):  # what core would make of it is not the question
        assert torch.equal(sample(core(at.clone)), plain)
    eager_only(at.since(mark), {"(whole module)"}, "ComfyUI's TorchCompileModel")
    at.is_left_by(plain, before)
