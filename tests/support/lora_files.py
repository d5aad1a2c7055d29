# SPDX-License-Identifier: Apache-2.0
"""LoRA files in every format that ComfyUI reads, with random weights, and the ways its nodes put them on a model.

The keys and the shapes are those of files that are in use. No test lives here.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import torch

RANK = 4
File = dict[str, torch.Tensor]
Draw = Callable[..., torch.Tensor]


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


def in_blocks(name: str, weight: torch.Tensor) -> bool:
    """What most files change: the matrices of the repeated blocks."""
    return weight.ndim == 2 and re.search(r"blocks|layers", name) is not None


def file_for(
    patcher: Any,
    kind: str = "lora",
    seed: int = 0,
    names: Callable[[str], str] = lambda name: name,
    only: Callable[[str, torch.Tensor], bool] = in_blocks,
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


def bypassed(file: File, strength: float = 1.0) -> Callable[[Any], Any]:
    """What the bypass LoRA node does: the change is computed beside the layer, its weight stays."""

    def load(patcher: Any) -> Any:
        import comfy.sd

        return comfy.sd.load_bypass_lora_for_models(patcher, None, dict(file), strength, 0.0)[0]

    return load
