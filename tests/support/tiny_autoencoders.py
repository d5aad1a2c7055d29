# SPDX-License-Identifier: Apache-2.0
"""Autoencoders with random weights, as small as ComfyUI's own detection accepts, under the keys of the real file.

ComfyUI is imported only inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tiny_networks import random_weights


def taesd(channels: int) -> Callable[[int], dict[str, Any]]:
    """The small autoencoder: convolutions only, image side 8 times the latent's."""

    def build(seed: int) -> dict[str, Any]:
        from comfy.taesd.taesd import TAESD

        found = random_weights(TAESD(latent_channels=channels), seed)
        found["vae_scale"].fill_(1.0)
        found["vae_shift"].fill_(0.0)
        # An image around middle grey: with a random last layer three pixels of four would be black.
        found["taesd_decoder.19.weight"].mul_(0.1)
        found["taesd_decoder.19.bias"].fill_(0.5)
        return found

    return build


def kl_vae(channels: int, normed: bool = False) -> Callable[[int], dict[str, Any]]:
    """The usual autoencoder (residual blocks, attention in the middle) with a narrow decoder.

    Detection fixes the encoder's width at 128 and reads the decoder's off the file. normed: as FLUX.2 has it, whose
    latents are patches with a norm of their own.
    """

    def build(seed: int) -> dict[str, Any]:
        from comfy.ldm.models.autoencoder import AutoencoderKL

        config = {
            "double_z": True, "z_channels": channels, "resolution": 256, "in_channels": 3, "out_ch": 3,
            "ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
        }  # fmt: skip
        config |= {"batch_norm_latent": True} if normed else {}
        model = AutoencoderKL(ddconfig=config, embed_dim=channels, decoder_ddconfig={**config, "ch": 32})
        return random_weights(model, seed)

    return build


def wan_vae(seed: int) -> dict[str, Any]:
    """The Wan 2.1 video autoencoder at a width of 16, which detection reads off the file."""
    from comfy.ldm.wan.vae import WanVAE

    model = WanVAE(
        dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
        temperal_downsample=[False, True, True], image_channels=3, conv_out_channels=3, dropout=0.0,
    )  # fmt: skip
    return random_weights(model, seed)


def hunyuan_video_vae(seed: int) -> dict[str, Any]:
    """The HunyuanVideo autoencoder: residual blocks in three dimensions at 128 channels, which detection presumes."""
    import torch
    from comfy.ldm.models.autoencoder import AutoencoderKL

    config = {
        "double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
        "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0, "conv3d": True,
        "time_compress": 4,
    }  # fmt: skip
    return random_weights(AutoencoderKL(ddconfig=config, embed_dim=16), seed, torch.float16)


# What the header of an LTX-Video checkpoint says of its VAE: as short and narrow as its factor of 8 and 32 allows.
LTXV_VAE = {
    "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128,
    "blocks": [[kind, 1] for kind in ("res_x", *("compress_all", "res_x") * 3)], "norm_layer": "pixel_norm",
    "patch_size": 4, "latent_log_var": "uniform", "causal_decoder": False, "encoder_base_channels": 16,
    "decoder_base_channels": 16,
}  # fmt: skip

LTXV_HEADER = {"config": json.dumps({"vae": LTXV_VAE})}


def ltxv_vae(seed: int) -> dict[str, Any]:
    """The LTX-Video autoencoder as LTXV_VAE has it."""
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return random_weights(VideoVAE(config=LTXV_VAE), seed)


def vae(build: Callable[[int], dict[str, Any]]) -> Any:
    """ComfyUI's VAE object around one of these autoencoders."""
    import comfy.sd

    return comfy.sd.VAE(sd=build(0))
