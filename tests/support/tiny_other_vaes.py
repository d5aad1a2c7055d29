# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's other autoencoders of images, sound and shapes, as small as their classes allow, with random weights.

ComfyUI is imported inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Size = tuple[int, ...]
_ENGINE = "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"
_KL: dict[str, Any] = {
    **{"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32},
    **{"ch_mult": [1, 2], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0},
}


def _of_parts(encoder: str, decoder: str, sizes: dict[str, Any], **of_decoder: Any) -> Any:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    parts = {"encoder_config": (encoder, sizes), "decoder_config": (decoder, {**sizes, **of_decoder})}
    configs = {name: {"target": f"comfy.ldm.{target}", "params": own} for name, (target, own) in parts.items()}
    return AutoencodingEngine(regularizer_config={"target": _ENGINE}, **configs)


def _video_of_images() -> Any:
    encoder, decoder = "modules.diffusionmodules.model.Encoder", "modules.temporal_ae.VideoDecoder"
    return _of_parts(encoder, decoder, _KL, video_kernel_size=[3, 1, 1], alpha=0.0)


def _hunyuan(kind: str, factor: int, channels: int, **more: Any) -> Callable[[], Any]:
    widths = [32, 32, 64, 64, 128, 128][: 6 if factor == 32 else 5]
    sizes = {
        **{"block_out_channels": widths, "in_channels": 3, "out_channels": 3, "num_res_blocks": 2},
        **{"ffactor_spatial": factor, "downsample_match_channel": True, "upsample_match_channel": True},
        **{"z_channels": channels, **more},
    }
    return lambda: _of_parts(f"hunyuan_video.{kind}.Encoder", f"hunyuan_video.{kind}.Decoder", sizes)


def _cascade() -> Any:
    from comfy.ldm.cascade.stage_a import StageA

    return StageA(bottleneck_blocks=2, c_hidden=32, codebook_size=64)


def _cascade_c() -> Any:
    from comfy.ldm.cascade.stage_c_coder import StageC_coder

    return StageC_coder()


def _mage() -> Any:
    from comfy.ldm.mage_flow.vae import MageVAE

    return MageVAE()


def seedvr() -> Any:
    import comfy.ldm.seedvr.vae as code

    before = code.BYTEDANCE_BLOCK_OUT_CHANNELS
    code.BYTEDANCE_BLOCK_OUT_CHANNELS = (32, 32, 64, 64)
    try:
        return code.VideoAutoencoderKLWrapper()
    finally:
        code.BYTEDANCE_BLOCK_OUT_CHANNELS = before


def _oobleck() -> Any:
    from comfy.ldm.audio.autoencoder import AudioOobleckVAE

    return AudioOobleckVAE(channels=16)


def _stable_audio() -> Any:
    from comfy.ldm.audio.vae_sa3 import SA3AudioVAE

    return SA3AudioVAE(channels=32, transformer_depths=2, sinusoidal_blocks=1, sliding_window=[1, 1], chunk_size=128)


def _music() -> Any:
    import comfy.ops
    from comfy.ldm.minimax_music.dav import MiniMaxMusic3DAV

    return MiniMaxMusic3DAV(operations=comfy.ops.disable_weight_init)


def _minimax_audio() -> Any:
    from comfy.ldm.minimax.audio_vae import MiniMaxH3AudioVAE

    return MiniMaxH3AudioVAE(encoder_dim=8, latent_dim=128, decoder_dim=512)


def _mmaudio() -> Any:
    from comfy.ldm.mmaudio.vae.autoencoder import AudioAutoencoder

    return AudioAutoencoder(mode="16k")


def _ace() -> Any:
    from comfy.ldm.ace.vae.music_dcae_pipeline import MusicDCAE

    return MusicDCAE(source_sample_rate=44100)


@dataclass(frozen=True)
class Kind:
    """An autoencoder, with sizes of latents and of what is encoded: the first calls', and others."""

    build: Callable[[], Any]
    latents: tuple[Size, ...]
    encoded: tuple[Size, ...] = field(default=())

    def made(self) -> Any:
        """The autoencoder with weights of its own."""
        torch.manual_seed(0)
        model = self.build()
        drawn = {name: _random(value) for name, value in model.state_dict().items()}
        weights = {name: value.abs() if name.endswith("running_var") else value for name, value in drawn.items()}
        model.load_state_dict(weights)
        return model.eval().requires_grad_(False)


def _random(value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point() or not value.numel():
        return value
    return torch.randn(value.shape) / (value[0].numel() if value.ndim else 1) ** 0.5


_IMAGES = ((1, 3, 64, 96), (2, 3, 96, 64))
OTHER_VAES = {
    "svd": Kind(_video_of_images, ((3, 4, 6, 8), (5, 4, 8, 6)), ((3, 3, 16, 24), (2, 3, 32, 16))),
    "hunyuan image 2.1": Kind(_hunyuan("vae", 32, 64), ((1, 64, 2, 3), (2, 64, 3, 2)), _IMAGES),
    "hunyuan image refiner": Kind(
        _hunyuan("vae_refiner", 16, 32, ffactor_temporal=4, refiner_vae=False),
        ((1, 32, 1, 2, 3), (1, 32, 1, 3, 2)),
        ((1, 3, 1, 32, 48), (1, 3, 1, 48, 32)),
    ),
    "cascade": Kind(_cascade, ((1, 4, 8, 12), (2, 4, 12, 8)), _IMAGES),
    "cascade c, decoded": Kind(_cascade_c, ((1, 16, 3, 4), (2, 16, 4, 3))),
    "mage": Kind(_mage, ((1, 128, 2, 3), (2, 128, 3, 2)), _IMAGES),
    "seedvr, an image": Kind(seedvr, ((1, 16, 1, 4, 6), (1, 16, 1, 6, 4)), ((1, 3, 1, 32, 48), (1, 3, 1, 48, 32))),
    "oobleck": Kind(_oobleck, ((1, 64, 3), (2, 64, 5)), ((1, 2, 4096), (2, 2, 6144))),
    "stable audio 3": Kind(_stable_audio, ((1, 256, 4), (2, 256, 20)), ((1, 2, 16384), (2, 2, 32768))),
    "minimax music": Kind(_music, ((1, 128, 3), (2, 128, 5))),
    "minimax audio": Kind(_minimax_audio, ((1, 32, 2, 3), (2, 32, 2, 5)), ((1, 2, 2400), (1, 2, 5000))),
    "mmaudio": Kind(_mmaudio, ((1, 20, 4), (1, 20, 7)), ((1, 2, 11025), (1, 2, 22050))),
    "ace": Kind(_ace, ((1, 8, 16, 3), (2, 8, 16, 5)), ((1, 2, 8192), (2, 2, 8192))),
}
