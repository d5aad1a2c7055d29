# SPDX-License-Identifier: Apache-2.0
"""Transformers that denoise videos."""

from __future__ import annotations

from typing import Any

import torch
from inputs import Draw, Size

from diffusers_families.family import VIDEO, Family, Give, Inputs, mask, words


def video(channels: int = 4, *, frames_first: bool = False, masked: bool = False, greatest: float = 1000.0) -> Give:
    """A video in latents, its time and its prompt."""

    def give(d: Draw, batch: int, size: Size, length: int) -> Inputs:
        shape = (size[0], channels, *size[1:]) if frames_first else (channels, *size)
        given = {"hidden_states": d.noise(batch, *shape), "timestep": d.time(batch, greatest)}
        more = {"encoder_attention_mask": mask(batch, length)} if masked else {}
        return {**given, **words(d, batch, length), **more}

    return give


def anyflow(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    times = d.time(batch, 1000.0)[:, None].expand(-1, size[0]).contiguous()
    given = {**video(frames_first=True)(d, batch, size, length), "timestep": times, "r_timestep": times / 2}
    return given


def anyflow_far(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {**anyflow(d, batch, (4, *size[1:]), length), "chunk_partition": [2, 2]}


def cogvideox(*, turning: bool) -> Give:
    def give(d: Draw, batch: int, size: Size, length: int) -> Inputs:
        given = video(frames_first=True)(d, batch, size, length)
        if turning:
            count = size[0] * size[1] * size[2] // 4
            angles = torch.outer(torch.arange(count).float(), 0.5 ** torch.arange(8)).repeat_interleave(2, 1)
            given["image_rotary_emb"] = (angles.cos(), angles.sin())
        return given

    return give


def consisid(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = cogvideox(turning=True)(d, batch, size, length)
    return {**given, "id_vit_hidden": [d.prompt(batch, 2, 2)] * 5, "id_cond": d.prompt(batch, 2)}


def cosmos(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {**video()(d, batch, size, length), "fps": 30, "padding_mask": torch.zeros(1, 1, *size[1:])}


def cosmos_to_world(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    condition = torch.zeros(batch, 1, *size)
    condition[:, :, :1] = 1
    return {**cosmos(d, batch, size, length), "condition_mask": condition}


def easyanimate(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {**video()(d, batch, size, length), "encoder_hidden_states_t5": d.prompt(batch, 12, 8)}


def helios(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = video()(d, batch, size, length)
    at = 0
    for name, frames in (("long", 8), ("mid", 2), ("short", 3)):
        given[f"latents_history_{name}"] = d.prompt(batch, 4, frames, *size[1:])
        given[f"indices_latents_history_{name}"] = torch.arange(at, at + frames).expand(batch, -1).float()
        at += frames
    given["indices_hidden_states"] = torch.arange(at, at + size[0]).expand(batch, -1).float()
    return given


def hunyuan(channels: int = 4, *, guided: bool = True) -> Give:
    def give(d: Draw, batch: int, size: Size, length: int) -> Inputs:
        given = video(channels, masked=True)(d, batch, size, length)
        given["pooled_projections"] = d.prompt(batch, 8)
        return {**given, "guidance": torch.full((batch,), 6000.0)} if guided else given

    return give


def hunyuan15(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    second = {"encoder_hidden_states_2": d.prompt(batch, 6, 8), "encoder_attention_mask_2": mask(batch, 6)}
    return {**video(masked=True)(d, batch, size, length), **second, "image_embeds": torch.zeros(batch, 3, 12)}


def framepack(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = {**hunyuan()(d, batch, size, length), "image_embeds": d.prompt(batch, 7, 16)}
    for name, frames in (("clean", 2), ("history_2x", 2), ("history_4x", 8)):
        given[f"latents_{name}"] = d.prompt(batch, 4, frames, *size[1:])
        given[f"indices_latents_{name}"] = torch.arange(frames)
    return {**given, "indices_latents": torch.arange(20, 20 + size[0])}


def kandinsky(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    places = [torch.arange(size[0]), torch.arange(size[1] // 2), torch.arange(size[2] // 2)]
    return {
        **{"hidden_states": d.noise(batch, *size, 4), "timestep": d.time(batch, 1000.0), **words(d, batch, length)},
        **{"pooled_projections": d.prompt(batch, 8), "visual_rope_pos": places, "text_rope_pos": torch.arange(length)},
    }


def ltx(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {
        **{"hidden_states": d.noise(batch, size[0] * size[1] * size[2], 4), "timestep": d.time(batch, 1000.0)},
        **{"num_frames": size[0], "height": size[1], "width": size[2], **words(d, batch, length)},
        **{"encoder_attention_mask": mask(batch, length), "rope_interpolation_scale": (1 / 3, 32.0, 32.0)},
    }


def ltx2(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = ltx(d, batch, size, length)
    del given["rope_interpolation_scale"]
    frames = 3 * size[0]
    sound = {"audio_hidden_states": d.noise(batch, frames, 4), "audio_num_frames": frames, "fps": 25.0}
    return {**given, **sound, "audio_encoder_hidden_states": d.prompt(batch, length, 16)}


def motif(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {**video(9, masked=True)(d, batch, size, length), "image_embeds": d.prompt(batch, 5, 8)}


def pictured(channels: int = 4) -> Give:
    """As image-to-video takes it: the features of a picture beside the prompt."""

    def give(d: Draw, batch: int, size: Size, length: int) -> Inputs:
        return {**video(channels)(d, batch, size, length), "encoder_hidden_states_image": d.prompt(batch, 9, 16)}

    return give


def vace(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {**video()(d, batch, size, length), "control_hidden_states": d.prompt(batch, 6, *size)}


def animate(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = pictured(12)(d, batch, (size[0] + 1, *size[1:]), length)
    face = d.prompt(batch, 3, 4 * size[0] - 3, 16, 16)
    return {**given, "pose_hidden_states": d.prompt(batch, 4, *size), "face_pixel_values": face}


def minimax(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    frames, count = 6, size[0] * size[1] * size[2] // 4
    whole = length + frames + count
    text, sound, picture = torch.arange(whole).split([length, frames, count])
    tags, noise_levels = torch.zeros(whole, dtype=torch.long), torch.zeros(whole, dtype=torch.long)
    tags[text], tags[sound], noise_levels[sound] = 1, 2, 1
    return {
        **{"hidden_states": d.noise(batch, count, 16), "audio_hidden_states": d.noise(batch, frames, 6)},
        **{"timestep": d.time(2, 1000.0), "timestep_indices": noise_levels, "token_tags": tags},
        **{"position_ids": torch.arange(whole).float()[:, None].repeat(1, 3), **words(d, batch, length)},
        **{"video_indices": picture, "audio_indices": sound, "text_indices": text},
    }


def joy_plus(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    height, width = size[1] // 2, size[2] // 2
    shapes = [[(1, height, width), (1, height, width)]] * batch
    noise = d.noise(batch, 2 * height * width, 4, 1, 2, 2)
    given = {"hidden_states": noise, "timestep": d.time(batch, 1000.0), "shape_list": shapes}
    return {**given, **words(d, batch, length)}


_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4}
_WAN: dict[str, Any] = {**_HEADS, "attention_head_dim": 12, "text_dim": 16, "freq_dim": 32, "ffn_dim": 32}
_WAN |= {"cross_attn_norm": True, "rope_max_seq_len": 32}
_COG: dict[str, Any] = {**_HEADS, "time_embed_dim": 8, "text_embed_dim": 16, "sample_width": 8, "sample_height": 8}
_COG |= {"use_rotary_positional_embeddings": True}
_COSMOS: dict[str, Any] = {**_HEADS, "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (8, 32, 32), "mlp_ratio": 2}
_HUNYUAN: dict[str, Any] = {**_HEADS, "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6)}
_HUNYUAN |= {"patch_size": 1, "guidance_embeds": True}
_ALL = ("num_layers", "num_single_layers", "num_refiner_layers")
_FACE: dict[str, Any] = {str(4 * 2**i): 16 for i in range(3)}
_V: dict[str, Any] = {"sizes": VIDEO}
LARGE = ((3, 16, 16), (3, 16, 24), (5, 24, 16))  # some of the history is patched eight by eight

ROWS = [
    Family(
        "allegro",
        "AllegroTransformer3DModel",
        video(masked=True),
        {
            **_HEADS,
            "attention_head_dim": 24,
            "cross_attention_dim": 48,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 8,
            "caption_channels": 16,
        },
        **_V,
    ),
    Family("anyflow", "AnyFlowTransformer3DModel", anyflow, {**_WAN, "gate_value": 0.25, "deltatime_type": "r"}, **_V),
    Family(
        "anyflow_far",
        "AnyFlowFARTransformer3DModel",
        anyflow_far,
        {**_WAN, "gate_value": 0.25, "deltatime_type": "r", "compressed_patch_size": (1, 4, 4), "full_chunk_limit": 3},
        sizes=((4, 8, 8), (4, 8, 16), (4, 16, 8)),
    ),
    Family(
        "chronoedit",
        "ChronoEditTransformer3DModel",
        video(),
        {**_WAN, "rope_temporal_skip_len": 8},
        sizes=((2, 8, 8), (2, 8, 12), (5, 12, 8), (2, 10, 14)),
    ),
    Family("cogvideox", "CogVideoXTransformer3DModel", cogvideox(turning=True), _COG, **_V),
    Family(
        "cogvideox_2b",
        "CogVideoXTransformer3DModel",
        cogvideox(turning=False),
        {**_COG, "use_rotary_positional_embeddings": False, "sample_frames": 9, "max_text_seq_length": 20},
        sizes=((3, 8, 8),),
        lengths=(20,),
        moves=("seed", "prompt", "step"),
    ),
    Family(
        "consisid",
        "ConsisIDTransformer3DModel",
        consisid,
        {
            **_COG,
            "cross_attn_interval": 1,
            "is_train_face": True,
            "cross_attn_dim_head": 4,
            "cross_attn_num_heads": 2,
            "LFE_id_dim": 2,
            "LFE_vit_dim": 2,
            "LFE_depth": 5,
            "LFE_dim_head": 8,
            "LFE_num_heads": 2,
            "LFE_num_id_token": 1,
            "LFE_num_querie": 2,
            "LFE_output_dim": 21,
            "LFE_ff_mult": 1,
            "LFE_num_scale": 5,
        },
        **_V,
    ),
    Family("cosmos", "CosmosTransformer3DModel", cosmos, {**_COSMOS, "extra_pos_embed_type": "learnable"}, **_V),
    Family(
        "cosmos_to_world",
        "CosmosTransformer3DModel",
        cosmos_to_world,
        {**_COSMOS, "in_channels": 5, "extra_pos_embed_type": None},
        **_V,
    ),
    Family(
        "easyanimate",
        "EasyAnimateTransformer3DModel",
        easyanimate,
        {
            **_HEADS,
            "text_embed_dim": 16,
            "text_embed_dim_t5": 8,
            "time_embed_dim": 8,
            "patch_size": 2,
            "sample_height": 8,
            "sample_width": 8,
        },
        depth=("num_layers", "mmdit_layers"),
        **_V,
    ),
    Family(
        "helios",
        "HeliosTransformer3DModel",
        helios,
        {**{k: v for k, v in _WAN.items() if k != "rope_max_seq_len"}, "rope_dim": (4, 4, 4)},
        sizes=LARGE,
    ),
    Family("hunyuan_video", "HunyuanVideoTransformer3DModel", hunyuan(), _HUNYUAN, depth=_ALL, **_V),
    Family(
        "hunyuan_video_i2v",
        "HunyuanVideoTransformer3DModel",
        hunyuan(9, guided=False),
        {**_HUNYUAN, "in_channels": 9, "guidance_embeds": False, "image_condition_type": "latent_concat"},
        depth=_ALL,
        **_V,
    ),
    Family(
        "hunyuan_video_token",
        "HunyuanVideoTransformer3DModel",
        hunyuan(),
        {**_HUNYUAN, "image_condition_type": "token_replace"},
        depth=_ALL,
        **_V,
    ),
    Family(
        "hunyuan_video15",
        "HunyuanVideo15Transformer3DModel",
        hunyuan15,
        {
            **_HEADS,
            "text_embed_dim": 16,
            "text_embed_2_dim": 8,
            "image_embed_dim": 12,
            "rope_axes_dim": (4, 6, 6),
            "patch_size": 1,
            "target_size": 16,
            "task_type": "t2v",
        },
        depth=("num_layers", "num_refiner_layers"),
        **_V,
    ),
    Family(
        "framepack",
        "HunyuanVideoFramepackTransformer3DModel",
        framepack,
        {**_HUNYUAN, "patch_size": 2, "has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True},
        depth=_ALL,
        sizes=LARGE,
    ),
    Family(
        "kandinsky5",
        "Kandinsky5Transformer3DModel",
        kandinsky,
        {"in_text_dim": 16, "in_text_dim2": 8, "time_dim": 16, "model_dim": 32, "ff_dim": 32, "axes_dims": (4, 6, 6)},
        depth=("num_text_blocks", "num_visual_blocks"),
        **_V,
    ),
    Family(
        "ltx",
        "LTXVideoTransformer3DModel",
        ltx,
        {**_HEADS, "cross_attention_dim": 32, "caption_channels": 16},
        **_V,
    ),
    Family(
        "ltx2",
        "LTX2VideoTransformer3DModel",
        ltx2,
        {
            **_HEADS,
            "cross_attention_dim": 32,
            "caption_channels": 16,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 16,
            "rope_double_precision": False,
        },
        **_V,
    ),
    Family(
        "mochi",
        "MochiTransformer3DModel",
        video(masked=True),
        {**_HEADS, "pooled_projection_dim": 16, "text_embed_dim": 16, "time_embed_dim": 8, "max_sequence_length": 77},
        **_V,
    ),
    Family(
        "motif",
        "MotifVideoTransformer3DModel",
        motif,
        {
            **_HEADS,
            "in_channels": 9,
            "patch_size": 1,
            "text_embed_dim": 16,
            "image_embed_dim": 8,
            "rope_axes_dim": (4, 6, 6),
            "num_decoder_layers": 1,
        },
        depth=("num_layers", "num_single_layers"),
        moves=("seed", "step"),  # the prompt acts, but by less than can be asked for
        **_V,
    ),
    Family(
        "sana_video",
        "SanaVideoTransformer3DModel",
        video(),
        {
            **_HEADS,
            "attention_head_dim": 12,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12,
            "cross_attention_dim": 24,
            "caption_channels": 16,
            "sample_size": 8,
            "rope_max_seq_len": 32,
        },
        **_V,
    ),
    Family("skyreels", "SkyReelsV2Transformer3DModel", video(), _WAN, **_V),
    Family("wan", "WanTransformer3DModel", video(), _WAN, **_V),
    Family(
        "wan_i2v",
        "WanTransformer3DModel",
        pictured(8),
        {**_WAN, "in_channels": 8, "image_dim": 16, "added_kv_proj_dim": 24},
        **_V,
    ),
    Family(
        "wan_vace",
        "WanVACETransformer3DModel",
        vace,
        {**_WAN, "num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 6},
        depth=(),
        **_V,
    ),
    Family(
        "wan_animate",
        "WanAnimateTransformer3DModel",
        animate,
        {
            **_WAN,
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": 16,
            "motion_encoder_channel_sizes": _FACE,
            "motion_encoder_size": 16,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 16,
            "face_encoder_hidden_dim": 16,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 2,
        },
        **_V,
    ),
    Family(
        "minimax_h3",
        "MiniMaxH3Transformer3DModel",
        minimax,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "hidden_size": 24,
            "ffn_dim": 32,
            "in_channels": 4,
            "audio_in_channels": 6,
            "text_dim": 16,
            "freq_dim": 8,
            "time_embed_hidden_dim": 24,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        depth=("num_layers", "num_refiner_layers"),
        **_V,
    ),
    Family(
        "joy_image_plus",
        "JoyImageEditPlusTransformer3DModel",
        joy_plus,
        {
            "patch_size": [1, 2, 2],
            "in_channels": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "text_dim": 16,
            "rope_dim_list": [4, 6, 6],
        },
        **_V,
    ),
]
