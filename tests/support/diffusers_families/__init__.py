# SPDX-License-Identifier: Apache-2.0
"""diffusers' families of networks at tiny sizes, by name; and what falls short in which of them, with its reason."""

from __future__ import annotations

import dataclasses
from typing import Any

from diffusers_families import autoencoders, controls, images, sounds, unets, videos
from diffusers_families.family import Family, Pipe

__all__ = ["FAMILIES", "Family", "Pipe"]

_FORMATS = ("memory formats", "an attribute of the block differs")
# what eager convolutions on a CPU give lies otherwise in memory for one row than for several
_BY_ROW: dict[str, Any] = {"apart": _FORMATS}
_KEEPS = "keeps a tensor that it made of its inputs"  # the last frames of a chunk, for the next one
_CHUNKS: dict[str, Any] = {
    "bound": ("norm_out", "conv_in", "conv_out"),
    "apart": (*_FORMATS, "where 1 was captured"),
}
_SHORT: dict[str, dict[str, Any]] = {
    "anyflow": {"apart": ("the options answer differently",)},  # sizes in a dict that it is given
    "anyflow_far": {"eager": {"blocks.": "Unsupported method call"}, "apart": ("the options answer differently",)},
    "chroma": {"bound": ("time_text_embed",)},  # a list of one number a row
    "chronoedit": {"bound": ("rope",)},  # two frames are another branch than more
    "framepack": {"apart": _FORMATS},  # one row has no mask
    "hidream": {  # which expert has how much
        "eager": dict.fromkeys(("double_stream_blocks.", "single_stream_blocks."), "for numpy"),
        "apart": ("size 1", "where 1 was captured"),  # a prompt for each layer before one for each row
    },
    "lumina_next": {"eager": {"patch_embedder": "a number that depends on the sizes"}},
    "mochi": {"bound": ("transformer_blocks.",)},  # a loop over the rows
    "omnigen": {"eager": {"patch_embedding": "it returns no tensor", "rope": "branches on the value of a tensor"}},
    "unet_2d": _BY_ROW,
    # what its attention gives for one row torch.cat takes for contiguous; and it takes no odd sides, which are planned
    "unet_if": {**_BY_ROW, "notes": ("planning ahead for other sizes failed",)},
    "uvit": _BY_ROW,
    # an odd number of frames is another branch than an even one
    "vae_cogvideox": {"bound": ("mid_block.", "up_blocks.", "norm_out"), "apart": ("% 2",)},
    "vae_flux2": _BY_ROW,
    # two latent frames are one and a rest of one, which torch takes for more
    "vae_hunyuan": {"bound": ("up_blocks.0",)},
    "vae_kl": _BY_ROW,
    "vae_kvae_video": {"bound": ("conv_", "mid.", "norm_out", "up.")},  # it takes so many last frames as there are
    "vae_magvit": {"eager": {"": _KEEPS}},
    "vae_mochi": {**_BY_ROW, "bound": ("",)},  # a loop over so many frames at once
    # torch's weight_norm, which is a hook
    "vae_oobleck": {"notes": ("layers that carry code of others are called",)},
    "vae_qwen": _CHUNKS,
    # its rows are the frames of a clip, and the first may be a clip of one
    "vae_svd": {"bound": ("mid_block", "time_conv_out"), "apart": (*_FORMATS, "where 1 was captured")},
    "vae_vq": _BY_ROW,
    "vae_wan": _CHUNKS,
}
_ROWS = [*images.ROWS, *videos.ROWS, *sounds.ROWS, *unets.ROWS, *controls.ROWS, *autoencoders.ROWS]
FAMILIES = {row.name: dataclasses.replace(row, **_SHORT.get(row.name, {})) for row in _ROWS}
