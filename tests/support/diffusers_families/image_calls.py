# SPDX-License-Identifier: Apache-2.0
"""What transformers that denoise pictures are given."""

from __future__ import annotations

from typing import Any

import torch
from inputs import Draw, Size

from diffusers_families.family import Give, Inputs, grid, mask, tokens, words


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
