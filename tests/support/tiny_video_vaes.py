# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's own video autoencoders as small as their classes allow, with random weights. ComfyUI is imported inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tiny_autoencoders import LTXV_VAE
from tiny_networks import random_weights
from tiny_other_vaes import seedvr

_PARTS: dict[str, Any] = {"num_res_blocks": 1, "attn_scales": [], "temperal_downsample": [False, True, True]}
_ENGINE = "comfy.ldm.models.autoencoder.EmptyRegularizer"


def _wan21() -> Any:
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], image_channels=3, conv_out_channels=3, **_PARTS)


def _wan22() -> Any:
    from comfy.ldm.wan.vae2_2 import WanVAE

    return WanVAE(dim=8, dec_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], **_PARTS)


def _hunyuan15() -> Any:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    sizes = {
        "block_out_channels": [32, 64, 64, 64, 64], "in_channels": 3, "out_channels": 3, "num_res_blocks": 1,
        "ffactor_spatial": 16, "ffactor_temporal": 4, "z_channels": 32,
    }  # fmt: skip
    parts = {
        f"{part.lower()}_config": {"target": f"comfy.ldm.hunyuan_video.vae_refiner.{part}", "params": sizes}
        for part in ("Encoder", "Decoder")
    }
    return AutoencodingEngine(regularizer_config={"target": _ENGINE}, **parts)


def _ltx() -> Any:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(config=LTXV_VAE)


def _minimax() -> Any:
    from comfy.ldm.minimax import vae

    sizes: dict[str, Any] = {
        "ch": 32,
        "ch_mult": (1,) * 6,
        "num_res_blocks": 1,
        "tile_size": 64,
        "tile_overlap_min": 32,
    }
    made = vae.MiniMaxH3VideoVAE(**sizes, operations=_Meta())
    made.decoder = vae.ViT3DDecoder(in_channels=24, num_layers=2, heads=2, dim_head=32)
    return made


class _Meta:
    """Layers without memory, for a decoder that is thrown away."""

    def Linear(self, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.Linear(*args, **{**kwargs, "device": "meta"})


def _cosmos() -> Any:
    from comfy.ldm.cosmos.vae import CausalContinuousVideoTokenizer

    return CausalContinuousVideoTokenizer(
        z_channels=4, latent_channels=4, z_factor=1, resolution=64, in_channels=3, out_channels=3, channels=16,
        channels_mult=[1, 2, 2], num_res_blocks=1, attn_resolutions=[8], dropout=0.0, patch_size=4, num_groups=1,
        temporal_compression=8, spacial_compression=8,
    )  # fmt: skip


def _hunyuan() -> Any:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    config: dict[str, Any] = {
        "double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
        "ch_mult": [1, 1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0, "conv3d": True,
        "time_compress": 4,
    }  # fmt: skip
    return AutoencoderKL(ddconfig=config, embed_dim=16)


def _cogvideo() -> Any:
    from comfy.ldm.cogvideo.vae import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX(block_out_channels=(16, 16, 32, 32), layers_per_block=1, groups=8)


def _mochi() -> Any:
    from comfy.ldm.genmo.vae import model

    sizes: dict[str, Any] = {"channel_multipliers": [1, 2, 3, 4], "num_res_blocks": [2] * 5, "latent_dim": 12}
    made = model.VideoVAE.__new__(model.VideoVAE)
    torch.nn.Module.__init__(made)
    made.encoder = model.Encoder(
        in_channels=15, base_channels=32, temporal_reductions=[1, 2, 3], spatial_reductions=[2, 2, 2],
        prune_bottlenecks=[False] * 5, has_attentions=[False, True, True, True, True], affine=True, bias=True,
        input_is_conv_1x1=True, padding_mode="replicate", **sizes,
    )  # fmt: skip
    made.decoder = model.Decoder(
        out_channels=3, base_channels=32, temporal_expansions=[1, 2, 3], spatial_expansions=[2, 2, 2],
        has_attention=[False] * 5, padding_mode="replicate", output_norm=False, nonlinearity="silu",
        output_nonlinearity="silu", causal=True, **sizes,
    )  # fmt: skip
    return made


def _taehv(channels: int, of: str | None = None) -> Callable[[], Any]:
    def build() -> Any:
        import comfy.latent_formats as formats
        from comfy.taesd.taehv import TAEHV

        return TAEHV(latent_channels=channels, latent_format=getattr(formats, of) if of else None)

    return build


@dataclass(frozen=True)
class Kind:
    """An autoencoder and sizes of latents: the first call's, others of as many frames, and other numbers of frames.

    ratio: frames and sides of a picture for one of the latent. loops: its code loops over frames, so that it is
    compiled for some numbers of them alone. tiles: it makes tiles itself.
    """

    build: Callable[[], Any]
    first: tuple[int, ...]
    frames: tuple[int, ...]
    ratio: tuple[int, int]
    loops: bool = False
    tiles: bool = False

    def made(self) -> Any:
        """The autoencoder with weights of its own."""
        model = self.build()
        model.load_state_dict(random_weights(model, 0))
        return model.eval().requires_grad_(False)

    def latent(self, frames: int | None = None, *, turned: bool = False) -> torch.Tensor:
        """Latents of so many frames. turned: with height and width the other way round."""
        own, height, width = self.first[2:]
        return self.of_size(own if frames is None else frames, *((width, height) if turned else (height, width)))

    def of_size(self, frames: int, height: int, width: int) -> torch.Tensor:
        """Latents of these sizes."""
        size = (*self.first[:2], frames, height, width)
        return torch.randn(size, generator=torch.Generator().manual_seed(3))

    def vae(self) -> Any:
        """ComfyUI's VAE object around it."""
        import comfy.model_patcher
        from tiny_autoencoders import taesd, vae

        made = vae(taesd(4))
        frames, side = self.ratio
        made.first_stage_model, made.vae_dtype = self.made(), torch.float32
        made.patcher = comfy.model_patcher.CoreModelPatcher(made.first_stage_model, made.device, made.device)
        made.latent_dim, made.latent_channels, made.handles_tiling = 3, self.first[1], self.tiles
        made.upscale_ratio = (lambda a: a * frames - frames + 1, side, side)
        made.downscale_ratio = (lambda a: (a + frames - 1) // frames, side, side)
        made.upscale_index_formula = made.downscale_index_formula = (frames, side, side)
        made.memory_used_encode = made.memory_used_decode = lambda _shape, _dtype: 0
        return made


VIDEO_VAES = {
    "wan21": Kind(_wan21, (1, 16, 3, 4, 6), (5, 4, 2, 1), (4, 8)),
    "wan22": Kind(_wan22, (1, 16, 3, 2, 3), (5, 4, 2, 1), (4, 16)),
    "hunyuan15": Kind(_hunyuan15, (1, 32, 3, 2, 3), (5, 4, 2, 1), (4, 16)),
    "ltx": Kind(_ltx, (1, 128, 2, 2, 3), (4, 3, 1), (8, 32)),
    "minimax": Kind(_minimax, (1, 24, 7, 2, 3), (12, 2, 1), (4, 16), tiles=True),
    "cosmos": Kind(_cosmos, (1, 4, 2, 4, 6), (3, 1), (8, 8)),
    "seedvr": Kind(seedvr, (1, 16, 5, 4, 6), (8, 4, 2, 1), (4, 8), tiles=True),
    "hunyuan": Kind(_hunyuan, (1, 16, 3, 4, 6), (5, 4, 2, 1), (4, 8)),
    "cogvideo": Kind(_cogvideo, (1, 16, 3, 4, 6), (5, 4, 2, 1), (4, 8)),
    "taehv": Kind(_taehv(16), (1, 16, 3, 4, 6), (5, 4, 2, 1), (4, 8)),
    "taehv of hunyuan15": Kind(_taehv(32, "HunyuanVideo15"), (1, 32, 3, 2, 3), (4, 1), (4, 16)),
    "taehv of minimax": Kind(_taehv(24), (1, 24, 7, 2, 3), (12, 1), (4, 16)),
    "mochi": Kind(_mochi, (1, 12, 3, 4, 6), (2, 4), (6, 8), loops=True),
}
