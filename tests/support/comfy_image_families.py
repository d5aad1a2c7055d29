# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's transformers for images at tiny sizes, a row a family; not those of backbones.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from comfy_family_parts import (
    _CHROMA,
    _FLUX,
    _HUNYUAN_VIDEO,
    _Z,
    Extra,
    called,
    depth,
    each,
    image,
    made,
    mask,
    pooled,
    same,
)
from comfy_networks import flux, flux_call, qwen
from inputs import Call, Draw, Size, latent_call
from torch import nn


def references(*sizes: Size) -> Extra:
    """Reference latents, the first as large as the noise."""
    return lambda d, batch, size, length: [d.prompt(batch, 4, *s) for s in (size, *sizes)]


_CHROMA_CALL = called(guidance=each(0.0))

_FLUX2: dict[str, Any] = {
    **{**_FLUX, "patch_size": 1, "axes_dim": [4, 4, 4, 4], "mlp_ratio": 3.0, "theta": 2000, "qkv_bias": False},
    **{"global_modulation": True, "mlp_silu_act": True, "ops_bias": False, "default_ref_method": "index"},
    **{"ref_index_scale": 10.0, "txt_ids_dims": [3], "vec_in_dim": None, "guidance_embed": True},
}


def _with_flux_call(**extra: Extra) -> Callable[[Draw, int, Size, int], Call]:
    def call(d: Draw, batch: int, size: Size, length: int) -> Call:
        args, kwargs = flux_call(d, batch, size, length)
        return args, {**kwargs, **{name: make(d, batch, size, length) for name, make in extra.items()}}

    return call


def _lumina(blocks: int, **settings: Any) -> nn.Module:
    usual = {"patch_size": 2, "in_channels": 4, "dim": 32, "n_layers": blocks, "n_refiner_layers": 1, "n_heads": 2}
    usual |= {"n_kv_heads": 2, "axes_dims": [4, 6, 6], "cap_feat_dim": 16, "axes_lens": [300, 64, 64], "qk_norm": True}
    return made("lumina.model.NextDiT", **{**usual, **settings})(blocks)


def _qwen_edit(d: Draw, batch: int, size: Size, length: int) -> Call:
    args, kwargs = latent_call(d, batch, (1, *size), length, greatest=1.0)
    return args, {**kwargs, "ref_latents": [d.prompt(batch, 4, 1, *size), d.prompt(batch, 4, 1, 8, 12)]}


def _with(call: Call, **more: Any) -> Call:
    return call[0], {**call[1], **more}


def omni(d: Draw, batch: int, size: Size, length: int) -> Call:
    args, kwargs = latent_call(d, batch, size, length, greatest=1.0)
    kwargs |= {"num_tokens": length, "ref_latents": [d.prompt(batch, 4, *size)]}
    kwargs |= {"ref_contexts": [d.prompt(batch, 24, 16)], "siglip_feats": [d.prompt(batch, 4, 6, 8)]}
    return args, kwargs


_HIDREAM_O1_TEXT: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "rope_dims": [4, 2, 2],
}
_HIDREAM_O1_VISION = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "num_position_embeddings": 64}


def _hidream_o1(blocks: int) -> nn.Module:
    text = {**_HIDREAM_O1_TEXT, "num_hidden_layers": blocks}
    vision = {**_HIDREAM_O1_VISION, "depth": blocks}
    return made("hidream_o1.model.HiDreamO1Transformer", text_config_overrides=text, vision_config_overrides=vision)(
        blocks
    )


def _hidream_o1_call(d: Draw, batch: int, size: Size, length: int) -> Call:
    """Pixels, and words by their numbers, which ComfyUI's own code makes into what the network takes."""
    from comfy.ldm.hidream_o1.conditioning import build_extra_conds
    from comfy.ldm.hidream_o1.model import TMS_TOKEN_ID

    noise = d.noise(batch, 3, *size)
    words = (d.prompt(batch, length).abs() * 1000).long()
    words[:, -1] = TMS_TOKEN_ID
    return (noise, d.time(batch, 1000.0)), {**build_extra_conds(words, noise), "transformer_options": {}}


ROWS = [
    image("hidream_o1", _hidream_o1, _hidream_o1_call, sizes=((64, 64), (64, 96), (96, 64), (160, 128))),
    image("flux2", made("flux.model.Flux", **_FLUX2), called(guidance=each(3.5))),
    image(
        "flux2_references",
        made("flux.model.Flux", **_FLUX2),
        called(guidance=each(3.5), ref_latents=references((8, 8))),
    ),
    image("flux_kontext", flux, _with_flux_call(ref_latents=references((8, 12)))),
    image("flux_uxo", flux, _with_flux_call(ref_latents=references((8, 12)), ref_latents_method=same("uxo"))),
    image(
        "flux2_timestep_zero",
        made("flux.model.Flux", **{**_FLUX2, "default_ref_method": "index_timestep_zero", "guidance_embed": False}),
        called(ref_latents=references((8, 12))),
    ),
    image("longcat", made("flux.model.Flux", **{**_FLUX, "vec_in_dim": None, "txt_ids_dims": [1, 2]}), called()),
    image(
        "ovis",
        made(
            "flux.model.Flux",
            **{**_FLUX, "vec_in_dim": None, "txt_ids_dims": [1, 2], "yak_mlp": True, "txt_norm": True},
        ),
        called(),
    ),
    image("chroma", made("chroma.model.Chroma", **_CHROMA), _CHROMA_CALL),
    image(
        "aura",
        made(
            "aura.mmdit.MMDiT",
            dim=32,
            n_layers=lambda n: 2 * n,
            n_double_layers=depth,
            n_heads=2,
            global_conddim=32,
            cond_seq_dim=16,
            max_seq=144,
        ),
        called(),
    ),
    image(
        "hidream",
        made(
            "hidream.model.HiDreamImageTransformer2DModel",
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=depth,
            num_single_layers=depth,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_channels=[16, 16],
            text_emb_dim=8,
            axes_dims_rope=(4, 6, 6),
            max_resolution=(16, 16),
            llama_layers=lambda n: list(range(2 * n)),
        ),
        called(1000.0, y=pooled(8), encoder_hidden_states_llama3=lambda d, b, s, n: d.prompt(b, 12, n, 16)),
    ),
    image(
        "omnigen2",
        made(
            "omnigen.omnigen2.OmniGen2Transformer2DModel",
            in_channels=4,
            hidden_size=32,
            num_layers=depth,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=8,
            axes_dim_rope=(4, 6, 6),
            axes_lens=(300, 64, 64),
            text_feat_dim=16,
            timestep_scale=1000.0,
        ),
        called(num_tokens=lambda d, b, s, n: n),
    ),
    image(
        "omnigen2_references",
        made(
            "omnigen.omnigen2.OmniGen2Transformer2DModel",
            in_channels=4,
            hidden_size=32,
            num_layers=depth,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=8,
            axes_dim_rope=(4, 6, 6),
            axes_lens=(300, 64, 64),
            text_feat_dim=16,
            timestep_scale=1000.0,
        ),
        called(num_tokens=lambda d, b, s, n: n, ref_latents=references((8, 12))),
    ),
    image(
        "boogu",
        made(
            "boogu.model.BooguTransformer2DModel",
            in_channels=4,
            hidden_size=32,
            num_layers=depth,
            num_double_stream_layers=depth,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=8,
            axes_dim_rope=(4, 6, 6),
            axes_lens=(300, 64, 64),
            instruction_feat_dim=16,
        ),
        called(num_tokens=lambda d, b, s, n: n),
    ),
    image(
        "kandinsky5_image",
        made(
            "kandinsky5.model.Kandinsky5",
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=16,
            in_text_dim2=8,
            time_dim=24,
            model_dim=32,
            ff_dim=64,
            visual_embed_dim=16,
            num_text_blocks=2,
            num_visual_blocks=depth,
            axes_dims=(4, 6, 6),
        ),
        called(y=pooled(8)),
    ),
    image(
        "ernie",
        made(
            "ernie.model.ErnieImageModel",
            hidden_size=32,
            num_attention_heads=2,
            num_layers=depth,
            ffn_hidden_size=64,
            in_channels=4,
            out_channels=4,
            text_in_dim=16,
            rope_axes_dim=(4, 6, 6),
        ),
        called(1000.0),
    ),
    image(
        "ideogram4",
        made(
            "ideogram4.model.Ideogram4Transformer2DModel",
            in_channels=4,
            num_layers=depth,
            num_attention_heads=2,
            attention_head_dim=16,
            intermediate_size=64,
            adaln_dim=8,
            llm_features_dim=16,
            mrope_section=(4, 2, 2),
        ),
        called(),
    ),
    image(
        "ideogram4_masked",
        made(
            "ideogram4.model.Ideogram4Transformer2DModel",
            in_channels=4,
            num_layers=depth,
            num_attention_heads=2,
            attention_head_dim=16,
            intermediate_size=64,
            adaln_dim=8,
            llm_features_dim=16,
            mrope_section=(4, 2, 2),
        ),
        called(attention_mask=mask),
    ),
    image(
        "krea2",
        made(
            "krea2.model.SingleStreamDiT",
            features=32,
            tdim=16,
            txtdim=8,
            heads=2,
            kvheads=1,
            layers=depth,
            channels=4,
            txtlayers=2,
            txtheads=2,
            txtkvheads=1,
        ),
        called(),
    ),
    image(
        "krea2_references",
        made(
            "krea2.model.SingleStreamDiT",
            features=32,
            tdim=16,
            txtdim=8,
            heads=2,
            kvheads=1,
            layers=depth,
            channels=4,
            txtlayers=2,
            txtheads=2,
            txtkvheads=1,
            default_ref_method="index_timestep_zero",
        ),
        called(ref_latents=references((8, 12))),
    ),
    image(
        "lens",
        made(
            "lens.model.LensTransformer2DModel",
            in_channels=4,
            out_channels=1,
            num_layers=depth,
            attention_head_dim=16,
            num_attention_heads=2,
            enc_hidden_dim=8,
            axes_dims_rope=(4, 6, 6),
            selected_layer_index=(0, 1),
        ),
        called(attention_mask=mask),
    ),
    image(
        "mage_flow",
        made(
            "mage_flow.model.MageFlowTransformer2DModel",
            in_channels=4,
            out_channels=4,
            num_layers=depth,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
        called(ref_latents=references((8, 12))),
    ),
    image("qwen_edit", qwen, lambda d, b, s, n: _qwen_edit(d, b, s, n)),
    image(
        "z_image",
        functools.partial(
            _lumina, dim=256, axes_dims=[32, 48, 48], z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32
        ),
        called(num_tokens=lambda d, b, s, n: n),
    ),
    image("z_image_omni", functools.partial(_lumina, **_Z, siglip_feat_dim=8), omni),
    image(
        "newbie",
        functools.partial(_lumina, clip_text_dim=8),
        called(num_tokens=lambda d, b, s, n: n, clip_text_pooled=pooled(8)),
    ),
    image(
        "z_image_masked",
        functools.partial(_lumina, **_Z),
        called(num_tokens=lambda d, b, s, n: n - 1, attention_mask=mask),
    ),
    image(
        "hunyuan_image",
        made(
            "hunyuan_video.model.HunyuanVideo",
            **{
                **_HUNYUAN_VIDEO,
                "patch_size": [1, 1],
                "axes_dim": [8, 8],
                "vec_in_dim": None,
                "byt5": True,
                "meanflow": True,
            },
        ),
        called(txt_byt5=pooled(7, 1472), guidance=each(3.5), disable_time_r=same(True)),
    ),
    image(
        "qwen_layered",
        made(
            "qwen_image.model.QwenImageTransformer2DModel",
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=depth,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
            use_additional_t_cond=True,
            default_ref_method="negative_index",
        ),
        lambda d, b, s, n: _with(_qwen_edit(d, b, s, n), additional_t_cond=torch.zeros(b, dtype=torch.long)),
    ),
    image(
        "qwen_2511",
        made(
            "qwen_image.model.QwenImageTransformer2DModel",
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=depth,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
            default_ref_method="index_timestep_zero",
        ),
        _qwen_edit,
    ),
]
