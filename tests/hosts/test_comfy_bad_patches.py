# SPDX-License-Identifier: Apache-2.0
"""Patches that raise, hooks that change shapes, layers of classes nobody has heard of: the outcome is eager's."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from large_rows import few
from patchers import (
    MOVES,
    TOLERANCE,
    Pair,
    distance,
    nothing_new,
    sample,
    with_method,
    with_option,
)

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
MakePair = Callable[[str], Pair]


def fails_alike(at: Pair, *ways: Callable[[], Any], in_a_block: bool) -> None:
    """Assert that all ways raise what the first one raises, with the same text, and the others say in which block."""
    found, notes = [], []
    for way in ways:
        with pytest.raises(Exception) as caught:
            way()
        found.append((caught.type, str(caught.value)))
        notes.append(getattr(caught.value, "__notes__", []))
    assert all(row == found[0] for row in found), found
    assert not notes[0]
    if sys.version_info < (3, 11):
        assert not any(notes)
        return
    said = [one for one in notes[1:] if one]
    paths = "|".join(re.escape(path) for path, _ in at.network.named_modules() if path)
    assert len(said) == (len(notes) - 1 if in_a_block else 0)
    for (note,) in said:
        how = r"which Nexfort ran uncompiled|by options\['optimized_attention_override'\]"
        assert re.fullmatch(rf"It was raised in the block ({paths}) \(\w+\), ({how})\.", note)
    assert not [path for path, sub in at.network.named_modules() if "forward" in vars(sub)]


class Broken(Exception):
    """What the patch below raises."""


def broken(*_: Any, **__: Any) -> Any:
    raise Broken("the patch is broken")


def shrinking(q: Any, k: Any, v: Any, **_: Any) -> dict[str, Any]:
    return {"v": v[:, :1, 3:]}


IN_A_BLOCK = {"attn1_patch", "attn2_replace", "override", "other shapes"}  # the others are called by the network itself
BROKEN = {
    "attn1_patch": ("comfy_unet", with_method("set_model_attn1_patch", broken)),
    "attn2_replace": ("comfy_unet", with_method("set_model_attn2_replace", broken, "output", 2)),
    "output_block_patch": ("comfy_unet", with_method("set_model_output_block_patch", broken)),
    "double_block": ("comfy_flux", with_method("set_model_patch_replace", broken, "dit", "double_block", 1)),
    "override": ("comfy_sd3", with_option("optimized_attention_override", broken)),
    "other shapes": (
        "comfy_flux",
        with_method("set_model_attn1_patch", shrinking),
    ),
}


@pytest.mark.parametrize("kind", few(list(BROKEN), 2))
def test_a_patch_that_raises_raises_as_in_eager(pair: MakePair, kind: str) -> None:
    name, change = BROKEN[kind]
    at = pair(name)
    plain, before = sample(at.patcher), sample(at.clone)
    fails_alike(at, lambda: sample(change(at.patcher)), lambda: sample(change(at.clone)), in_a_block=kind in IN_A_BLOCK)
    at.is_left_by(plain, before)


def test_hooks_on_a_block_act_and_one_that_changes_shapes_fails_as_in_eager(pair: MakePair) -> None:
    at = pair("comfy_flux")
    plain, before, mark = sample(at.patcher), sample(at.clone), at.mark()
    block = at.network.double_blocks[0]
    handle = block.register_forward_hook(lambda module, args, out: (out[0] * 3, out[1]))
    wanted = sample(at.patcher)
    assert distance(wanted, plain) > MOVES and distance(sample(at.clone), wanted) < TOLERANCE
    nothing_new(at.since(mark))  # it stands around its artefact
    handle.remove()
    handle = block.register_forward_hook(lambda module, args, out: (out[0][:, 1:], out[1]))
    fails_alike(at, lambda: sample(at.patcher), lambda: sample(at.clone), in_a_block=False)
    handle.remove()
    at.is_left_by(plain, before)


def quantised(layer: Any, *, looks: bool) -> Any:
    """A layer of a pack for quantised weights, of a class that nobody has heard of; `looks`: at what it holds."""
    import comfy.ops

    class Packed(comfy.ops.disable_weight_init.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = torch.cat([row.float() * scale for row, scale in zip(self.packed, self.scales, strict=True)])
            if looks and self.scales[0].item() > 1e9:
                weight = -weight
            return torch.nn.functional.linear(x, weight.view(self.packed.shape), self.bias)

    made = Packed(layer.in_features, layer.out_features, bias=True, device="cpu", dtype=torch.float32)
    scales = layer.weight.abs().amax(1) / 127
    made.register_buffer("packed", (layer.weight / scales[:, None]).round().to(torch.int8))
    made.register_buffer("scales", scales)
    made.bias = layer.bias
    made.weight = None
    return made


@pytest.mark.parametrize("looks", few([False, True], [True]))
def test_a_layer_of_an_unknown_class_with_quantised_weights(pair: MakePair, looks: bool) -> None:
    at = pair("comfy_flux")
    plain, before, mark = sample(at.patcher), sample(at.clone), at.mark()
    mlp = at.network.double_blocks[0].img_mlp
    original, mlp[0] = mlp[0], quantised(mlp[0], looks=looks)
    wanted = sample(at.patcher)
    assert TOLERANCE < distance(wanted, plain) < MOVES, "as quantised weights do"
    mlp[0].scales.mul_(2.0)
    wanted = sample(at.patcher)
    assert distance(wanted, plain) > MOVES
    assert distance(sample(at.clone), wanted) < TOLERANCE
    new = at.since(mark)
    if looks:
        assert {row["region"] for row in new["eager"]} == {"double_blocks.0", "double_blocks.0.img_mlp"}, new["eager"]
        assert all("branches on the value of a tensor" in row["reason"] for row in new["eager"]), new["eager"]
        assert all(row["region"].startswith("double_blocks.0.") for row in new["artefacts"]), new["artefacts"]
    else:
        assert {row["region"] for row in new["artefacts"]} == {"double_blocks.0"} and not new["eager"], new
        mlp[0].scales.mul_(-1.0)  # data of the layer, not a constant of its artefact
        assert distance(sample(at.patcher), wanted) > MOVES
        assert distance(sample(at.clone), sample(at.patcher)) < TOLERANCE
    mlp[0] = original
    at.is_left_by(plain, before)
