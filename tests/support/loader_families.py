# SPDX-License-Identifier: Apache-2.0
"""The families that most people run, at tiny sizes, through ComfyUI's own loader, LoRA loader and sampler.

Detection presumes the real widths of some; for those it is told the sizes, and all that follows is ComfyUI's. No test
lives here. ComfyUI must be imported first (the fixture `comfyui` in conftest.py does it).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from backbones import with_weights
from patchers import CONFIG
from quantised import load
from today_models import quantised

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Family:
    """One network. name: its class in comfy.ldm. sizes: what it is made with. found: what detection says besides.

    latent: shape of a latent of `size` for one picture, or of each of its parts. words: width of a prompt's tokens.
    blocks: how names of weights in blocks begin. curves: sets what must not be drawn at random.
    """

    name: str
    sizes: dict[str, Any]
    found: dict[str, Any]
    latent: Callable[[int, int], list[tuple[int, ...]]]
    words: int
    blocks: tuple[str, ...]
    curves: Callable[[Any], None] = lambda module: None
    masked: bool = False  # whether prompts come with a mask

    def weights(self) -> Weights:
        """The state dict of a file that is not quantised."""
        return _weights(self)


@functools.cache
def _weights(family: Family) -> Weights:
    import comfy.memory_management
    import comfy.ops

    module, _, kind = family.name.rpartition(".")
    try:
        found = importlib.import_module(f"comfy.ldm.{module}")
    except ImportError:
        pytest.skip(f"this ComfyUI has no {family.name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.memory_management, "aimdo_enabled", False, raising=False)  # layers would have no weights
        usual = {"device": "cpu", "dtype": torch.float32, "operations": comfy.ops.disable_weight_init}
        made = getattr(found, kind)(**family.sizes, **usual)
    made = with_weights(made, family.name)
    family.curves(made)
    return dict(made.state_dict())


def _image(channels: int) -> Callable[[int, int], list[tuple[int, ...]]]:
    return lambda height, width: [(1, channels, height, width)]


def _video(channels: int, frames: int) -> Callable[[int, int], list[tuple[int, ...]]]:
    return lambda height, width: [(1, channels, frames, height, width)]


def _with_sound(height: int, width: int) -> list[tuple[int, ...]]:
    return [(1, 24, 2, height, width), (1, 32, 2, 6)]


def _video_and_sound(height: int, width: int) -> list[tuple[int, ...]]:
    return [(1, 128, 2, height, width), (1, 8, 6, 16)]


def _frequencies(module: Any) -> None:
    module.rope.inv_freq.copy_(1.0 / 100 ** (torch.arange(8) / 8))


_WAN: dict[str, Any] = {
    **{"model_type": "t2v", "patch_size": (1, 2, 2), "in_dim": 16, "dim": 128, "ffn_dim": 256, "freq_dim": 256},
    **{"text_dim": 4096, "out_dim": 16, "num_heads": 1, "num_layers": 2},
}
_Z_IMAGE: dict[str, Any] = {
    **{"patch_size": 2, "in_channels": 16, "dim": 256, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2},
    **{"qk_norm": True, "cap_feat_dim": 64, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512]},
    **{"rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0, "z_image_modulation": True, "time_scale": 1000.0},
    **{"pad_tokens_multiple": 32},
}
_QWEN: dict[str, Any] = {"in_channels": 64, "num_layers": 2, "num_attention_heads": 1, "joint_attention_dim": 64}
_KREA: dict[str, Any] = {
    **{"features": 256, "heads": 2, "kvheads": 1, "layers": 2, "channels": 16, "patch": 2, "txtlayers": 2},
    **{"txtdim": 64, "tdim": 64, "txtheads": 2, "txtkvheads": 1},
}
_H3: dict[str, Any] = {
    **{"hidden_size": 128, "num_layers": 2, "token_refiner_num_layers": 1, "num_attention_heads": 2},
    **{"attention_head_dim": 64, "ffn_hidden_size": 256, "text_dim": 64, "timestep_input_dim": 16},
    **{"time_embed_hidden_size": 32, "time_embed_dim": 16, "rope_inv_freq_len": 8},
}
_LTX: dict[str, Any] = {"cross_attention_dim": 128, "attention_head_dim": 4, "num_layers": 2, "caption_channels": 64}
_LTX_SOUND: dict[str, Any] = {
    **{"cross_attention_dim": 128, "attention_head_dim": 4, "num_layers": 2, "caption_channels": 64},
    **{"audio_cross_attention_dim": 64, "audio_attention_head_dim": 2, "connector_attention_head_dim": 8},
    **{"connector_num_attention_heads": 2, "connector_num_layers": 1},
}

FAMILIES = {
    "wan": Family(
        "wan.model.WanModel", _WAN, {"image_model": "wan2.1"}, _video(16, 3), 4096, ("blocks.",),
    ),
    "z_image": Family(
        "lumina.model.NextDiT", _Z_IMAGE, {"image_model": "lumina2"}, _image(16), 64,
        ("layers.", "noise_refiner.", "context_refiner."),
    ),
    "qwen_image": Family(
        "qwen_image.model.QwenImageTransformer2DModel", _QWEN, {"image_model": "qwen_image"}, _video(16, 1), 64,
        ("transformer_blocks.",),
    ),
    "krea2": Family("krea2.model.SingleStreamDiT", _KREA, {"image_model": "krea2"}, _video(16, 1), 128, ("blocks.",)),
    "ltx": Family(
        "lightricks.model.LTXVModel", _LTX, {"image_model": "ltxv"}, _video(128, 2), 64, ("transformer_blocks.",),
        masked=True,
    ),
    "h3": Family(
        "minimax.model.MiniMaxH3Model", _H3, {"image_model": "minimax_h3"}, _with_sound, 64, ("blocks.",),
        _frequencies,
    ),
}  # fmt: skip
# for the templates alone (sounding_templates.py)
SOUNDING = {
    "ltx_sound": Family(
        "lightricks.av_model.LTXAVModel", _LTX_SOUND, {"image_model": "ltxav"}, _video_and_sound, 64,
        ("transformer_blocks.",), masked=True,
    ),
}  # fmt: skip
# as files of these families have them: int8 with turned columns, a scale for each row, or one for a weight; fp8 with a
# scale, named as new files and as old ones do, and without any
FORMS = (
    *("int8_convrot", "int8_tensorwise", "int8_one_scale"),
    *("float8_e4m3fn", "float8_e5m2", "scaled_fp8", "unscaled_fp8"),
)


def file_of(family: Family, form: str | None) -> Weights:
    """The state dict of a file whose blocks' matrices have a format, or none."""

    def is_wanted(name: str) -> bool:
        return name.startswith(family.blocks) and "adaln" not in name

    weights = family.weights()
    if form is None:
        return {name: weight.clone() for name, weight in weights.items()}
    if form == "unscaled_fp8":
        return {n: w.to(torch.float8_e4m3fn if is_wanted(n) and w.ndim == 2 else w.dtype) for n, w in weights.items()}
    if form == "scaled_fp8":
        found = quantised(weights, is_wanted, "float8_e4m3fn")
        told = {n.replace(".weight_scale", ".scale_weight"): w for n, w in found.items() if "comfy_quant" not in n}
        return {**told, "scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    return quantised(weights, is_wanted, form)


def loaded(family: Family, form: str | None = None, **options: Any) -> Any:
    """The patcher that ComfyUI's loader makes of such a file."""
    import comfy.model_detection

    file = file_of(family, form)
    with pytest.MonkeyPatch.context() as patch:
        told = {**family.sizes, **family.found}
        patch.setattr(comfy.model_detection, "detect_unet_config", lambda *_, **__: dict(told))
        return load(file, **options)


def lora_file(family: Family, seed: int = 0, rank: Callable[[int], int] = lambda i: 4) -> Weights:
    """A LoRA file on each matrix of the blocks; rank: of the i-th of them."""
    generator = torch.Generator().manual_seed(1000 + seed)
    made: Weights = {}
    names = [n for n, w in family.weights().items() if n.endswith("weight") and w.ndim == 2]
    for i, name in enumerate(n for n in names if n.startswith(family.blocks)):
        (high, wide), size = family.weights()[name].shape, rank(i)
        key = f"diffusion_model.{name.removesuffix('.weight')}"
        made[f"{key}.lora_up.weight"] = 0.5 * torch.randn((high, size), generator=generator) / size**0.5
        made[f"{key}.lora_down.weight"] = torch.randn((size, wide), generator=generator) / wide**0.5
        made[f"{key}.alpha"] = torch.tensor(float(size))
    assert made
    return made


def with_lora(patcher: Any, file: Weights, strength: float = 1.0) -> Any:
    """What the LoRA node makes of a model."""
    import comfy.sd

    return comfy.sd.load_lora_for_models(patcher, None, dict(file), strength, 0.0)[0]


def picture(
    family: Family, patcher: Any, *, seed: int = 0, prompt: int = 0, size: tuple[int, int] = (8, 8), length: int = 16,
    steps: int = 2, cfg: float = 1.0, after: Callable[..., None] | None = None, begun: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:  # fmt: skip
    """The latent of some steps of ComfyUI's sampler, all of its parts in one row. after: called after each step.

    begun: what another model made of the first steps. more: of the sampler's own arguments.
    """
    import comfy.nested_tensor
    import comfy.sample

    generator = torch.Generator().manual_seed(seed)
    noises = [torch.randn(*shape, generator=generator) for shape in family.latent(*size)]
    noise: Any = noises[0] if len(noises) == 1 else comfy.nested_tensor.NestedTensor(noises)
    empty: Any = torch.zeros_like(noises[0])
    if len(noises) > 1:
        empty = comfy.nested_tensor.NestedTensor([torch.zeros_like(one) for one in noises])
    words = torch.Generator().manual_seed(100 + prompt)
    mask = {"attention_mask": torch.ones(1, length, dtype=torch.long)} if family.masked else {}
    given = [[torch.randn(1, length, family.words, generator=words), dict(mask)] for _ in range(2)]
    if begun is not None:
        noise, empty = torch.zeros_like(noise), begun.reshape(noises[0].shape)
    with torch.inference_mode():
        found = comfy.sample.sample(
            patcher, noise, steps, cfg, "euler", "simple", given[:1], given[1:], empty, disable_pbar=True, seed=seed,
            callback=after, **more,
        )  # fmt: skip
        parts = found.unbind() if getattr(found, "is_nested", False) else [found]
        return torch.cat([part.flatten() for part in parts])


__all__ = [
    "CONFIG",
    "FAMILIES",
    "FORMS",
    "SOUNDING",
    "Family",
    "file_of",
    "loaded",
    "lora_file",
    "picture",
    "with_lora",
]
