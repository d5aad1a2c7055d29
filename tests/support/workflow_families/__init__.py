# SPDX-License-Identifier: Apache-2.0
"""The families of models that there are example workflows for: one file for each kind of network.

Nodes and settings are those of ComfyUI's own template of the family, so that a user who knows that one finds it again.
"""

from __future__ import annotations

from . import flux, hunyuan_video, ltxv, pixart, qwen_image, sd35, stable_diffusion, wan, z_image
from .family import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: tuple[Family, ...] = (
    stable_diffusion.SD15,
    stable_diffusion.SDXL,
    sd35.FAMILY,
    pixart.FAMILY,
    flux.DEV,
    flux.SCHNELL,
    flux.KONTEXT,
    qwen_image.FAMILY,
    z_image.FAMILY,
    wan.WAN21,
    wan.WAN22,
    hunyuan_video.FAMILY,
    ltxv.FAMILY,
)
