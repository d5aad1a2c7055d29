# SPDX-License-Identifier: Apache-2.0
"""UNets of pictures, videos and sound."""

from __future__ import annotations

from typing import Any

import torch
from inputs import Draw, Size

from diffusers_families.family import NO_WORDS, SOUND, Family, Give, Inputs, mask, without

EVEN = ((4, 8, 8), (4, 8, 16), (3, 16, 8), (5, 16, 16))  # sides that can be halved to the end


def sample(channels: int = 4, *, worded: bool = True, frames_first: bool = False, one_time: bool = True) -> Give:
    """A picture, a video or sound, its time and its prompt."""

    def give(d: Draw, batch: int, size: Size, length: int) -> Inputs:
        shape = (size[0], channels, *size[1:]) if frames_first else (channels, *size)
        times = d.time(batch, 1000.0)
        given = {"sample": d.noise(batch, *shape), "timestep": times[0] if one_time else times, "return_dict": False}
        return {**given, "encoder_hidden_states": d.prompt(batch, length, 16)} if worded else given

    return give


def xl(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    added = {"text_embeds": d.prompt(batch, 8), "time_ids": 100 * torch.ones(batch, 6)}
    return {**sample()(d, batch, size, length), "added_cond_kwargs": added, "timestep_cond": None}


def masked(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {**sample(one_time=False)(d, batch, size, length), "encoder_attention_mask": mask(batch, length)}


def motion(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    prompt = d.prompt(batch, length, 16).repeat_interleave(size[0], dim=0)
    return {**sample(worded=False)(d, batch, size, length), "encoder_hidden_states": prompt}


def spatio_temporal(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = sample(8, frames_first=True)(d, batch, size, 1)
    return {**given, "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]]).repeat(batch, 1)}


def i2vgen(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = sample()(d, batch, size, length)
    more = {"image_latents": d.prompt(batch, 4, *size), "image_embeddings": d.prompt(batch, 16)}
    return {**given, **more, "fps": torch.full((batch,), 16)}


def cascade(*, decodes: bool) -> Give:
    def give(d: Draw, batch: int, size: Size, length: int) -> Inputs:
        given = {"sample": d.noise(batch, 4, *size), "timestep_ratio": d.time(batch, 1.0), "return_dict": False}
        given["clip_text_pooled"] = d.prompt(batch, 1, 8)
        if decodes:
            return {**given, "effnet": d.prompt(batch, 4, size[0] // 4, size[1] // 4)}
        return {**given, "clip_text": d.prompt(batch, length, 8), "clip_img": d.prompt(batch, 1, 8)}

    return give


_U: dict[str, Any] = {"part": "unet", "depth": ("layers_per_block",)}
_TWO: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "block_out_channels": (16, 32), "norm_num_groups": 4}
_CROSS: dict[str, Any] = {**_TWO, "cross_attention_dim": 16}
_LONG: dict[str, Any] = {"lengths": NO_WORDS, "moves": without("length", "prompt")}
_CASCADE: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 8}
_CASCADE |= {"conditioning_dim": 16, "block_out_channels": (16, 32), "num_attention_heads": (2, 2), "clip_seq": 2}
_CASCADE |= {"down_num_layers_per_block": (2, 2), "up_num_layers_per_block": (2, 2), "clip_text_pooled_in_channels": 8}

ROWS = [
    Family(
        "unet_1d",
        "UNet1DModel",
        sample(worded=False),
        {
            "block_out_channels": (8, 16, 16),
            "in_channels": 4,
            "out_channels": 4,
            "extra_in_channels": 0,
            "time_embedding_type": "positional",
            "use_timestep_embedding": True,
            "flip_sin_to_cos": False,
            "freq_shift": 1.0,
            "out_block_type": "OutConv1DBlock",
            "mid_block_type": "MidResTemporalBlock1D",
            "act_fn": "swish",
            "down_block_types": ("DownResnetBlock1D",) * 3,
            "up_block_types": ("UpResnetBlock1D",) * 2,
        },
        sizes=SOUND,
        **_LONG,
        **_U,
    ),
    Family(
        "unet_1d_dance",
        "UNet1DModel",
        sample(worded=False),
        {
            "block_out_channels": (32, 32, 64),
            "in_channels": 4,
            "out_channels": 4,
            "extra_in_channels": 64,
            "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
            "up_block_types": ("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
            "mid_block_type": "UNetMidBlock1D",
        },
        sizes=((64,), (128,), (96,)),
        depth=(),
        part="unet",
        **_LONG,
    ),
    Family(
        "unet_2d",
        "UNet2DModel",
        sample(worded=False),
        {
            **_TWO,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
            "sample_size": 16,
        },
        **_LONG,
        **_U,
    ),
    Family(
        "ncsnpp",
        "UNet2DModel",
        sample(3, worded=False),
        {
            "block_out_channels": [32, 64, 64],
            "in_channels": 3,
            "out_channels": 3,
            "time_embedding_type": "fourier",
            "norm_eps": 1e-6,
            "mid_block_scale_factor": 2**0.5,
            "norm_num_groups": None,
            "down_block_types": ["SkipDownBlock2D", "AttnSkipDownBlock2D", "SkipDownBlock2D"],
            "up_block_types": ["SkipUpBlock2D", "AttnSkipUpBlock2D", "SkipUpBlock2D"],
        },
        **_LONG,
        **_U,
    ),
    Family(
        "unet_xl",
        "UNet2DConditionModel",
        xl,
        {
            **_CROSS,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "use_linear_projection": True,
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2),
            "attention_head_dim": (2, 4),
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 56,
        },
        **_U,
    ),
    Family(
        "unet_if",
        "UNet2DConditionModel",
        sample(one_time=False),
        {
            **_TWO,
            "cross_attention_dim": 32,
            "act_fn": "gelu",
            "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            "attention_head_dim": 8,
            "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
            "resnet_time_scale_shift": "scale_shift",
            "encoder_hid_dim": 16,
            "addition_embed_type": "text",
            "addition_embed_type_num_heads": 2,
            "cross_attention_norm": "group_norm",
        },
        **_U,
    ),
    Family(
        "unet_3d",
        "UNet3DConditionModel",
        sample(),
        {
            **_CROSS,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "attention_head_dim": 8,
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        sizes=EVEN,
        **_U,
    ),
    Family(
        "unet_motion",
        "UNetMotionModel",
        motion,
        {
            **_CROSS,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "num_attention_heads": 2,
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
            "motion_num_attention_heads": 2,
        },
        sizes=EVEN,
        **_U,
    ),
    Family(
        "unet_svd",
        "UNetSpatioTemporalConditionModel",
        spatio_temporal,
        {
            "block_out_channels": (32, 64),
            "in_channels": 8,
            "cross_attention_dim": 16,
            "num_attention_heads": (2, 4),
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "projection_class_embeddings_input_dim": 24,
            "addition_time_embed_dim": 8,
        },
        sizes=EVEN,
        lengths=NO_WORDS,
        moves=without("length"),
        **_U,
    ),
    Family(
        "i2vgen",
        "I2VGenXLUNet",
        i2vgen,
        {
            **_CROSS,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "attention_head_dim": 8,
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        sizes=((4, 32, 32), (4, 32, 64), (3, 64, 32)),
        **_U,
    ),
    Family(
        "kandinsky3",
        "Kandinsky3UNet",
        masked,
        {
            "time_embedding_dim": 16,
            "groups": 4,
            "attention_head_dim": 8,
            "block_out_channels": (16, 32),
            "cross_attention_dim": 16,
            "encoder_hid_dim": 16,
        },
        **_U,
    ),
    Family(
        "cascade_prior",
        "StableCascadeUNet",
        cascade(decodes=False),
        {**_CASCADE, "clip_text_in_channels": 8, "clip_image_in_channels": 8},
        depth=(),
        part="prior",
    ),
    Family(
        "cascade_decoder",
        "StableCascadeUNet",
        cascade(decodes=True),
        {**_CASCADE, "effnet_in_channels": 4, "patch_size": 2},
        depth=(),
        part="decoder",
        lengths=NO_WORDS,
        moves=without("length"),
    ),
    Family(
        "dreamlite",
        "DreamLiteUNetModel",
        sample(),
        {**_CROSS, "block_out_channels": (16, 32, 32), "attention_head_dim": 8, "layers_per_block": 2},
        part="unet",
        depth=(),
    ),
]
