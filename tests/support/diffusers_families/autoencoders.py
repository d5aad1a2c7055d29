# SPDX-License-Identifier: Apache-2.0
"""Autoencoders of pictures, videos and sound: a picture is encoded, and what that gave is decoded."""

from __future__ import annotations

from typing import Any

import torch
from inputs import Draw, Size
from torch import nn

from diffusers_families.family import NO_WORDS, Family, Give, Inputs

PICTURE = ((32, 32), (32, 48), (48, 32), (64, 40))
CLIP = ((9, 16, 16), (9, 16, 24), (5, 24, 16), (9, 32, 16))
WAVE = ((64,), (96,), (128,))


def seen(channels: int = 3, **more: Any) -> Give:
    """What is encoded."""

    def give(d: Draw, batch: int, size: Size, length: int) -> Inputs:
        return {"x": d.noise(batch, channels, *size), **more}

    return give


def round_trip(vae: nn.Module, given: Inputs) -> Any:
    """Encoded and decoded, without what is drawn at random between."""
    first = vae.encode(given["x"])
    if hasattr(first, "latent_dist"):
        latent = first.latent_dist.mode()
        moments = getattr(first.latent_dist, "parameters", latent)
    else:
        latent = moments = first.latent if hasattr(first, "latent") else first.latents
    more = {"num_frames": given["frames"]} if "frames" in given else {}
    more |= {"temb": torch.full((len(latent),), 0.05)} if "timed" in given else {}
    return moments, vae.decode(latent, return_dict=False, **more)[0]


def vae(name: str, kind: str, config: dict[str, Any], *, give: Give | None = None, **more: Any) -> Family:
    """A row of an autoencoder."""
    more = {"sizes": PICTURE, "depth": (), **more}
    return Family(
        name, kind, give or seen(), config, part="vae", lengths=NO_WORDS, moves=("seed",), use=round_trip, **more
    )


_KL: dict[str, Any] = {"block_out_channels": (8, 16), "latent_channels": 4, "norm_num_groups": 4}
_PLAIN: dict[str, Any] = {**_KL, "down_block_types": ("DownEncoderBlock2D",) * 2}
_PLAIN |= {"up_block_types": ("UpDecoderBlock2D",) * 2, "layers_per_block": 2}
_FOUR = (8, 8, 8, 8)
_CLIP: dict[str, Any] = {"sizes": CLIP}

ROWS = [
    vae("vae_kl", "AutoencoderKL", _PLAIN),
    vae(
        "vae_tiny",
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
    ),
    vae(
        "vae_dc",
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 4,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "encoder_layers_per_block": (2, 2),
            "decoder_layers_per_block": (2, 2),
            "downsample_block_type": "conv",
            "upsample_block_type": "interpolate",
        },
    ),
    vae("vae_vq", "VQModel", {**_PLAIN, "latent_channels": 3, "num_vq_embeddings": 32}),
    vae("vae_flux2", "AutoencoderKLFlux2", _PLAIN),
    vae(
        "vae_svd",
        "AutoencoderKLTemporalDecoder",
        {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1},
        give=lambda d, b, s, n: {"x": d.noise(b, 3, *s), "frames": b},
    ),
    vae(
        "vae_cosmos",
        "AutoencoderKLCosmos",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": _FOUR,
            "decode_block_out_channels": _FOUR,
            "attention_resolutions": (8,),
            "resolution": 64,
            "num_layers": 2,
            "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 4,
        },
        sizes=((9, 32, 32), (9, 32, 64), (5, 64, 32)),
    ),
    vae(
        "vae_hunyuan",
        "AutoencoderKLHunyuanVideo",
        {
            "latent_channels": 4,
            "down_block_types": ("HunyuanVideoDownBlock3D",) * 4,
            "up_block_types": ("HunyuanVideoUpBlock3D",) * 4,
            "block_out_channels": _FOUR,
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
        **_CLIP,
    ),
    vae(
        "vae_cogvideox",
        "AutoencoderKLCogVideoX",
        {
            "latent_channels": 4,
            "down_block_types": ("CogVideoXDownBlock3D",) * 4,
            "up_block_types": ("CogVideoXUpBlock3D",) * 4,
            "block_out_channels": _FOUR,
            "layers_per_block": 1,
            "norm_num_groups": 2,
        },
        **_CLIP,
    ),
    vae(
        "vae_ltx",
        "AutoencoderKLLTXVideo",
        {
            "latent_channels": 8,
            "block_out_channels": _FOUR,
            "decoder_block_out_channels": _FOUR,
            "layers_per_block": (1,) * 5,
            "decoder_layers_per_block": (1,) * 5,
            "patch_size": 1,
            "spatio_temporal_scaling": (True, True, False, False),
            "decoder_spatio_temporal_scaling": (True, True, False, False),
        },
        **_CLIP,
    ),
    vae(
        "vae_ltx_timed",
        "AutoencoderKLLTXVideo",
        {
            "latent_channels": 8,
            "block_out_channels": _FOUR,
            "decoder_block_out_channels": (16, 32, 64),
            "layers_per_block": (1,) * 4,
            "decoder_layers_per_block": (1,) * 4,
            "patch_size": 1,
            "spatio_temporal_scaling": (True, True, True, False),
            "decoder_spatio_temporal_scaling": (True,) * 3,
            "decoder_inject_noise": (False,) * 4,
            "upsample_residual": (True,) * 3,
            "upsample_factor": (2, 2, 2),
            "timestep_conditioning": True,
        },
        give=seen(timed=True),
        **_CLIP,
    ),
    vae(
        "vae_ltx2",
        "AutoencoderKLLTX2Video",
        {
            "latent_channels": 8,
            "block_out_channels": _FOUR,
            "decoder_block_out_channels": (16, 32, 64),
            "layers_per_block": (1,) * 5,
            "decoder_layers_per_block": (1,) * 4,
            "patch_size": 1,
            "spatio_temporal_scaling": (True,) * 4,
            "decoder_spatio_temporal_scaling": (True,) * 3,
            "decoder_inject_noise": (False,) * 4,
            "upsample_residual": (True,) * 3,
            "upsample_factor": (2, 2, 2),
            "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        },
        sizes=((9, 32, 32), (9, 32, 64), (17, 64, 32)),
    ),
    vae(
        "vae_magvit",
        "AutoencoderKLMagvit",
        {
            "latent_channels": 4,
            "block_out_channels": _FOUR,
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "down_block_types": ["SpatialDownBlock3D", *["SpatialTemporalDownBlock3D"] * 3],
            "up_block_types": ["SpatialUpBlock3D", *["SpatialTemporalUpBlock3D"] * 3],
        },
        **_CLIP,
    ),
    vae(
        "vae_mochi",
        "AutoencoderKLMochi",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (32,) * 4,
            "decoder_block_out_channels": (32,) * 4,
            "layers_per_block": (1,) * 5,
        },
        sizes=((7, 16, 16), (7, 16, 32), (13, 32, 16)),
    ),
    vae(
        "vae_wan",
        "AutoencoderKLWan",
        {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        **_CLIP,
    ),
    vae(
        "vae_qwen",
        "AutoencoderKLQwenImage",
        {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        sizes=((1, 16, 16), (1, 16, 24), (1, 24, 16)),
    ),
    vae(
        "vae_hunyuan_image",
        "AutoencoderKLHunyuanImage",
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 32,
            "block_out_channels": (64, 64),
            "layers_per_block": 1,
            "spatial_compression_ratio": 4,
            "sample_size": 64,
        },
    ),
    vae(
        "vae_kvae",
        "AutoencoderKLKVAE",
        {
            "channels": 32,
            "num_enc_blocks": 1,
            "num_dec_blocks": 1,
            "z_channels": 4,
            "ch_mult": (1, 2),
            "sample_size": 32,
        },
    ),
    vae(
        "vae_kvae_video",
        "AutoencoderKLKVAEVideo",
        {"ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 4, "temporal_compress_times": 2},
        sizes=((3, 16, 16), (5, 16, 24)),
    ),
    vae(
        "vae_ltx2_audio",
        "AutoencoderKLLTX2Audio",
        {
            "in_channels": 2,
            "output_channels": 2,
            "latent_channels": 4,
            "base_channels": 16,
            "ch_mult": (1, 2, 4),
            "resolution": 16,
            "num_res_blocks": 2,
            "norm_type": "pixel",
            "causality_axis": "height",
            "sample_rate": 16000,
            "mel_hop_length": 160,
            "mel_bins": 16,
            "mid_block_add_attention": False,
        },
        give=seen(2),
        sizes=((8, 16), (16, 16), (24, 16)),
    ),
    vae(
        "vae_oobleck",
        "AutoencoderOobleck",
        {
            "encoder_hidden_size": 8,
            "decoder_channels": 8,
            "decoder_input_channels": 4,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
        },
        give=seen(2),
        sizes=WAVE,
    ),
]
