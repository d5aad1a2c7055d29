# SPDX-License-Identifier: Apache-2.0
"""Transformers that denoise pictures."""

from __future__ import annotations

from typing import Any

import torch
from inputs import Draw, Size

from diffusers_families.family import NO_WORDS, Family, Give, Inputs, grid, mask, tokens, without, words


def latents(channels: int = 4, width: int = 16, greatest: float = 1000.0, **more: Any) -> Give:
    """A picture in latents, its time and its prompt."""

    def give(d: Draw, batch: int, size: Size, length: int) -> Inputs:
        time = d.time(batch, greatest)
        return {"hidden_states": d.noise(batch, channels, *size), "timestep": time, **words(d, batch, length, width)}

    return give


def packed(channels: int, axes: int = 3, *, guided: bool = False, masked: bool = False, batched: bool = False) -> Give:
    """A picture as tokens with their places, as Flux takes it."""

    def give(d: Draw, batch: int, size: Size, length: int) -> Inputs:
        places, text = grid(size[0] // 2, size[1] // 2, axes), torch.zeros(length, axes)
        text[:, -1] = torch.arange(length) if batched else 0.0
        given = {
            **{"hidden_states": d.noise(batch, len(places), channels), "timestep": d.time(batch, 1.0)},
            **{"img_ids": places, "txt_ids": text, **words(d, batch, length)},
        }
        if batched:
            given.update(img_ids=places.expand(batch, -1, -1), txt_ids=text.expand(batch, -1, -1))
        if guided:
            given["guidance"] = torch.full((batch,), 3.5)
        if masked:
            given["attention_mask"] = mask(batch, length + len(places))
        return given

    return give


def sized(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    side = torch.tensor([[8 * size[0], 8 * size[1]]]).repeat(batch, 1)
    more = {"original_size": side, "target_size": side, "crop_coords": torch.zeros_like(side)}
    return {**latents()(d, batch, size, length), **more}


def glm(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = sized(d, batch, size, length)
    del given["original_size"]
    places = size[0] * size[1] // 4
    drop = torch.zeros(batch, places, dtype=torch.bool)
    return {**given, "prior_token_id": tokens(d, 64, batch, places), "prior_token_drop": drop}


def dit(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = {"hidden_states": d.noise(batch, 4, *size), "timestep": d.time(batch, 1000.0).long()}
    return {**given, "class_labels": tokens(d, 8, batch), "return_dict": False}


def ernie(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {
        **{"hidden_states": d.noise(batch, 16, *size), "timestep": d.time(batch, 1000.0), "return_dict": False},
        **{"text_bth": d.prompt(batch, length, 16), "text_lens": torch.tensor([length - i for i in range(batch)])},
    }


def hidream(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {
        **{"hidden_states": d.noise(batch, 4, *size), "timesteps": d.time(batch, 1000.0), "return_dict": False},
        **{"encoder_hidden_states_t5": d.prompt(batch, length, 8), "pooled_embeds": d.prompt(batch, 8)},
        "encoder_hidden_states_llama3": d.prompt(4, batch, length, 4),
    }


def hunyuan_dit(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    angles = torch.outer(torch.arange(size[0] * size[1] // 4).float(), torch.tensor([1.0, 0.5, 0.25, 0.1] * 2))
    return {
        **latents(width=8)(d, batch, size, 4),
        **{"text_embedding_mask": mask(batch, 4, torch.int64), "text_embedding_mask_t5": mask(batch, 6, torch.int64)},
        **{"encoder_hidden_states_t5": d.prompt(batch, 6, 8), "style": torch.zeros(batch, dtype=torch.int64)},
        **{"image_meta_size": 1000 * torch.ones(batch, 6), "image_rotary_emb": (angles.cos(), angles.sin())},
    }


def hunyuan_image(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    second = {"encoder_hidden_states_2": d.prompt(batch, 12, 8), "encoder_attention_mask_2": mask(batch, 12)}
    return {**latents()(d, batch, size, length), "encoder_attention_mask": mask(batch, length), **second}


def ideogram(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    places = grid(size[0] // 2, size[1] // 2).long()
    whole = length + len(places)
    noise, text = torch.zeros(batch, whole, 8), torch.zeros(batch, whole, 16)
    noise[:, length:], text[:, :length] = d.noise(batch, len(places), 8), d.prompt(batch, length, 16)
    where = torch.cat([torch.arange(length)[:, None].expand(-1, 3), places + 65536]).expand(batch, -1, -1)
    kinds = torch.tensor([3] * length + [2] * len(places)).expand(batch, -1)
    return {
        **{"hidden_states": noise, "encoder_hidden_states": text, "timestep": d.time(batch, 1.0), "indicator": kinds},
        **{"position_ids": where, "segment_ids": torch.ones(batch, whole, dtype=torch.long), "return_dict": False},
    }


def krea(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    places = grid(size[0] // 2, size[1] // 2)
    return {
        **{"hidden_states": d.noise(batch, len(places), 8), "encoder_hidden_states": d.prompt(batch, length, 2, 16)},
        **{"position_ids": torch.cat([torch.zeros(length, 3), places]), "timestep": d.time(batch, 1.0)},
        **{"encoder_attention_mask": mask(batch, length), "return_dict": False},
    }


def lumina(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    turns = get_2d_rotary_pos_embed_lumina(16, 32, 32)
    given = latents(width=32, greatest=1.0)(d, batch, size, length)
    return {**given, "encoder_mask": mask(batch, length), "image_rotary_emb": turns, "cross_attention_kwargs": {}}


def lumina2(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {**latents(greatest=1.0)(d, batch, size, length), "encoder_attention_mask": mask(batch, length)}


def shaped(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    height, width = size[0] // 2, size[1] // 2
    return {
        **{"hidden_states": d.noise(batch, height * width, 16), "timestep": d.time(batch, 1.0)},
        **{"img_shapes": [[(1, height, width)]] * batch, **words(d, batch, length)},
        "encoder_hidden_states_mask": mask(batch, length),
    }


def qwen21(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = shaped(d, batch, size, length)
    picture = torch.arange(length + given["hidden_states"].shape[1] // 4) >= length  # one place for four tokens
    return {**given, "img_mask": picture.expand(batch, -1)}


def omnigen(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    whole = length + 1 + size[0] * size[1] // 4
    return {
        **{"hidden_states": d.noise(batch, 4, *size), "timestep": d.time(batch, 1.0), "return_dict": False},
        **{"input_ids": tokens(d, 10, batch, length), "attention_mask": torch.ones(batch, whole, whole)},
        **{"position_ids": torch.arange(whole).expand(batch, -1), "input_img_latents": [], "input_image_sizes": {}},
    }


def prior(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {
        **{"hidden_states": d.noise(batch, 8), "timestep": d.time(batch, 1000.0), "return_dict": False},
        **{"proj_embedding": d.prompt(batch, 8), "encoder_hidden_states": d.prompt(batch, 7, 8)},
        "attention_mask": mask(batch, 7),
    }


def z_image(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {
        **{"x": [d.noise(16, 1, *size) for _ in range(batch)], "t": d.time(batch, 1.0), "return_dict": False},
        "cap_feats": [d.prompt(length - i, 16) for i in range(batch)],
    }


def uvit(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {
        **{"input_ids": (d.noise(batch, *size).abs() * 1000).long() % 33, "pooled_text_emb": d.prompt(batch, 16)},
        **{"encoder_hidden_states": d.prompt(batch, length, 16), "micro_conds": 100 * d.prompt(batch, 5).abs()},
    }


def conditioned(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = {"hidden_states": d.noise(batch, 8, *size), "encoder_hidden_states": d.prompt(batch, length, 16)}
    return {**given, "return_dict": False}


_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
_FLUX: dict[str, Any] = {**_HEADS, "patch_size": 1, "in_channels": 8, "joint_attention_dim": 16}
_BOTH = ("num_layers", "num_single_layers")
_AXES = (4, 6, 6)
_MIX: dict[str, Any] = {**_HEADS, "patch_size": 2, "in_channels": 4, "out_channels": 4, "text_embed_dim": 16}
_MIX |= {"time_embed_dim": 8, "condition_dim": 4}
_QWEN: dict[str, Any] = {**_HEADS, "in_channels": 16, "out_channels": 4, "axes_dims_rope": (8, 4, 4)}

ROWS = [
    Family(
        "auraflow",
        "AuraFlowTransformer2DModel",
        latents(greatest=1.0),
        {
            **_HEADS,
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 16,
            "pos_embed_max_size": 256,
        },
        depth=("num_mmdit_layers", "num_single_dit_layers"),
    ),
    Family("bria", "BriaTransformer2DModel", packed(8), {**_FLUX, "axes_dims_rope": _AXES}, depth=_BOTH),
    Family(
        "bria_fibo",
        "BriaFiboTransformer2DModel",
        lambda d, b, s, n: {**packed(8)(d, b, s, n), "text_encoder_layers": [d.prompt(b, n, 8) for _ in range(4)]},
        {**_FLUX, "axes_dims_rope": _AXES, "text_encoder_dim": 8},
        depth=_BOTH,
    ),
    Family(
        "chroma",
        "ChromaTransformer2DModel",
        packed(8, masked=True),
        {
            **_FLUX,
            "axes_dims_rope": _AXES,
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 2,
        },
        depth=_BOTH,
    ),
    Family("cogview3", "CogView3PlusTransformer2DModel", sized, {**_MIX, "pos_embed_max_size": 32, "sample_size": 16}),
    Family("cogview4", "CogView4Transformer2DModel", sized, {**_MIX, "sample_size": 16}),
    Family("glm_image", "GlmImageTransformer2DModel", glm, {**_MIX, "prior_vq_quantizer_codebook_size": 64}),
    Family(
        "dit",
        "DiTTransformer2DModel",
        dit,
        {**_HEADS, "in_channels": 4, "out_channels": 8, "num_embeds_ada_norm": 8, "sample_size": 16},
        lengths=NO_WORDS,
        moves=without("length"),
        sizes=((16, 16), (12, 12), (20, 20)),
        bound=("pos_embed",),
    ),
    Family(
        "ernie",
        "ErnieImageTransformer2DModel",
        ernie,
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "ffn_hidden_size": 32,
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 1,
            "text_in_dim": 16,
            "rope_axes_dim": (8, 4, 4),
        },
    ),
    Family(
        "flux2",
        "Flux2Transformer2DModel",
        packed(8, 4, guided=True, batched=True),
        {**_FLUX, "axes_dims_rope": (4, 4, 4, 4)},
        depth=_BOTH,
    ),
    Family(
        "flux3",
        "Flux3Transformer2DModel",
        packed(8, 4),
        {**_HEADS, "in_channels": 8, "cond_in_channels": 8, "joint_attention_dim": 16, "axes_dims_rope": (4, 4, 4, 4)},
        depth=_BOTH,
    ),
    Family(
        "hidream",
        "HiDreamImageTransformer2DModel",
        hidream,
        {
            **_HEADS,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "caption_channels": [8, 4],
            "text_emb_dim": 8,
            "num_routed_experts": 4,
            "num_activated_experts": 2,
            "axes_dims_rope": (8, 4, 4),
            "max_resolution": (32, 32),
            "llama_layers": (0, 1, 2, 3),
            "force_inference_output": True,
        },
        depth=_BOTH,
    ),
    Family(
        "hunyuan_dit",
        "HunyuanDiT2DModel",
        hunyuan_dit,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "cross_attention_dim": 8,
            "cross_attention_dim_t5": 8,
            "pooled_projection_dim": 4,
            "hidden_size": 16,
            "text_len": 4,
            "text_len_t5": 6,
            "activation_fn": "gelu-approximate",
            "num_layers": 4,
        },
        depth=(),
        lengths=NO_WORDS,
        moves=without("length"),
    ),
    Family(
        "hunyuan_image",
        "HunyuanImageTransformer2DModel",
        hunyuan_image,
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": 16,
            "text_embed_2_dim": 8,
            "rope_axes_dim": (8, 8),
            "patch_size": (2, 2),
        },
        depth=(*_BOTH, "num_refiner_layers"),
    ),
    Family(
        "ideogram4",
        "Ideogram4Transformer2DModel",
        ideogram,
        {
            **_HEADS,
            "in_channels": 8,
            "intermediate_size": 32,
            "adaln_dim": 16,
            "llm_features_dim": 16,
            "mrope_section": (4, 2, 2),
        },
    ),
    Family(
        "krea2",
        "Krea2Transformer2DModel",
        krea,
        {
            **_HEADS,
            "in_channels": 8,
            "num_key_value_heads": 1,
            "intermediate_size": 32,
            "timestep_embed_dim": 8,
            "text_hidden_dim": 16,
            "num_text_layers": 2,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 1,
            "text_intermediate_size": 16,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (8, 4, 4),
        },
    ),
    Family(
        "longcat_image",
        "LongCatImageTransformer2DModel",
        packed(8, guided=True),
        {**_FLUX, "pooled_projection_dim": 16, "axes_dims_rope": _AXES},
        depth=_BOTH,
    ),
    Family(
        "lumina_next",
        "LuminaNextDiT2DModel",
        lumina,
        {
            "sample_size": 16,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "learn_sigma": False,
            "cross_attention_dim": 32,
        },
    ),
    Family(
        "lumina2",
        "Lumina2Transformer2DModel",
        lumina2,
        {
            "sample_size": 16,
            "in_channels": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "axes_dim_rope": (8, 4, 4),
            "axes_lens": (128, 64, 64),
            "cap_feat_dim": 16,
        },
        depth=("num_layers", "num_refiner_layers"),
    ),
    Family(
        "nucleus_moe",
        "NucleusMoEImageTransformer2DModel",
        shaped,
        {
            **_QWEN,
            "attention_head_dim": 32,
            "axes_dims_rope": (16, 8, 8),
            "patch_size": 2,
            "joint_attention_dim": 16,
            "moe_enabled": True,
            "num_experts": 4,
            "moe_intermediate_dim": 128,
            "num_layers": 5,
            "capacity_factors": [2.0] * 5,
        },
        depth=(),
    ),
    Family(
        "omnigen",
        "OmniGenTransformer2DModel",
        omnigen,
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "pad_token_id": 0,
            "vocab_size": 100,
            "in_channels": 4,
            "time_step_dim": 8,
            "rope_scaling": {"long_factor": [1.0 + i for i in range(8)], "short_factor": [1.0 + i for i in range(8)]},
        },
    ),
    Family(
        "ovis",
        "OvisImageTransformer2DModel",
        packed(8),
        {**_FLUX, "out_channels": 8, "axes_dims_rope": _AXES},
        depth=_BOTH,
    ),
    Family(
        "prx",
        "PRXTransformer2DModel",
        latents(greatest=1.0),
        {
            "in_channels": 4,
            "patch_size": 2,
            "context_in_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "axes_dim": [8, 8],
        },
        depth=("depth",),
    ),
    Family(
        "prior",
        "PriorTransformer",
        prior,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "embedding_dim": 8,
            "num_embeddings": 7,
            "additional_embeddings": 4,
        },
        part="prior",
        sizes=((1,),),
        lengths=NO_WORDS,
        moves=without("length"),
    ),
    Family("qwen", "QwenImageTransformer2DModel", shaped, {**_QWEN, "patch_size": 2, "joint_attention_dim": 16}),
    Family("qwen21", "QwenImage21Transformer2DModel", qwen21, {**_QWEN, "out_channels": 16, "context_in_dim": 16}),
    Family(
        "sana",
        "SanaTransformer2DModel",
        latents(),
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 16,
            "sample_size": 16,
        },
    ),
    Family(
        "z_image",
        "ZImageTransformer2DModel",
        z_image,
        {
            "in_channels": 16,
            "dim": 32,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16,
            "axes_dims": [8, 4, 4],
            "axes_lens": [256, 32, 32],
        },
        depth=("n_layers", "n_refiner_layers"),
    ),
    Family(
        "joy_image",
        "JoyImageEditTransformer3DModel",
        lambda d, b, s, n: latents(greatest=1000.0)(d, b, (1, *s), n),
        {
            "patch_size": [1, 2, 2],
            "in_channels": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "text_dim": 16,
            "rope_dim_list": [4, 6, 6],
        },
    ),
    Family(
        "uvit",
        "UVit2DModel",
        uvit,
        {
            "hidden_size": 32,
            "cond_embed_dim": 16,
            "micro_cond_encode_dim": 8,
            "micro_cond_embed_dim": 40,
            "encoder_hidden_size": 16,
            "vocab_size": 34,
            "codebook_size": 32,
            "in_channels": 32,
            "block_out_channels": 32,
            "num_res_blocks": 1,
            "downsample": True,
            "upsample": True,
            "block_num_heads": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        },
        depth=("num_hidden_layers",),
        moves=without("step"),
    ),
    Family(
        "spatial",
        "Transformer2DModel",
        conditioned,
        {**_HEADS, "in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": 16},
        moves=without("step"),
    ),
]
