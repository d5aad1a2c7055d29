# SPDX-License-Identifier: Apache-2.0
"""What transformers that denoise videos are given."""

from __future__ import annotations

import torch
from inputs import Draw, Size

from diffusers_families.family import Give, Inputs, mask, words


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
