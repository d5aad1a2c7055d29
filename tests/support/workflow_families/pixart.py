# SPDX-License-Identifier: Apache-2.0
"""PixArt Sigma."""

from __future__ import annotations

from workflow_graph import Graph

from . import parts
from .family import LORA, VAE, Family

UNET = parts.file("diffusion_models", "PixArt-Sigma-XL-2-1024-MS.safetensors")
TEXT = parts.file("text_encoders", "t5xxl_fp16.safetensors", parts.FLUX_TEXT)
IMAGE = parts.file("vae", "sdxl_vae.safetensors", parts.HUB + "stabilityai/sdxl-vae/resolve/main/")
REMARK = (
    "\nThe transformer is published as "
    "[diffusion_pytorch_model.safetensors]("
    + parts.HUB
    + "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS/tree/main/transformer); save it under the name above."
)


def build(graph: Graph, flavour: str) -> None:
    """ComfyUI has no template of it."""
    loaded = parts.split_files(graph, UNET, (TEXT,), "pixart", IMAGE)
    latent = parts.size(graph, "EmptyLatentImage", 1024, 1024)
    loaded = parts.prepared(graph, flavour, loaded)
    texts = parts.prompts(graph, loaded.clip, "a lighthouse on a cliff at dusk, watercolour", parts.NEGATIVE)
    samples = parts.sampler(graph, loaded.model, texts, latent, (20, 4.5, "dpmpp_2m", "normal"))
    parts.save_image(graph, samples, loaded.vae)


FAMILY = Family("pixart", "PixArt Sigma", build, (LORA, VAE), REMARK)
