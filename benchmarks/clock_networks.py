# SPDX-License-Identifier: Apache-2.0
"""Networks of the workloads in `clock_workloads.py`, at their published sizes.

LTX-2.3 and MiniMax-H3 are as their published files say: LTX-2.3 in its header, MiniMax-H3 by its shapes. H3 is the
pruned file, which has a table of eight numbers for each of 1025 times in the place of an embedding of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .backbones import BACKBONES, Backbone

_HALF = torch.bfloat16
_ZIMAGE = {
    "patch_size": 2, "in_channels": 16, "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30,
    "n_kv_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512], "rope_theta": 256.0,
    "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0, "qk_norm": True,
    "cap_feat_dim": 2560, "pad_tokens_multiple": 32,
}  # fmt: skip
_KLEIN = {
    "image_model": "flux2", "in_channels": 128, "out_channels": 128, "context_in_dim": 12288, "hidden_size": 4096,
    "num_heads": 32, "mlp_ratio": 3.0, "depth": 8, "depth_single_blocks": 24, "axes_dim": [32] * 4, "theta": 2000,
    "patch_size": 1, "qkv_bias": False, "guidance_embed": False, "global_modulation": True, "mlp_silu_act": True,
    "ops_bias": False, "default_ref_method": "index", "ref_index_scale": 10.0, "txt_ids_dims": [3],
    "vec_in_dim": None,
}  # fmt: skip
_KREA = {
    "image_model": "krea2", "features": 6144, "heads": 48, "kvheads": 12, "layers": 28, "channels": 16, "patch": 2,
    "txtlayers": 12, "txtdim": 2560,
}  # fmt: skip
_QWEN = {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60}
_WAN = {**BACKBONES["wan"].settings, "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40}
_LTX = {
    "num_layers": 48, "num_attention_heads": 32, "attention_head_dim": 128, "cross_attention_dim": 4096,
    "audio_num_attention_heads": 32, "audio_attention_head_dim": 64, "audio_cross_attention_dim": 2048,
    "caption_channels": 3840, "apply_gated_attention": True, "cross_attention_adaln": True,
    "caption_proj_before_connector": True, "caption_projection_first_linear": False,
    "connector_num_layers": 8, "connector_num_attention_heads": 32, "connector_attention_head_dim": 128,
    "audio_connector_num_attention_heads": 32, "audio_connector_attention_head_dim": 64,
    "connector_apply_gated_attention": True, "causal_temporal_positioning": True, "use_middle_indices_grid": True,
    "av_ca_timestep_scale_multiplier": 1000.0, "rope_type": "split", "frequencies_precision": "float64",
}  # fmt: skip
_H3 = {"adaln_curve_grid": 1025, "time_embed_dim": 8}
_TAGS = {"minimax_token_tags": torch.ones(128, dtype=torch.long)}  # of words, as its text encoder gives them
LTX_VAE = {
    "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "patch_size": 4, "norm_layer": "pixel_norm",
    "latent_log_var": "uniform", "spatial_padding_mode": "zeros", "timestep_conditioning": False,
    "causal_decoder": False,
    "encoder_blocks": [
        ["res_x", {"num_layers": 4}], ["compress_space_res", {"multiplier": 2}],
        ["res_x", {"num_layers": 6}], ["compress_time_res", {"multiplier": 2}],
        ["res_x", {"num_layers": 4}], ["compress_all_res", {"multiplier": 2}],
        ["res_x", {"num_layers": 2}], ["compress_all_res", {"multiplier": 1}],
        ["res_x", {"num_layers": 2}],
    ],
    "decoder_blocks": [
        ["res_x", {"num_layers": 4}], ["compress_space", {"multiplier": 2}],
        ["res_x", {"num_layers": 6}], ["compress_time", {"multiplier": 2}],
        ["res_x", {"num_layers": 4}], ["compress_all", {"multiplier": 1}],
        ["res_x", {"num_layers": 2}], ["compress_all", {"multiplier": 2}],
        ["res_x", {"num_layers": 2}],
    ],
}  # fmt: skip
_SIMPLE: Mapping[str, Any] = {"channels": 16, "cfg": 1.0, "scheduler": "simple"}
NETWORKS = {
    one.name: one
    for one in (
        Backbone("zimage", "comfy.ldm.lumina.model", "NextDiT", _ZIMAGE, _HALF, (128, 2560), (1024, 1024), **_SIMPLE),
        Backbone(
            "qwen", "comfy.ldm.qwen_image.model", "QwenImageTransformer2DModel", _QWEN, _HALF, (256, 3584),
            (1024, 1024), **{**_SIMPLE, "cfg": 4.0},
        ),
        Backbone(
            "qwen-edit", "comfy.ldm.qwen_image.model", "QwenImageTransformer2DModel", _QWEN, _HALF, (256, 3584),
            (1024, 1024), **_SIMPLE,
        ),
        Backbone(
            "krea2", "comfy.ldm.krea2.model", "SingleStreamDiT", _KREA, _HALF, (128, 30720), (1024, 1024), **_SIMPLE
        ),
        Backbone(
            "klein9b", "comfy.ldm.flux.model", "Flux", _KLEIN, _HALF, (512, 12288), (1024, 1024),
            **{**_SIMPLE, "channels": 128},
        ),
        Backbone(
            "wan14b", "comfy.ldm.wan.model", "WanModel", _WAN, _HALF, (512, 4096), (480, 832), frames=33, **_SIMPLE
        ),
        Backbone(
            "ltx23", "comfy.ldm.lightricks.av_model", "LTXAVModel", _LTX, _HALF, (128, 6144), (512, 768), frames=97,
            extra={"unprocessed_ltxav_embeds": True}, **{**_SIMPLE, "channels": 128},
        ),
        Backbone(
            "h3", "comfy.ldm.minimax.model", "MiniMaxH3Model", _H3, _HALF, (128, 5120), (480, 832), frames=39,
            extra=_TAGS, own_dtypes=True, **{**_SIMPLE, "channels": 24},
        ),
        BACKBONES["sdxl"],
        replace(BACKBONES["sd21"].at_small_size(), name="sd21-small", cfg=1.0),
    )
}  # fmt: skip
