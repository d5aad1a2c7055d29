# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 1.5 and XL: a UNet, everything in one checkpoint."""

from __future__ import annotations

from workflow_graph import Graph

from . import parts
from .family import CONTROLNET, LORA, VAE, Family

SD15_FILE = parts.file(
    "checkpoints",
    "v1-5-pruned-emaonly-fp16.safetensors",
    parts.HUB + "Comfy-Org/stable-diffusion-v1-5-archive/resolve/main/",
)
SDXL_FILE = parts.file(
    "checkpoints",
    "sd_xl_base_1.0.safetensors",
    parts.HUB + "stabilityai/stable-diffusion-xl-base-1.0/resolve/main/",
)
SD15_EDGES = parts.file(
    "controlnet",
    "control_v11p_sd15_canny_fp16.safetensors",
    parts.HUB + "comfyanonymous/ControlNet-v1-1_fp16_safetensors/resolve/main/",
)
SDXL_EDGES = parts.file(
    "controlnet",
    "diffusers_xl_canny_full.safetensors",
    parts.HUB + "lllyasviel/sd_control_collection/resolve/main/",
)


def _build(graph: Graph, flavour: str, checkpoint: parts.File, net: parts.File, size: int, prompt: str) -> None:
    loaded = parts.checkpoint(graph, checkpoint)
    latent = parts.size(graph, "EmptyLatentImage", size, size)
    loaded = parts.prepared(graph, flavour, loaded, lora_has_clip=True)
    texts = parts.prompts(graph, loaded.clip, prompt, parts.NEGATIVE)
    texts = parts.follow(graph, flavour, texts, parts.Edges(net, 1.0, size, size), loaded.vae)
    samples = parts.sampler(graph, loaded.model, texts, latent, (20, 7.0, "euler", "normal"))
    parts.save_image(graph, samples, loaded.vae)


def sd15(graph: Graph, flavour: str) -> None:
    """Stable Diffusion 1.5."""
    _build(graph, flavour, SD15_FILE, SD15_EDGES, 512, "a lighthouse on a cliff at dusk, oil painting")


def sdxl(graph: Graph, flavour: str) -> None:
    """Stable Diffusion XL."""
    _build(graph, flavour, SDXL_FILE, SDXL_EDGES, 1024, "a lighthouse on a cliff at dusk, photograph")


SD15 = Family("sd15", "Stable Diffusion 1.5", sd15, (LORA, CONTROLNET, VAE))
SDXL = Family("sdxl", "Stable Diffusion XL", sdxl, (LORA, CONTROLNET, VAE))
