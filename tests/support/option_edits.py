# SPDX-License-Identifier: Apache-2.0
"""What users and other packs add to a ComfyUI call: patches, replacements, attention overrides, ControlNets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from inputs import Draw, Size
from torch.nn import functional as F  # noqa: N812

Edit = Callable[[dict[str, Any]], None]
Control = Callable[[Draw, int, Size], dict[str, list[torch.Tensor]]]


def override(options: dict[str, Any]) -> None:
    """Another attention for every block, as attention nodes install it."""

    def attention(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs).flip(1)  # scaling it would be lost in a norm that follows

    options["optimized_attention_override"] = attention


def replaced(*key: Any) -> Edit:
    """A block replacement of the kind that skips or repeats blocks: it calls the original and changes its result."""

    def edit(options: dict[str, Any]) -> None:
        def replace(args: dict[str, Any], extra: dict[str, Any]) -> Any:
            out = extra["original_block"](args)
            return {**out, "img": out["img"] * 1.5}

        options["patches_replace"] = {"dit": {key: replace}}

    return edit


def patched(name: str, patch: Callable[..., Any]) -> Edit:
    """One patch of a kind."""
    return lambda options: options.update(patches={name: [patch]})


def _attention_replaced(name: str) -> Edit:
    """What IPAdapter does: the attention of one block computed by somebody else."""

    def edit(options: dict[str, Any]) -> None:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            heads = extra["n_heads"]
            q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, scale=0.05).transpose(1, 2).flatten(2)

        options["patches_replace"] = {name: {("input", 1): attend}}

    return edit


UNET: dict[str, Edit] = {
    "override": override,
    "attn1_patch": patched("attn1_patch", lambda n, context, value, extra: (n, context, value * 1.5)),
    "attn2_patch": patched("attn2_patch", lambda n, context, value, extra: (n, context * 0.5, value * 2.0)),
    "attn1_output_patch": patched("attn1_output_patch", lambda n, extra: n * 1.5),
    "middle_patch": patched("middle_patch", lambda n, extra: n * 1.2),
    "attn2_replace": _attention_replaced("attn2"),
    "output_block_patch": patched("output_block_patch", lambda h, skip, options: (h * 1.3, skip)),
}


def double(out: dict[str, Any]) -> dict[str, Any]:
    """What a patch that is called with all streams gives back."""
    return {**out, "img": out["img"] * 1.5}


def flux_attention_patch(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """As Flux calls its attn1_patch."""
    return {"q": q, "k": k, "v": v * 1.5}


_JOINT: dict[str, Edit] = {"override": override, "block_replace": replaced("double_block", 0)}
_AFTER_A_BLOCK = {"double_block": patched("double_block", double)}
TORCH_DIT = {**_JOINT, "attn1_patch": patched("attn1_patch", lambda q, k, v, extra: (q, k, v * 1.5))}
FLUX = {
    **_JOINT,
    "single_replace": replaced("single_block", 0),
    "attn1_patch": patched("attn1_patch", flux_attention_patch),
    "post_input": patched("post_input", double),
}
WAN = {
    **_JOINT,
    **_AFTER_A_BLOCK,
    "attn1_patch": patched("attn1_patch", lambda args: args["x"] * 1.5),
    "attn2_patch": patched("attn2_patch", lambda args: args["x"] * 1.2),
}
QWEN = {**_JOINT, **_AFTER_A_BLOCK}
LUMINA: dict[str, Edit] = {"override": override, **_AFTER_A_BLOCK}
SD3 = _JOINT


# ---- what a ControlNet hands over ------------------------------------------------------------------------------------


def unet_control(d: Draw, batch: int, size: Size) -> dict[str, list[torch.Tensor]]:
    """For the middle and some of the skips; the network takes them out of its lists."""
    return {"middle": [d.noise(batch, 1, 1, 1)], "output": [d.noise(batch, 1, 1, 1) for _ in range(3)]}


def token_control(*names: str, width: int = 32) -> Callable[[Draw, int, Size], dict[str, list[torch.Tensor]]]:
    """One tensor for the first block of each kind, as large as the image tokens."""

    def control(d: Draw, batch: int, size: Size) -> dict[str, list[torch.Tensor]]:
        tokens = math.prod((side + 1) // 2 for side in size)
        return {name: [d.noise(batch, tokens, width)] for name in names}

    return control
