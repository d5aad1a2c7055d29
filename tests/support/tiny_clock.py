# SPDX-License-Identifier: Apache-2.0
"""Workloads of the prompt clock that sample sound beside video, at sizes for a processor. No test lives here.

Their classes and the names in their files are those of the full size. ComfyUI has one size of their text encoders and
of MiniMax-H3's VAE; `shrink` puts small ones there, in a process that is for nothing else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import clock_workloads
from benchmarks.clock_networks import LTX_VAE, NETWORKS
from benchmarks.clock_workloads import WORKLOADS

NAMES = ("ltx23-tiny", "h3-tiny")
_LTX = {
    **NETWORKS["ltx23"].settings,
    **{"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64, "cross_attention_dim": 256},
    **{"audio_num_attention_heads": 4, "audio_attention_head_dim": 32, "audio_cross_attention_dim": 128},
    **{"connector_num_layers": 1, "connector_num_attention_heads": 4, "connector_attention_head_dim": 64},
    **{"audio_connector_num_attention_heads": 4, "audio_connector_attention_head_dim": 32},
}
_H3 = {
    **NETWORKS["h3"].settings,
    **{"hidden_size": 256, "num_layers": 2, "token_refiner_num_layers": 1, "num_attention_heads": 4},
    **{"attention_head_dim": 64, "ffn_hidden_size": 256, "text_dim": 256, "rope_inv_freq_len": 8},
}
_VAE = {**LTX_VAE, "encoder_base_channels": 8, "decoder_base_channels": 8}
_TAGS = {"minimax_token_tags": torch.ones(20, dtype=torch.long)}


def projections(device: str, dtype: torch.dtype) -> torch.nn.Module:
    """Those of the tiny LTX-2.3."""
    return clock_workloads.projections(device, dtype, 256, 128)


def _ltx_vae() -> torch.nn.Module:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(config=_VAE)


def add() -> None:
    """Let the clock know them."""
    small: dict[str, Any] = {"dtype": torch.float32, "size": (64, 96)}
    ltx, h3 = WORKLOADS["ltx23-fp8"], WORKLOADS["h3-int8"]
    NETWORKS["ltx23-tiny"] = replace(ltx.backbone, settings=_LTX, context=(20, 384), frames=9, **small)
    NETWORKS["h3-tiny"] = replace(h3.backbone, settings=_H3, context=(20, 256), frames=5, extra=_TAGS, **small)
    files = ltx.encoder.classes[0], f"{__name__}:projections"
    few: dict[str, Any] = {"steps": 3, "tokens": 20, "least": 128}
    WORKLOADS["ltx23-tiny"] = replace(
        ltx, name="ltx23-tiny", network="ltx23-tiny", encoder=replace(ltx.encoder, classes=files), vae=_ltx_vae,
        header={"transformer": _LTX, "vae": _VAE}, **few,
    )  # fmt: skip
    WORKLOADS["h3-tiny"] = replace(h3, name="h3-tiny", network="h3-tiny", **few)


def shrink() -> None:
    """Put small text encoders and a small VAE in the place of ComfyUI's own."""
    from comfy.ldm.minimax import vae
    from comfy.text_encoders import llama, qwen3vl

    @dataclass
    class Gemma(llama.Gemma3_12B_Config):
        vocab_size: int = 30010
        hidden_size: int = 256
        intermediate_size: int = 256
        num_attention_heads: int = 2
        num_key_value_heads: int = 1
        head_dim = 64
        vision_config = {  # noqa: RUF012  # as ComfyUI has it
            **llama.Gemma3_12B_Config.vision_config,
            **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
        }

    @dataclass
    class Qwen(qwen3vl.Qwen3VL_32BConfig):
        hidden_size: int = 256
        intermediate_size: int = 256
        num_attention_heads: int = 2
        num_key_value_heads: int = 1

    tower = {"hidden_size": 64, "intermediate_size": 64, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
    llama.Gemma3_12B_Config = Gemma
    qwen3vl.QWEN3VL_CONFIGS["qwen3vl_32b"] = Qwen
    qwen3vl.QWEN3VL_VISION["qwen3vl_32b"] = tower
    narrow = {"ch": 32, "ch_mult": (1,) * 6, "num_res_blocks": 1}
    vae.ViT3DDecoder = functools.partial(vae.ViT3DDecoder, num_layers=2, heads=2, dim_head=32)
    vae.MiniMaxH3VideoVAE = functools.partial(vae.MiniMaxH3VideoVAE, **narrow)
