# SPDX-License-Identifier: Apache-2.0
"""Full-size backbones with random weights, loaded by ComfyUI's own loader and run by its own sampler.

Each is a state dict in the layout of the published checkpoints, so that ComfyUI detects the family from it. Weights are
scaled by fan-in: every input then matters, and an error in any layer shows in the picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

_UNET = {
    "image_size": 32,
    "out_channels": 4,
    "in_channels": 4,
    "use_spatial_transformer": True,
    "legacy": False,
    "model_channels": 320,
    "use_linear_in_transformer": True,
    "num_head_channels": 64,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
}
_SD21 = {
    **_UNET,
    "adm_in_channels": None,
    "num_res_blocks": [2, 2, 2, 2],
    "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "context_dim": 1024,
}
_SDXL = {
    **_UNET,
    "num_classes": "sequential",
    "adm_in_channels": 2816,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "context_dim": 2048,
}
_PIXART = {"input_size": 128, "pe_interpolation": 2, "micro_condition": True}
_FLUX = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "mlp_ratio": 4.0,
    "num_heads": 24,
    "depth": 19,
    "depth_single_blocks": 38,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
_WAN = {
    "model_type": "t2v",
    "patch_size": (1, 2, 2),
    "text_len": 512,
    "in_dim": 16,
    "dim": 1536,
    "ffn_dim": 8960,
    "freq_dim": 256,
    "text_dim": 4096,
    "out_dim": 16,
    "num_heads": 12,
    "num_layers": 30,
    "window_size": (-1, -1),
    "qk_norm": True,
    "cross_attn_norm": True,
    "eps": 1e-6,
}
_SMALL_SD21 = {
    "settings": {
        **{"num_res_blocks": [1, 1], "channel_mult": [1, 1], "transformer_depth": [0, 1]},
        **{"transformer_depth_middle": 1, "transformer_depth_output": [0, 0, 1, 1]},
    },
    "size": (64, 64),
}
_SMALL_FLUX = {
    "settings": {
        **{"hidden_size": 128, "num_heads": 1, "depth": 2, "depth_single_blocks": 2, "context_in_dim": 64},
        **{"vec_in_dim": 32},
    },
    **{"context": (20, 64), "size": (128, 128), "extra": {"pooled_output": ("randn", 32), "guidance": 3.5}},
}
_SMALL_WAN = {
    "settings": {"dim": 128, "ffn_dim": 256, "num_heads": 1, "num_layers": 2},
    **{"context": (20, 4096), "size": (64, 64), "frames": 5},
}


@dataclass(frozen=True)
class Backbone:
    """One row of the tables. `latent` is the shape for height and width in pixels and a number of frames."""

    name: str
    module: str
    cls: str
    settings: dict[str, Any]
    dtype: torch.dtype
    context: tuple[int, int]
    size: tuple[int, int]
    channels: int = 4
    frames: int = 0
    cfg: float = 5.0
    scheduler: str = "normal"
    extra: dict[str, Any] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()  # classes of its blocks, for those who compile them one by one
    own_dtypes: bool = False  # weights that the network has in float32 stay so
    small: dict[str, Any] | None = None  # fields of it at a size for a processor; None where ComfyUI knows no such

    def at_small_size(self) -> Backbone:
        """As few and narrow blocks as ComfyUI's detection accepts, in float32. Raises ValueError where it has none."""
        if self.small is None:
            able = ", ".join(name for name, other in BACKBONES.items() if other.small is not None)
            raise ValueError(
                f"{self.name} has no small size: ComfyUI knows it by its full depth; expected one of {able}"
            )
        changes = {**self.small, "settings": {**self.settings, **self.small["settings"]}}
        return replace(self, **{"name": f"{self.name}, small", "dtype": torch.float32, **changes})

    def latent(self, height: int, width: int) -> torch.Tensor:
        """Zeros of the latent's shape, on the CPU."""
        time = ((self.frames - 1) // 4 + 1,) if self.frames else ()
        return torch.zeros(1, self.channels, *time, height // 8, width // 8)

    def conditioning(self, generator: torch.Generator) -> list[Any]:
        """A ComfyUI CONDITIONING of random values."""
        extra = {
            k: torch.randn(1, v[1], generator=generator) if isinstance(v, tuple) else v for k, v in self.extra.items()
        }
        return [[torch.randn(1, *self.context, generator=generator), extra]]


_OPENAI = "comfy.ldm.modules.diffusionmodules.openaimodel"
BACKBONES = {
    b.name: b
    for b in (
        Backbone(
            "sdxl", _OPENAI, "UNetModel", _SDXL, torch.float16, (77, 2048), (1024, 1024),
            extra={"pooled_output": ("randn", 1280)}, repeated=("BasicTransformerBlock",),
        ),
        Backbone(
            "flux", "comfy.ldm.flux.model", "Flux", _FLUX, torch.bfloat16, (512, 4096), (1024, 1024), channels=16,
            cfg=1.0, scheduler="simple", extra={"pooled_output": ("randn", 768), "guidance": 3.5},
            repeated=("DoubleStreamBlock", "SingleStreamBlock"), small=_SMALL_FLUX,
        ),
        Backbone(
            "pixart", "comfy.ldm.pixart.pixartms", "PixArtMS", _PIXART, torch.bfloat16, (120, 4096), (1024, 1024),
            repeated=("PixArtMSBlock",),
        ),
        Backbone(
            "sd21", _OPENAI, "UNetModel", _SD21, torch.float16, (77, 1024), (768, 768),
            repeated=("BasicTransformerBlock",), small=_SMALL_SD21,
        ),
        Backbone(
            "wan", "comfy.ldm.wan.model", "WanModel", _WAN, torch.bfloat16, (512, 4096), (480, 832), channels=16,
            frames=33, repeated=("WanAttentionBlock",), small=_SMALL_WAN,
        ),
    )
}  # fmt: skip


def network(backbone: Backbone) -> torch.nn.Module:
    """ComfyUI's own network without memory for its weights. ComfyUI must be importable."""
    import importlib

    import comfy.ops

    cls = getattr(importlib.import_module(backbone.module), backbone.cls)
    settings = dict(backbone.settings, dtype=backbone.dtype, device="meta", operations=comfy.ops.disable_weight_init)
    if backbone.cls == "PixArtMS":  # it reads values of its position table while it is built
        return cls(**settings)
    with torch.device("meta"):
        return cls(**settings)


def state_dict(backbone: Backbone, device: torch.device, keep: torch.device | None = None) -> dict[str, torch.Tensor]:
    """Random weights (seed 0) in the backbone's dtype, drawn on `device` and kept there or on `keep`.

    A processor takes minutes to draw what a GPU draws in a second, and draws other numbers.
    """
    keep = keep or device
    return {name: one.to(keep) for name, one in drawn(backbone, device)}


def drawn(backbone: Backbone, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of `state_dict` one after another, on `device`."""
    like = network(backbone).state_dict()
    torch.manual_seed(0)
    for name, one in like.items():
        yield name, _random(name, one, one.dtype if backbone.own_dtypes else backbone.dtype, device)


def _random(name: str, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if name.endswith(("norm.weight", "scale")) or (".norm" in name and name.endswith("weight") and like.ndim == 1):
        return torch.ones(like.shape, device=device, dtype=dtype)
    if name.endswith("inv_freq"):
        return 10000 ** -(torch.arange(len(like), device=device, dtype=dtype) / len(like))
    scale = 0.02 if like.ndim <= 1 else 1.0 / math.sqrt(like[0].numel())
    return torch.randn(like.shape, device=device, dtype=dtype) * scale
