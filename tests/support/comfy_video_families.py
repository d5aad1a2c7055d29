# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's transformers for videos at tiny sizes, a row a family; not those of backbones.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy_family_parts import _HUNYUAN_VIDEO, Extra, called, depth, each, made, mask, pooled, same, video
from inputs import Call, Draw, Size, latent_call


def latent(channels: int) -> Extra:
    """A latent of the size of the noise."""
    return lambda d, batch, size, length: d.prompt(batch, channels, *size)


_HUNYUAN_VIDEO_CALL = {"y": pooled(8), "guidance": each(6.0)}

_WAN: dict[str, Any] = {
    **{"model_type": "t2v", "patch_size": (1, 2, 2), "in_dim": 4, "dim": 32, "ffn_dim": 64, "freq_dim": 16},
    **{"text_dim": 16, "out_dim": 4, "num_heads": 2, "num_layers": depth},
}

_I2V = {**_WAN, "model_type": "i2v", "in_dim": 8}

_CLIP = {"clip_fea": pooled(5, 1280)}


def frames(channels: int, count: int) -> Extra:
    """A latent of so many frames."""
    return lambda d, batch, size, length: d.prompt(batch, channels, count, *size[1:])


def per_frame(call: Any, of: Callable[[Size], int]) -> Any:
    """The call with a time of its own for each frame or token."""

    def timed(d: Draw, batch: int, size: Size, length: int) -> Call:
        (noise, time), kwargs = call(d, batch, size, length)
        steps = torch.arange(of(size)) % 2
        return (noise, time[:, None] * steps), kwargs

    return timed


def camera(d: Draw, batch: int, size: Size, length: int) -> torch.Tensor:
    return d.prompt(batch, 2, size[0], 8 * size[1], 8 * size[2])


_COSMOS: dict[str, Any] = {
    **{"max_img_h": 16, "max_img_w": 16, "max_frames": 8, "in_channels": 4, "out_channels": 4, "patch_spatial": 2},
    **{"patch_temporal": 1, "model_channels": 32, "num_blocks": depth, "num_heads": 2, "crossattn_emb_channels": 16},
    **{"pos_emb_cls": "rope3d", "concat_padding_mask": True, "use_adaln_lora": True, "adaln_lora_dim": 8},
}

_COSMOS1 = {
    **{**_COSMOS, "block_config": "FA-CA-MLP", "block_x_format": "THWBD", "affline_emb_norm": True},
    **{"extra_per_block_abs_pos_emb": True, "extra_per_block_abs_pos_emb_type": "learnable"},
}

_COSMOS2 = {**_COSMOS, "pos_emb_learnable": True, "min_fps": 1, "max_fps": 30, "rope_enable_fps_modulation": False}

_LTXV: dict[str, Any] = {
    **{"in_channels": 4, "cross_attention_dim": 32, "attention_head_dim": 16, "num_attention_heads": 2},
    **{"caption_channels": 16, "num_layers": depth},
}

_AV: dict[str, Any] = {
    **{"in_channels": 4, "audio_in_channels": 128, "cross_attention_dim": 32, "audio_cross_attention_dim": 16},
    **{
        "attention_head_dim": 16,
        "audio_attention_head_dim": 8,
        "num_attention_heads": 2,
        "audio_num_attention_heads": 2,
    },
    **{"caption_channels": 16, "num_layers": depth, "connector_attention_head_dim": 8},
    **{"connector_num_attention_heads": 2, "connector_num_layers": 1},
}


def both(d: Draw, batch: int, size: Size, length: int) -> Call:
    """A video and its sound."""
    (noise, time), kwargs = latent_call(d, batch, size, length, greatest=1.0)
    sound = d.noise(batch, 8, 4 * size[0], 16)
    context = d.prompt(batch, length, 32)
    return ([noise, sound], time[:, None]), {**kwargs, "context": context, "a_timestep": time[:, None] * 0.9}


def seed_vr(d: Draw, batch: int, size: Size, length: int) -> Call:
    args, kwargs = latent_call(d, batch, size, length, greatest=1000.0, channels=16)
    return args, {**kwargs, "condition": d.prompt(batch, 17, *size)}


_COG: dict[str, Any] = {
    **{"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 24},
    **{"text_embed_dim": 16, "num_layers": depth, "sample_width": 12, "sample_height": 12, "sample_frames": 9},
    **{"max_text_seq_length": 77},
}

ROWS = [
    video("hunyuan_video", made("hunyuan_video.model.HunyuanVideo", **_HUNYUAN_VIDEO), called(**_HUNYUAN_VIDEO_CALL)),
    video(
        "hunyuan_video_masked",
        made("hunyuan_video.model.HunyuanVideo", **_HUNYUAN_VIDEO),
        called(attention_mask=lambda d, b, s, n: mask(d, 1, s, n), **_HUNYUAN_VIDEO_CALL),
    ),
    video(
        "hunyuan_video_i2v",
        made("hunyuan_video.model.HunyuanVideo", **{**_HUNYUAN_VIDEO, "guidance_embed": False}),
        called(guiding_frame_index=each(0.0), y=pooled(8)),
    ),
    video("wan_i2v", made("wan.model.WanModel", **_I2V), called(1000.0, channels=8, **_CLIP)),
    video("wan_phantom", made("wan.model.WanModel", **_WAN), called(1000.0, time_dim_concat=frames(4, 2))),
    video(
        "wan_context_latents",
        made("wan.model.WanModel", **_WAN),
        called(1000.0, context_latents=lambda d, b, s, n: [d.prompt(b, 4, *s), d.prompt(b, 4, 1, 4, 6)]),
    ),
    video(
        "wan_fun_reference",
        made("wan.model.WanModel", **_WAN, in_dim_ref_conv=4),
        called(1000.0, reference_latent=lambda d, b, s, n: d.prompt(b, 4, *s[1:])),
    ),
    video(
        "wan22_per_token",
        made("wan.model.WanModel", **_WAN),
        per_frame(called(1000.0), lambda s: s[0] * (s[1] // 2) * (s[2] // 2)),
    ),
    video(
        "wan_vace",
        made("wan.model.VaceWanModel", **_WAN, vace_layers=depth, vace_in_dim=6),
        called(1000.0, vace_context=lambda d, b, s, n: d.prompt(b, 2, 6, *s), vace_strength=same([1.0, 0.7])),
    ),
    video(
        "wan_camera",
        made("wan.model.CameraWanModel", **{**_I2V, "model_type": "camera", "in_dim_control_adapter": 2}),
        called(1000.0, channels=8, camera_conditions=camera, **_CLIP),
    ),
    video(
        "wan_s2v",
        made("wan.model.WanModel_S2V", **_WAN, audio_dim=8, cond_dim=4, audio_inject_layers=[0, 1]),
        called(
            1000.0,
            audio_embed=lambda d, b, s, n: d.prompt(b, 25, 8, 4 * s[0]),
            reference_latent=frames(4, 1),
            control_video=latent(4),
        ),
    ),
    video(
        "wan_humo",
        made("wan.model.HumoWanModel", **_WAN),
        called(1000.0, audio_embed=lambda d, b, s, n: d.prompt(b, s[0], 8, 5, 1280), reference_latent=frames(4, 1)),
    ),
    video(
        "wan_scail",
        made("wan.model.SCAILWanModel", **{**_I2V, "in_dim": 4}),
        called(
            1000.0,
            pose_latents=lambda d, b, s, n: d.prompt(b, 4, s[0], s[1] // 2, s[2] // 2),
            reference_latent=frames(4, 1),
            **_CLIP,
        ),
    ),
    video(
        "wan_scail2",
        made("wan.model.SCAIL2WanModel", **{**_I2V, "in_dim": 4, "mask_in_dim": 3}),
        called(
            1000.0,
            pose_latents=lambda d, b, s, n: d.prompt(b, 4, s[0], s[1] // 2, s[2] // 2),
            sam_latents=lambda d, b, s, n: d.prompt(b, 3, s[0], s[1] // 2, s[2] // 2),
            ref_mask_latents=lambda d, b, s, n: d.prompt(b, 3, s[0] + 1, *s[1:]),
            reference_latent=frames(4, 1),
            ref_mask_flag=same(False),
            **_CLIP,
        ),
    ),
    video(
        "wan_animate2",
        made("wan.model_animate2.WanAnimate2Model", **{**_I2V, "in_dim": 12}),
        called(1000.0, channels=12, pose_latents=lambda d, b, s, n: d.prompt(b, 4, s[0] - 1, *s[1:]), **_CLIP),
    ),
    video("wan_causal", made("wan.ar_model.CausalWanModel", **_WAN), called(1000.0)),
    video(
        "wan_dancer",
        made(
            "wan.model_wandancer.WanDancerModel", **_I2V, audio_inject_layers=[0, 1], music_dim=32, music_latent_dim=32
        ),
        called(
            1000.0,
            channels=8,
            audio_embed=lambda d, b, s, n: d.prompt(b, 24, 35),
            clip_fea_ref=pooled(5, 1280),
            **_CLIP,
        ),
        sizes=((3, 8, 8), (3, 8, 12), (5, 12, 8), (2, 8, 16)),
    ),
    video(
        "wan_dancer_24",
        made(
            "wan.model_wandancer.WanDancerModel", **_I2V, audio_inject_layers=[0, 1], music_dim=32, music_latent_dim=32
        ),
        called(1000.0, channels=8, audio_embed=lambda d, b, s, n: d.prompt(b, 24, 35), fps=same(24.0), **_CLIP),
        sizes=((3, 8, 8), (3, 8, 12), (5, 12, 8), (2, 8, 16)),
    ),
    video(
        "wan_animate",
        made("wan.model_animate.AnimateWanModel", **{**_I2V, "num_layers": lambda n: 5 * n}),
        called(1000.0, channels=8, pose_latents=lambda d, b, s, n: d.prompt(b, 16, s[0] - 1, *s[1:]), **_CLIP),
    ),
    video("cosmos1", made("cosmos.model.GeneralDIT", **{**_COSMOS1, "patch_spatial": 2}), called()),
    video("cosmos1_fps", made("cosmos.model.GeneralDIT", **_COSMOS1), called(fps=same(24))),
    video("cosmos2", made("cosmos.predict2.MiniTrainDIT", **_COSMOS2), called()),
    video("cosmos2_per_frame", made("cosmos.predict2.MiniTrainDIT", **_COSMOS2), per_frame(called(), lambda s: s[0])),
    video("anima", made("anima.model.Anima", **{**_COSMOS2, "crossattn_emb_channels": 16}), called()),
    video(
        "mochi",
        made(
            "genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
            patch_size=2,
            in_channels=4,
            hidden_size_x=32,
            hidden_size_y=16,
            depth=lambda n: n + 1,
            num_heads=2,
            mlp_ratio_x=384.0,
            mlp_ratio_y=4.0,
            learn_sigma=False,
            qk_norm=True,
            qkv_bias=False,
            out_bias=True,
            attn_drop=0.0,
            posenc_preserve_area=True,
            use_t5=True,
            timestep_scale=1000.0,
            t5_feat_dim=16,
            t5_token_length=77,
        ),
        called(attention_mask=mask, num_tokens=lambda d, b, s, n: n - 2),
    ),
    video(
        "kandinsky5",
        made(
            "kandinsky5.model.Kandinsky5",
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=16,
            in_text_dim2=8,
            time_dim=24,
            model_dim=32,
            ff_dim=64,
            visual_embed_dim=36,
            num_text_blocks=2,
            num_visual_blocks=depth,
            axes_dims=(4, 6, 6),
        ),
        called(channels=9, y=pooled(8), time_dim_replace=lambda d, b, s, n: d.prompt(b, 4, 1, *s[1:])),
    ),
    video("ltxv", made("lightricks.model.LTXVModel", **_LTXV), called(attention_mask=mask)),
    video(
        "ltxv_per_token",
        made("lightricks.model.LTXVModel", **_LTXV, cross_attention_adaln=True),
        per_frame(called(attention_mask=same(None)), lambda s: s[0] * s[1] * s[2]),
    ),
    video(
        "joyimage",
        made(
            "joyimage.model.JoyImageTransformer3DModel",
            in_channels=4,
            hidden_size=32,
            num_attention_heads=2,
            text_dim=16,
            num_layers=depth,
            rope_dim_list=[4, 6, 6],
        ),
        called(1000.0, ref_latents=lambda d, b, s, n: [d.prompt(b, 4, 1, 8, 6)]),
    ),
    video("ltxav", made("lightricks.av_model.LTXAVModel", **_AV), both),
    video(
        "ltxav_gated",
        made(
            "lightricks.av_model.LTXAVModel",
            **_AV,
            apply_gated_attention=True,
            cross_attention_adaln=True,
            rope_type="split",
        ),
        both,
    ),
    video(
        "cogvideox",
        made("cogvideo.model.CogVideoXTransformer3DModel", **_COG, use_rotary_positional_embeddings=True),
        called(1000.0),
    ),
    video(
        "cogvideox15",
        made(
            "cogvideo.model.CogVideoXTransformer3DModel",
            **_COG,
            use_rotary_positional_embeddings=True,
            patch_size_t=2,
            ofs_embed_dim=24,
            patch_bias=False,
        ),
        called(1000.0, ofs=each(2.0)),
    ),
    video(
        "hunyuan_video15",
        made(
            "hunyuan_video.model.HunyuanVideo",
            **{
                **_HUNYUAN_VIDEO,
                "guidance_embed": False,
                "vec_in_dim": None,
                "byt5": True,
                "use_cond_type_embedding": True,
                "vision_in_dim": 24,
            },
        ),
        called(txt_byt5=pooled(7, 1472), clip_fea=pooled(5, 24)),
    ),
    video(
        "seedvr2",
        made(
            "seedvr.model.NaDiT",
            norm_eps=1e-5,
            num_layers=lambda n: 2 * n,
            mlp_type="swiglu",
            vid_dim=32,
            txt_in_dim=16,
            heads=2,
            head_dim=16,
            mm_layers=2,
            rope_dim=8,
            rope_type="mmrope3d",
            vid_out_norm="x",
        ),
        seed_vr,
    ),
]
