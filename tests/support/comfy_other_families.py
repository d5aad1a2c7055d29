# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's UNets and its networks for pixels, sound and shapes at tiny sizes, a row a family."""

from __future__ import annotations

import functools
from typing import Any

import torch
from comfy_family_parts import _CHROMA, _Z, Extra, called, depth, each, image, made, mask, pooled, same
from comfy_networks import unet
from inputs import Call, Draw, Size, latent_call


def words(width: int) -> Extra:
    """As many vectors as the prompt has tokens."""
    return lambda d, batch, size, length: d.prompt(batch, length, width)


_RADIANCE: dict[str, Any] = {
    **{**_CHROMA, "in_channels": 3, "out_channels": 3, "nerf_hidden_size": 8, "nerf_mlp_ratio": 2, "nerf_depth": 2},
    **{"nerf_max_freqs": 4, "nerf_tile_size": 0, "nerf_final_head_type": "conv", "nerf_embedder_dtype": torch.float32},
    **{"use_x0": False, "use_sequential_txt_ids": True},
}

_RADIANCE_CALL = called(channels=3, guidance=each(0.0))


def _svd(d: Draw, batch: int, size: Size, length: int) -> Call:
    """A video of three frames: they are rows of the batch."""
    args, kwargs = latent_call(d, 3 * batch, size, length, greatest=1000.0, channels=8)
    return args, {**kwargs, "y": d.prompt(3 * batch, 24), "num_video_frames": 3}


_HYDIT: dict[str, Any] = {
    **{"input_size": 16, "hidden_size": 32, "depth": lambda n: 2 * n + 2, "num_heads": 2, "text_states_dim": 16},
    **{"text_states_dim_t5": 24, "text_len": 20, "text_len_t5": 30},
}

_CASCADE: dict[str, Any] = {
    **{"c_r": 8, "c_cond": 16, "c_hidden": [16, 32], "nhead": [2, 2], "level_config": ["CTA", "CTA"]},
    **{"blocks": lambda n: [[n, n], [n, n]], "block_repeat": [[1, 1], [2, 1]], "dropout": [0.0, 0.0]},
}


def cascade(**extra: Extra) -> Any:
    """Stable Cascade names its inputs otherwise."""

    def call(d: Draw, batch: int, size: Size, length: int) -> Call:
        args, kwargs = latent_call(d, batch, size, length, greatest=1.0)
        kwargs = {"transformer_options": kwargs["transformer_options"]}
        return args, {**kwargs, **{name: make(d, batch, size, length) for name, make in extra.items()}}

    return call


def tripo(d: Draw, batch: int, size: Size, length: int) -> Call:
    (noise, time), kwargs = latent_call(d, batch, size, length, greatest=1000.0)
    return ([noise.transpose(1, 2), d.noise(batch, 1, 5)], time), kwargs


ROWS = [
    image("chroma_radiance", made("chroma_radiance.model.ChromaRadiance", **_RADIANCE), _RADIANCE_CALL),
    image(
        "chroma_radiance_tiled",
        made(
            "chroma_radiance.model.ChromaRadiance",
            **{**_RADIANCE, "nerf_tile_size": 40, "nerf_final_head_type": "linear", "use_x0": True},
        ),
        _RADIANCE_CALL,
    ),
    image(
        "hunyuan3d",
        made(
            "hunyuan3d.model.Hunyuan3Dv2",
            in_channels=4,
            context_in_dim=16,
            hidden_size=32,
            num_heads=2,
            depth=depth,
            depth_single_blocks=depth,
            guidance_embed=True,
        ),
        called(guidance=each(5.0)),
        sizes=((64,), (96,), (40,), (33,)),
    ),
    image(
        "hunyuan3d_21",
        made(
            "hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain",
            in_channels=4,
            hidden_size=32,
            context_dim=16,
            depth=lambda n: 2 * n + 2,
            num_heads=2,
            num_moe_layers=2,
            num_experts=4,
            guidance_cond_proj_dim=None,
        ),
        called(),
        sizes=((64,), (96,), (40,), (33,)),
    ),
    image(
        "hydit",
        made("hydit.models.HunYuanDiT", **_HYDIT, size_cond=True, use_style_cond=True),
        called(
            1000.0,
            text_embedding_mask=mask,
            encoder_hidden_states_t5=pooled(30, 24),
            text_embedding_mask_t5=lambda d, b, s, n: mask(d, b, s, 30),
            image_meta_size=each(16, 16, 16, 16, 0, 0),
        ),
    ),
    image(
        "cascade_c",
        made("cascade.stage_c.StageC", **_CASCADE, c_in=4, c_out=4, c_clip_text=16, c_clip_text_pooled=8, c_clip_img=8),
        cascade(clip_text=words(16), clip_text_pooled=pooled(1, 8), clip_img=pooled(1, 8)),
    ),
    image(
        "cascade_b",
        made("cascade.stage_b.StageB", **_CASCADE, c_clip=8),
        cascade(effnet=lambda d, b, s, n: d.prompt(b, 16, 5, 6), clip=pooled(1, 8)),
    ),
    image(
        "stable_audio",
        made(
            "audio.dit.AudioDiffusionTransformer",
            io_channels=4,
            embed_dim=64,
            cond_token_dim=32,
            global_cond_dim=24,
            depth=depth,
            num_heads=2,
        ),
        called(global_embed=pooled(24), context=words(32)),
        sizes=((64,), (96,), (40,), (33,)),
    ),
    image(
        "ace_step",
        made(
            "ace.model.ACEStepTransformer2DModel",
            in_channels=8,
            num_layers=depth,
            attention_head_dim=16,
            num_attention_heads=2,
            out_channels=8,
            max_position=256,
            speaker_embedding_dim=8,
            text_embedding_dim=16,
            lyric_encoder_vocab_size=64,
            lyric_hidden_size=1024,
            max_width=256,
            patch_size=[16, 1],
            mlp_ratio=2.5,
        ),
        called(
            channels=8,
            speaker_embeds=pooled(8),
            lyric_token_idx=lambda d, b, s, n: (d.prompt(b, 12).abs() * 20).long().clamp(max=63),
            lyric_mask=lambda d, b, s, n: torch.ones(b, 12, dtype=torch.long),
        ),
        sizes=((16, 24), (16, 40), (16, 33)),
    ),
    image(
        "pixeldit",
        made(
            "pixeldit.model.PixDiT_T2I",
            num_groups=2,
            hidden_size=32,
            pixel_hidden_size=8,
            pixel_attn_hidden_size=32,
            pixel_num_groups=2,
            patch_depth=depth,
            pixel_depth=depth,
            patch_size=4,
            txt_embed_dim=16,
            txt_max_length=70,
        ),
        called(1000.0, channels=3),
    ),
    image(
        "pid",
        made(
            "pixeldit.pid.PidNet",
            num_groups=2,
            hidden_size=32,
            pixel_hidden_size=8,
            pixel_attn_hidden_size=32,
            pixel_num_groups=2,
            patch_depth=lambda n: 2 * n,
            pixel_depth=depth,
            patch_size=4,
            txt_embed_dim=16,
            txt_max_length=70,
            lq_latent_channels=4,
            lq_hidden_dim=16,
            lq_num_res_blocks=2,
            latent_spatial_down_factor=2,
            sr_scale=2,
            rope_ref_h=64,
            rope_ref_w=64,
        ),
        called(
            1000.0,
            channels=3,
            degrade_sigma=each(0.3),
            lq_latent=lambda d, b, s, n: d.prompt(b, 4, s[0] // 4, s[1] // 4),
        ),
    ),
    image(
        "unet_refiner",
        functools.partial(unet, num_classes="sequential", adm_in_channels=24),
        called(1000.0, y=pooled(24)),
    ),
    image("unet_inpaint", functools.partial(unet, in_channels=9), called(1000.0, channels=9)),
    image(
        "unet_upscaler",
        functools.partial(unet, num_classes=20, in_channels=7),
        called(1000.0, channels=7, y=lambda d, b, s, n: torch.arange(b) + 3),
    ),
    image(
        "unet_lotus", functools.partial(unet, num_classes="sequential", adm_in_channels=4), called(1000.0, y=pooled(4))
    ),
    image(
        "svd",
        functools.partial(
            unet,
            num_classes="sequential",
            adm_in_channels=24,
            use_temporal_attention=True,
            use_temporal_resblock=True,
            extra_ff_mix_layer=True,
            use_spatial_context=True,
            in_channels=8,
            merge_strategy="learned_with_images",
            merge_factor=0.5,
            video_kernel_size=[3, 1, 1],
            disable_temporal_crossattention=False,
            max_ddpm_temb_period=10000,
        ),
        lambda d, b, s, n: _svd(d, b, s, n),
    ),
    image(
        "z_image_pixel",
        made(
            "lumina.model.NextDiTPixelSpace",
            **{**_Z, "dim": 256},
            patch_size=4,
            in_channels=3,
            n_layers=depth,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_lens=[300, 64, 64],
            qk_norm=True,
            decoder_hidden_size=16,
            decoder_num_res_blocks=2,
            decoder_max_freqs=4,
        ),
        called(channels=3, num_tokens=lambda d, b, s, n: n),
    ),
    image(
        "triposplat",
        made(
            "triposplat.model.LatentSeqMMFlowModel",
            q_token_length=64,
            in_channels=4,
            model_channels=64,
            cond_channels=16,
            out_channels=4,
            num_blocks=depth,
            num_refiner_blocks=1,
            num_head_channels=32,
            cond2_channels=None,
        ),
        tripo,
        sizes=((64,),),
        lengths=(64, 20, 77),
    ),
    image(
        "ace_step15",
        made(
            "ace.ace_step15.AceStepConditionGenerationModel",
            in_channels=24,
            hidden_size=32,
            text_hidden_dim=16,
            timbre_hidden_dim=8,
            audio_acoustic_hidden_dim=8,
            num_dit_layers=lambda n: 2 * n,
            num_lyric_layers=1,
            num_timbre_layers=1,
            num_tokenizer_layers=1,
            num_heads=2,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=64,
            fsq_dim=32,
            encoder_hidden_size=32,
            encoder_intermediate_size=64,
            encoder_num_heads=2,
            sliding_window=8,
        ),
        called(
            channels=8,
            lyric_embed=pooled(9, 16),
            refer_audio=lambda d, b, s, n: d.prompt(b, 8, *s),
            is_covers=same(False),
        ),
        sizes=((40,), (60,), (50,), (80,)),
    ),
]
