# SPDX-License-Identifier: Apache-2.0
"""What the tables of ComfyUI's tiny families are made of: their networks, their calls, shared settings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from backbones import Backbone
from inputs import Call, Draw, Size, latent_call
from torch import nn

Extra = Callable[[Draw, int, Size, int], Any]

VIDEO = ((3, 8, 8), (3, 8, 12), (5, 12, 8), (2, 10, 14))

IMAGE = ((16, 16), (16, 24), (24, 16), (20, 28))


def depth(blocks: int) -> int:
    """Stands in a row's settings for the number of blocks."""
    return blocks


def made(name: str, **settings: Any) -> Callable[[int], nn.Module]:
    """The named class of comfy.ldm; settings that are functions are asked with the number of blocks."""

    def build(blocks: int) -> nn.Module:
        import comfy.ops

        module, _, kind = name.rpartition(".")
        given = {key: value(blocks) if callable(value) else value for key, value in settings.items()}
        usual = {"device": "cpu", "dtype": torch.float32, "operations": comfy.ops.disable_weight_init}
        return getattr(importlib.import_module(f"comfy.ldm.{module}"), kind)(**{**usual, **given})

    return build


def called(greatest: float = 1.0, channels: int = 4, **extra: Extra) -> Callable[[Draw, int, Size, int], Call]:
    """Calls with noise, time and context, and what else a family takes."""

    def call(d: Draw, batch: int, size: Size, length: int) -> Call:
        args, kwargs = latent_call(d, batch, size, length, greatest=greatest, channels=channels)
        return args, {**kwargs, **{name: make(d, batch, size, length) for name, make in extra.items()}}

    return call


def same(value: Any) -> Extra:
    """An argument that is always the same."""
    return lambda d, batch, size, length: value


def pooled(*shape: int) -> Extra:
    """What depends on the prompt and not on its length."""
    return lambda d, batch, size, length: d.prompt(batch, *shape)


def each(*values: float) -> Extra:
    """The same numbers for each row."""
    return lambda d, batch, size, length: torch.tensor(values).repeat(batch, *[1] * (len(values) > 1))


def mask(d: Draw, batch: int, size: Size, length: int) -> torch.Tensor:
    """A prompt's mask that ends at another token in each row."""
    return (torch.arange(length) < length - 1 - torch.arange(batch)[:, None]).long()


_FLUX: dict[str, Any] = {
    **{"in_channels": 4, "out_channels": 4, "vec_in_dim": 8, "context_in_dim": 16, "hidden_size": 32},
    **{"mlp_ratio": 4.0, "num_heads": 2, "axes_dim": [4, 6, 6], "depth": depth, "depth_single_blocks": depth},
    **{"theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": False, "txt_ids_dims": []},
}

_CHROMA = {key: value for key, value in _FLUX.items() if key != "guidance_embed"}

_CHROMA |= {"in_dim": 64, "out_dim": 32, "hidden_dim": 16, "n_layers": 2, "in_channels": 16, "out_channels": 16}

_HUNYUAN_VIDEO: dict[str, Any] = {
    **{**_FLUX, "patch_size": [1, 2, 2], "theta": 256, "guidance_embed": True, "byt5": False, "meanflow": False},
    **{"use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False},
}

del _HUNYUAN_VIDEO["txt_ids_dims"]


def image(name: str, build: Any, call: Any, **more: Any) -> Backbone:
    return Backbone(name, "comfy", build, call, **{"sizes": IMAGE, **more})


def video(name: str, build: Any, call: Any, **more: Any) -> Backbone:
    return Backbone(name, "comfy", build, call, **{"sizes": VIDEO, "lengths": (48, 20, 77), **more})


_Z = {
    "dim": 256,
    "axes_dims": [32, 48, 48],
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
