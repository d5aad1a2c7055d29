# SPDX-License-Identifier: Apache-2.0
"""ControlNets and adapters."""

from __future__ import annotations

from typing import Any

import torch
from inputs import Draw, Size

from diffusers_families.family import NO_WORDS, VIDEO, Family, Inputs, without
from diffusers_families.images import hunyuan_dit, latents, packed, shaped
from diffusers_families.unets import EVEN, motion, sample
from diffusers_families.videos import cosmos_to_world


def hinted(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = sample()(d, batch, size, length)
    return {**given, "controlnet_cond": d.prompt(batch, 3, 2 * size[0], 2 * size[1]), "conditioning_scale": 0.7}


def union(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = sample()(d, batch, size, length)
    kinds = torch.zeros(batch, 6)
    kinds[:, 1] = 1
    hint = [d.prompt(batch, 3, 2 * size[0], 2 * size[1])]
    given["added_cond_kwargs"] = {"text_embeds": d.prompt(batch, 8), "time_ids": 100 * torch.ones(batch, 6)}
    return {**given, "controlnet_cond": hint, "control_type": kinds, "control_type_idx": [1]}


def sd3(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = {**latents()(d, batch, size, length), "pooled_projections": d.prompt(batch, 8)}
    return {**given, "controlnet_cond": d.prompt(batch, 4, *size), "conditioning_scale": 0.7}


def flux(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = {**packed(8)(d, batch, size, length), "pooled_projections": d.prompt(batch, 8)}
    return {**given, "controlnet_cond": d.prompt(*given["hidden_states"].shape), "conditioning_scale": 0.7}


def flux_union(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {**flux(d, batch, size, length), "controlnet_mode": torch.full((batch, 1), 2)}


def qwen(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = shaped(d, batch, size, length)
    return {**given, "controlnet_cond": d.prompt(*given["hidden_states"].shape)}


def sana(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {**latents()(d, batch, size, length), "controlnet_cond": d.prompt(batch, 4, *size)}


def hunyuan(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {**hunyuan_dit(d, batch, size, length), "controlnet_cond": d.prompt(batch, 4, *size)}


def sparse(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    hint = d.prompt(batch, 4, *size)
    seen = torch.zeros(batch, 1, *size)
    seen[:, :, :1] = 1
    return {**motion(d, batch, size, length), "controlnet_cond": hint, "conditioning_mask": seen}


def cosmos(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = cosmos_to_world(d, batch, size, length)
    del given["fps"]
    noise, time = given.pop("hidden_states"), given.pop("timestep") / 1000
    return {**given, "latents": noise, "controls_latents": d.prompt(*noise.shape), "timestep": time}


_CROSS: dict[str, Any] = {"in_channels": 4, "block_out_channels": (16, 32), "norm_num_groups": 4}
_CROSS |= {"cross_attention_dim": 16, "attention_head_dim": 8}
_TYPES = ("CrossAttnDownBlock2D", "DownBlock2D")
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
_C: dict[str, Any] = {"part": "controlnet"}
_FLUX: dict[str, Any] = {**_HEADS, "in_channels": 8, "joint_attention_dim": 16, "pooled_projection_dim": 8}
_FLUX |= {"axes_dims_rope": (4, 6, 6)}

ROWS = [
    Family(
        "control_sd",
        "ControlNetModel",
        hinted,
        {**_CROSS, "down_block_types": _TYPES, "conditioning_embedding_out_channels": (8, 16)},
        depth=("layers_per_block",),
        alike=3,
        **_C,
    ),
    Family(
        "control_union",
        "ControlNetUnionModel",
        union,
        {
            **_CROSS,
            "down_block_types": _TYPES,
            "conditioning_embedding_out_channels": (8, 16),
            "num_trans_channel": 16,
            "num_trans_head": 2,
            "num_proj_channel": 16,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 56,
        },
        depth=("layers_per_block",),
        alike=3,
        **_C,
    ),
    Family(
        "control_sd3",
        "SD3ControlNetModel",
        sd3,
        {
            **_HEADS,
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": 16,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 8,
            "pos_embed_max_size": 16,
        },
        **_C,
    ),
    Family("control_flux", "FluxControlNetModel", flux, _FLUX, depth=("num_layers", "num_single_layers"), **_C),
    Family(
        "control_flux_union",
        "FluxControlNetModel",
        flux_union,
        {**_FLUX, "num_mode": 4},
        depth=("num_layers", "num_single_layers"),
        **_C,
    ),
    Family(
        "control_qwen",
        "QwenImageControlNetModel",
        qwen,
        {**_HEADS, "in_channels": 16, "out_channels": 4, "axes_dims_rope": (8, 4, 4), "joint_attention_dim": 16},
        **_C,
    ),
    Family(
        "control_sana",
        "SanaControlNetModel",
        sana,
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 16,
            "sample_size": 16,
        },
        **_C,
    ),
    Family(
        "control_hunyuan",
        "HunyuanDiT2DControlNetModel",
        hunyuan,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "cross_attention_dim": 8,
            "cross_attention_dim_t5": 8,
            "pooled_projection_dim": 4,
            "hidden_size": 16,
            "text_len": 4,
            "text_len_t5": 6,
            "transformer_num_layers": 4,
        },
        depth=(),
        lengths=NO_WORDS,
        moves=without("length"),
        **_C,
    ),
    Family(
        "control_sparse",
        "SparseControlNetModel",
        sparse,
        {
            **_CROSS,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "motion_num_attention_heads": 2,
        },
        depth=("layers_per_block",),
        sizes=EVEN,
        moves=without("seed"),
        **_C,
    ),
    Family(
        "control_xs",
        "UNetControlNetXSModel",
        hinted,
        {
            "block_out_channels": (16, 32),
            "norm_num_groups": 4,
            "cross_attention_dim": 16,
            "num_attention_heads": 2,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "upcast_attention": False,
            "ctrl_block_out_channels": (8, 16),
            "ctrl_num_attention_heads": 2,
            "ctrl_max_norm_num_groups": 4,
            "ctrl_conditioning_embedding_out_channels": (8, 16),
        },
        depth=(),
        part="unet",
    ),
    Family(
        "control_cosmos",
        "CosmosControlNetModel",
        cosmos,
        {
            **_HEADS,
            "n_controlnet_blocks": 2,
            "in_channels": 6,
            "latent_channels": 6,
            "model_channels": 32,
            "mlp_ratio": 2,
            "text_embed_dim": 16,
            "adaln_lora_dim": 4,
            "max_size": (8, 32, 32),
            "extra_pos_embed_type": None,
            "use_crossattn_projection": False,
        },
        depth=(),
        sizes=VIDEO,
        **_C,
    ),
    Family(
        "t2i_adapter",
        "T2IAdapter",
        lambda d, b, s, n: {"x": d.noise(b, 3, 8 * s[0], 8 * s[1])},
        {"channels": [16, 32], "downscale_factor": 8},
        depth=("num_res_blocks",),
        lengths=NO_WORDS,
        moves=("seed",),
        **_C,
    ),
]
