# SPDX-License-Identifier: Apache-2.0
"""Transformers that denoise sound."""

from __future__ import annotations

from typing import Any

import torch
from inputs import Draw, Size

from diffusers_families.family import NO_WORDS, SOUND, Family, Inputs, mask, without, words


def ace(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    time = d.time(batch, 1.0)
    given = {"hidden_states": d.noise(batch, *size, 8), "timestep": time, "timestep_r": time}
    return {**given, "context_latents": d.prompt(batch, *size, 16), **words(d, batch, length, 32)}


def longcat(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = {"hidden_states": d.noise(batch, *size, 8), "timestep": d.time(batch, 1.0), **words(d, batch, length)}
    return {**given, "encoder_attention_mask": mask(batch, length), "attention_mask": mask(batch, *size)}


def stable(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    angles = torch.outer(torch.arange(size[0] + 1).float(), 0.5 ** torch.arange(4)).repeat(1, 2)
    given = {"hidden_states": d.noise(batch, 8, *size), "timestep": d.time(batch, 1.0), **words(d, batch, length)}
    return {**given, "global_hidden_states": d.prompt(batch, 1, 12), "rotary_embedding": (angles.cos(), angles.sin())}


def stable3(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = {"hidden_states": d.noise(batch, 8, *size), "timestep": d.time(batch, 1.0), **words(d, batch, length)}
    return {**given, "global_hidden_states": d.prompt(batch, 12)}


def music(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    given = {"hidden_states": d.noise(batch, 8, *size), "timestep": d.time(batch, 1.0)}
    return {**given, **words(d, batch, size[0])}


def film(d: Draw, batch: int, size: Size, length: int) -> Inputs:
    return {
        "encodings_and_masks": [
            (d.prompt(batch, length, 16), mask(batch, length)),
            (d.prompt(batch, 8, 16), mask(batch, 8)),
        ],
        **{"decoder_input_tokens": d.noise(batch, 16, 8), "decoder_noise_time": d.time(batch, 1.0)},
    }


_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}

ROWS = [
    Family(
        "ace_step",
        "AceStepTransformer1DModel",
        ace,
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "in_channels": 24,
            "audio_acoustic_hidden_dim": 8,
            "sliding_window": 16,
        },
        depth=("num_hidden_layers",),
        sizes=SOUND,
    ),
    Family(
        "longcat_audio",
        "LongCatAudioDiTTransformer",
        longcat,
        {"dit_dim": 64, "dit_heads": 4, "dit_text_dim": 16, "latent_dim": 8},
        depth=("dit_depth",),
        sizes=SOUND,
    ),
    Family(
        "stable_audio",
        "StableAudioDiTModel",
        stable,
        {
            **_HEADS,
            "sample_size": 32,
            "in_channels": 8,
            "out_channels": 8,
            "num_key_value_attention_heads": 1,
            "cross_attention_dim": 16,
            "time_proj_dim": 16,
            "global_states_input_dim": 12,
            "cross_attention_input_dim": 16,
        },
        sizes=SOUND,
    ),
    Family(
        "stable_audio3",
        "StableAudio3DiTModel",
        stable3,
        {
            "io_channels": 8,
            "embed_dim": 32,
            "num_heads": 4,
            "cond_token_dim": 16,
            "global_cond_dim": 12,
            "local_add_cond_dim": 5,
            "timestep_features_dim": 16,
            "num_memory_tokens": 3,
        },
        depth=("depth",),
        sizes=SOUND,
    ),
    Family(
        "minimax_music",
        "MiniMaxMusic3Transformer1DModel",
        music,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 8,
            "condition_dim": 16,
            "ff_inner_dim": 32,
            "rotary_dim": 4,
            "fourier_embedding_dim": 8,
        },
        sizes=SOUND,
        lengths=NO_WORDS,
        moves=without("length"),
    ),
    Family(
        "t5_film",
        "T5FilmDecoder",
        film,
        {"input_dims": 8, "targets_length": 16, "d_model": 16, "num_heads": 2, "d_kv": 8, "d_ff": 32},
        sizes=((16,),),
    ),
]
