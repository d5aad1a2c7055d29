# SPDX-License-Identifier: Apache-2.0
"""Small models of the kinds that most people run now, with weights as their files have them. No test lives here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from backbones import with_weights
from torch import nn

Call = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


def quantised(weights: dict[str, torch.Tensor], is_wanted: Callable[[str], bool], form: str) -> dict[str, torch.Tensor]:
    """The state dict of a file in which the matrices of these names have a format of ComfyUI's.

    form: one of its names, or `int8_convrot`, which turns groups of columns before it quantises them, or
    `int8_one_scale`, which has one for a weight and not one for each row.
    """
    import comfy.quant_ops as quant

    rows = form != "int8_one_scale"
    convrot, form = form == "int8_convrot", "int8_tensorwise" if form.startswith("int8") else form
    if form not in quant.QUANT_ALGOS:
        pytest.skip(f"this ComfyUI has no {form}")
    layout, found = quant.QUANT_ALGOS[form]["comfy_tensor_layout"], {}
    for name, weight in weights.items():
        found[name] = weight.clone()
        if not (name.endswith("weight") and weight.ndim == 2 and is_wanted(name)):
            continue
        asked: dict[str, Any] = {"per_channel": rows} if form == "int8_tensorwise" else {"scale": "recalculate"}
        words: dict[str, Any] = {"format": form}
        if convrot:
            group = next(size for size in (256, 64, 16, 4) if weight.shape[1] % size == 0)
            turned = {"convrot": True, "convrot_groupsize": group}
            asked, words = asked | turned, words | turned
        del found[name]
        found |= quant.QuantizedTensor.from_float(weight.clone(), layout, **asked).state_dict(name)
        found[name.removesuffix("weight") + "comfy_quant"] = torch.tensor(list(json.dumps(words).encode())).byte()
    return found


@contextmanager
def quantised_layers() -> Iterator[Any]:
    """The operations that ComfyUI's loader builds a network of for a quantised file."""
    import comfy.ops

    yield comfy.ops.mixed_precision_ops({}, torch.float32)


def wan_weights() -> dict[str, torch.Tensor]:
    """A Wan of two blocks, as small as ComfyUI's loader knows one."""
    import comfy.ops
    from comfy.ldm.wan.model import WanModel

    sizes = {"in_dim": 16, "dim": 128, "ffn_dim": 256, "freq_dim": 256, "text_dim": 4096, "out_dim": 16}
    layers = {"num_heads": 1, "num_layers": 2, "device": "cpu", "dtype": torch.float32}
    made = WanModel(model_type="t2v", patch_size=(1, 2, 2), **sizes, **layers, operations=comfy.ops.disable_weight_init)
    return dict(with_weights(made, "wan of today").state_dict())


def h3(form: str | None = None) -> nn.Module:
    """A MiniMax-H3 of two blocks, plain or with its blocks' matrices in a format."""
    module = pytest.importorskip("comfy.ldm.minimax.model", reason="this ComfyUI has no MiniMax-H3")
    import comfy.ops

    sizes = {"hidden_size": 64, "num_layers": 2, "token_refiner_num_layers": 1, "num_attention_heads": 2}
    heads = {"attention_head_dim": 64, "ffn_hidden_size": 128, "latents_dim": 4, "audio_latents_dim": 8, "text_dim": 32}
    times = {"timestep_input_dim": 16, "time_embed_hidden_size": 32, "time_embed_dim": 16, "rope_inv_freq_len": 8}
    common = {"dtype": torch.float32, "device": "cpu"}

    def built(operations: Any) -> nn.Module:
        made = module.MiniMaxH3Model(**sizes, **heads, **times, **common, operations=operations)
        with_weights(made, "h3 of today")
        made.rope.inv_freq.copy_(1.0 / 100 ** (torch.arange(8) / 8))
        return made.eval().requires_grad_(False)

    plain = built(comfy.ops.disable_weight_init)
    if form is None:
        return plain
    weights = quantised(plain.state_dict(), lambda name: "blocks." in name and "adaln" not in name, form)
    with quantised_layers() as operations:
        made = built(operations)
    made.load_state_dict(weights, strict=False)
    return made


def h3_call(
    *,
    seed: int = 0,
    frames: int = 2,
    size: tuple[int, int] = (8, 8),
    sound: int = 6,
    length: int = 12,
    sigma: float = 0.6,
    keyframe: bool = False,
    mask: Callable[[int, int, int], torch.Tensor] | None = None,
) -> Call:
    """A step of a video with sound: at sigma 1 both have one time, below it each has its own."""
    from comfy.ldm.minimax.model import PackedLayout

    height, width = size
    rounded = (height + 1) // 2 * 2, (width + 1) // 2 * 2

    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        latents = [drawn(1, 4, frames, height, width), drawn(1, 8, 2, sound)]
        prompt = drawn(1, length, 32)
        payload: dict[str, Any] = {"seed": 3, "audio_scale": 1.0}
        if keyframe:
            first = {"latent": drawn(1, 4, 1, *rounded), "audio_latent": None, "resolved_frame_index": 0}
            payload |= {"keyframes": [first], "cond_video_latents": [first["latent"]], "cond_audio_latents": []}
        payload["layout"] = PackedLayout(length, frames, *rounded, sound, keyframes=payload.get("keyframes"), refs=None)
        sigmas = torch.linspace(1, 0, 5)
        options = {
            **{"wrappers": {}, "callbacks": {}, "cond_or_uncond": [0], "uuids": [object()]},
            **{"sample_sigmas": sigmas, "sigmas": sigmas[:1], "prefetch_dynamic_vbars": False},
        }
        given: dict[str, Any] = {"transformer_options": options, "minimax_payload": payload}
        if mask is not None:
            given["denoise_mask"] = mask(frames, height, width)
        return (latents, torch.tensor([sigma * 1000.0]), prompt), given

    return make
