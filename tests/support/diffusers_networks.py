# SPDX-License-Identifier: Apache-2.0
"""diffusers' network classes at tiny sizes: each function gives one of so many blocks, `*_call` its arguments."""

from __future__ import annotations

import torch
from inputs import Call, Draw, Size
from torch import nn


def unet(depth: int) -> nn.Module:
    """Every kind of block in few shapes: both levels are equally wide."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        **{"sample_size": 16, "in_channels": 4, "out_channels": 4, "block_out_channels": (32, 32)},
        **{"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "norm_num_groups": 8},
        **{"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "layers_per_block": depth + 1},
        **{"cross_attention_dim": 16, "attention_head_dim": 2},
    )


def any_call(d: Draw, batch: int, size: Size, length: int, *, channels: int = 4) -> Call:
    return (), {
        **{"timestep": d.time(batch, 1000.0), "return_dict": False},
        **{"hidden_states": d.noise(batch, channels, *size), "encoder_hidden_states": d.prompt(batch, length, 16)},
    }


def unet_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    context = d.prompt(batch, length, 16)
    return (d.noise(batch, 4, *size), d.time(batch, 1000.0)[0], context), {"return_dict": False}


def pixart(depth: int) -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        **{"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8},
        **{"num_layers": depth, "cross_attention_dim": 32, "sample_size": 16, "patch_size": 2},
        **{"caption_channels": 16, "use_additional_conditions": False},
    )


def pixart_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    _, kwargs = any_call(d, batch, size, length)
    added = {"resolution": None, "aspect_ratio": None}
    mask = torch.ones(batch, length)
    mask[:, -3:] = 0  # as a tokenizer leaves it: the end of the prompt is padding
    return (), {**kwargs, "added_cond_kwargs": added, "encoder_attention_mask": mask}


def sd3(depth: int) -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        **{"sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": depth},
        **{"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16},
        **{"caption_projection_dim": 32, "pooled_projection_dim": 8, "pos_embed_max_size": 16},
    )


def sd3_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    _, kwargs = any_call(d, batch, size, length)
    return (), {**kwargs, "pooled_projections": d.prompt(batch, 8)}


def flux(depth: int) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        **{"patch_size": 1, "in_channels": 16, "num_layers": depth, "num_single_layers": depth},
        **{"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16},
        **{"pooled_projection_dim": 8, "guidance_embeds": True, "axes_dims_rope": (4, 6, 6)},
    )


def flux_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    height, width = size[0] // 2, size[1] // 2
    ids = torch.zeros(height, width, 3)
    ids[..., 1] += torch.arange(height)[:, None]
    ids[..., 2] += torch.arange(width)[None]
    return (), {
        **{"hidden_states": d.noise(batch, height * width, 16), "timestep": d.time(batch, 1.0)},
        **{"encoder_hidden_states": d.prompt(batch, length, 16), "pooled_projections": d.prompt(batch, 8)},
        **{"img_ids": ids.flatten(0, 1), "txt_ids": torch.zeros(length, 3), "return_dict": False},
        "guidance": torch.full((batch,), 3.5),
    }


def latte(depth: int) -> nn.Module:
    from diffusers import LatteTransformer3DModel

    return LatteTransformer3DModel(
        **{"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8},
        **{"num_layers": depth, "cross_attention_dim": 32, "attention_bias": True, "sample_size": 8},
        **{"patch_size": 2, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000},
        **{"norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6},
        **{"caption_channels": 16, "video_length": 4},
    )


def lora(unet: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """A LoRA file of rank 4 on every projection of a U-Net's attention, for `load_lora_weights`."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for name, layer in unet.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(("to_q", "to_k", "to_v", "to_out.0")):
            found[f"unet.{name}.lora_A.weight"] = torch.randn(4, layer.in_features, generator=draw) / 4
            found[f"unet.{name}.lora_B.weight"] = torch.randn(layer.out_features, 4, generator=draw) * 0.3
    return found
