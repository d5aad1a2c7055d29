# SPDX-License-Identifier: Apache-2.0
"""What nodes and other packs put on a model or on its prompts: adapters, replacements, wrappers, ControlNets.

No test lives here. ComfyUI must be imported first (the fixture `comfyui` in conftest.py does it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from patchers import Change, Conditions

Edit = Callable[[Conditions, Conditions], tuple[Conditions, Conditions]]


class Adapter:
    """As IPAdapter: it stands for the attention of a block, holds tensors and a scale, and is changed between runs."""

    def __init__(self, scale: float, seed: int = 5) -> None:
        self.scale = scale
        self.tokens = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(seed))

    def __call__(self, q: Any, k: Any, v: Any, extra: dict[str, Any]) -> torch.Tensor:
        from comfy.ldm.modules.attention import optimized_attention

        image = self.tokens[..., : q.shape[-1]].expand(q.shape[0], -1, -1)
        own = optimized_attention(q, k, v, extra["n_heads"])
        return own + self.scale * optimized_attention(q, image, image, extra["n_heads"])


def flipped(attention: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return attention(*args, **kwargs).flip(1)


def stronger(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """A block replacement that calls the original."""
    out = extra["original_block"](args)
    return {**out, "img": out["img"] * -2.0}


def skipped(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """A block replacement that does without it."""
    return args


def wrapped(kind: str) -> Change:
    """What caching packs and many others do."""

    def louder(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(*args, **kwargs) * 1.5

    def change(patcher: Any) -> Any:
        clone = patcher.clone()
        clone.add_wrapper_with_key(kind, "another pack", louder)
        return clone

    return change


def function_wrapper(apply: Callable[..., Any], args: dict[str, Any]) -> Any:
    return apply(args["input"] * 1.2, args["timestep"], **args["c"]) * 0.7


def with_values(**values: Any) -> Edit:
    """Values set on the prompt, as nodes set them; the negative stays."""

    def edit(positive: Conditions, negative: Conditions) -> tuple[Conditions, Conditions]:
        import node_helpers

        return node_helpers.conditioning_set_values(positive, values), negative

    return edit


def control_of(name: str) -> Callable[..., Any]:
    """A ControlNet whose network is a few random numbers for each place where its family takes some."""
    import comfy.controlnet

    class Control(comfy.controlnet.ControlBase):
        def __init__(self, seed: int, strength: float = 1.0, span: tuple[float, float] = (0.0, 1.0)) -> None:
            super().__init__()
            self.seed = seed
            self.set_cond_hint(torch.zeros(1, 3, 128, 128), strength, span)

        def get_control(self, x: Any, t: Any, cond: Any, batched: int, options: Any) -> Any:
            before = self.previous_controlnet
            given = before.get_control(x, t, cond, batched, options) if before is not None else None
            if t[0] > self.timestep_range[0] or t[0] < self.timestep_range[1]:
                return given
            inner = [side // 2 for side in x.shape[-2:]]
            draw, made = torch.Generator().manual_seed(self.seed), {"input": [], "middle": [], "output": []}
            if name == "comfy_unet":
                made["middle"] = [3 * torch.randn(x.shape[0], 64, *inner, generator=draw)]
                made["output"] = [3 * torch.randn(x.shape[0], 1, 1, 1, generator=draw) for _ in range(3)]
            else:
                width = 128 if name == "comfy_sd3" else 32
                places = {"comfy_flux": ("input", "output"), "comfy_qwen": ("input",)}.get(name, ("output",))
                made |= {
                    place: [3 * torch.randn(x.shape[0], math.prod(inner), width, generator=draw)] for place in places
                }
            return self.control_merge(made, given, None)

    return Control


def chained(*links: Any) -> Edit:
    """ControlNets on the prompt, one behind another."""
    for link, before in zip(links[1:], links, strict=False):
        link.set_previous_controlnet(before)
    return with_values(control=links[-1], control_apply_to_uncond=False)


def left_half(positive: Conditions, negative: Conditions) -> tuple[Conditions, Conditions]:
    """Another prompt for a part of a picture of 16 x 16."""
    import node_helpers

    there = {"area": (16, 8, 0, 0), "strength": 1.0, "set_area_to_bounds": False}
    other = [[words.flip(1) * 8, {"pooled_output": -9 * more["pooled_output"]}] for words, more in positive]
    return positive + node_helpers.conditioning_set_values(other, there), negative
