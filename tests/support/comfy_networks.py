# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's network classes at tiny sizes: each function gives one of so many blocks, `*_call` its arguments.

ComfyUI must have been imported before one is made (the fixture `comfyui` in conftest.py does it).
"""

from __future__ import annotations

from typing import Any

import torch
from inputs import Call, Draw, Size, latent_call
from torch import nn


def _settings() -> dict[str, Any]:
    import comfy.ops

    return {"device": "cpu", "dtype": torch.float32, "operations": comfy.ops.disable_weight_init}


def unet(depth: int, **settings: Any) -> nn.Module:
    """Every kind of block in few shapes: both levels are equally wide. settings: what is not as usual.

    Twice as wide as norms have groups, or they would take the time of the step out again.
    """
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    usual: dict[str, Any] = {
        **{**_settings(), "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 64},
        **{"num_res_blocks": [depth, depth], "channel_mult": [1, 1], "num_heads": 2, "context_dim": 16},
        **{"transformer_depth": [1] * 2 * depth, "transformer_depth_output": [1] * 2 * (depth + 1)},
        **{"transformer_depth_middle": 1, "use_spatial_transformer": True, "use_linear_in_transformer": False},
        "legacy": False,
    }
    return UNetModel(**{**usual, **settings})


def flux(depth: int, **settings: Any) -> nn.Module:
    """settings: device, dtype, operations, if not the usual."""
    from comfy.ldm.flux.model import Flux

    return Flux(
        **{**_settings(), **settings, "image_model": "flux", "in_channels": 4, "out_channels": 4, "vec_in_dim": 8},
        **{"context_in_dim": 16, "hidden_size": 32, "mlp_ratio": 4.0, "num_heads": 2, "axes_dim": [4, 6, 6]},
        **{"depth": depth, "depth_single_blocks": depth, "theta": 10000, "patch_size": 2, "qkv_bias": True},
        **{"guidance_embed": True, "txt_ids_dims": []},
    )


def flux_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    args, kwargs = latent_call(d, batch, size, length, greatest=1.0)
    return args, {**kwargs, "y": d.prompt(batch, 8), "guidance": torch.full((batch,), 3.5)}


def wan(depth: int) -> nn.Module:
    from comfy.ldm.wan.model import WanModel

    return WanModel(
        **{**_settings(), "model_type": "t2v", "patch_size": (1, 2, 2), "in_dim": 4, "dim": 32},
        **{"ffn_dim": 64, "freq_dim": 16, "text_dim": 16, "out_dim": 4, "num_heads": 2, "num_layers": depth},
    )


def qwen(depth: int) -> nn.Module:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        **{**_settings(), "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": depth},
        **{"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16},
        **{"pooled_projection_dim": 8, "axes_dims_rope": (4, 6, 6)},
    )


def qwen_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    return latent_call(d, batch, (1, *size), length, greatest=1.0)


def lumina(depth: int) -> nn.Module:
    from comfy.ldm.lumina.model import NextDiT

    return NextDiT(
        **{**_settings(), "patch_size": 2, "in_channels": 4, "dim": 32, "n_layers": depth},
        **{"n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [4, 6, 6], "cap_feat_dim": 16},
        **{"axes_lens": [300, 64, 64], "norm_eps": 1e-5, "qk_norm": True},
    )


def lumina_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    args, kwargs = latent_call(d, batch, size, length, greatest=1.0)
    return args, {**kwargs, "num_tokens": length}


def pixart(depth: int) -> nn.Module:
    from comfy.ldm.pixart.pixartms import PixArtMS

    return PixArtMS(
        **{**_settings(), "input_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 48},
        **{"depth": depth, "num_heads": 2, "pred_sigma": True, "caption_channels": 16},
        **{"micro_condition": False, "model_max_length": 12},
    )


def sd3(depth: int) -> nn.Module:
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    return OpenAISignatureMMDITWrapper(
        **{**_settings(), "input_size": None, "patch_size": 2, "in_channels": 4, "adm_in_channels": 8},
        # here "depth" is the width; the number of blocks has another name
        **{"depth": 2, "num_blocks": depth, "pos_embed_scaling_factor": None, "pos_embed_max_size": 16},
        context_embedder_config={
            "target": "torch.nn.Linear",
            "params": {"in_features": 16, "out_features": 128},
        },
    )


def sd3_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    args, kwargs = latent_call(d, batch, size, length, greatest=1000.0)
    return args, {**kwargs, "y": d.prompt(batch, 8)}
