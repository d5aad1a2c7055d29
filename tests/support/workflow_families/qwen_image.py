# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image."""

from __future__ import annotations

from workflow_graph import Graph

from . import parts
from .family import CONTROLNET, LORA, LOW_PRECISION, VAE, Family

FILES = parts.HUB + "Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/"
UNET = parts.file("diffusion_models", "qwen_image_fp8_e4m3fn.safetensors", FILES + "diffusion_models/")
# Products are computed in 8 bits from weights in 16; those that are kept in 8 have their own way.
IN_16_BITS = parts.file("diffusion_models", "qwen_image_bf16.safetensors", FILES + "diffusion_models/")
TEXT = parts.file("text_encoders", "qwen_2.5_vl_7b_fp8_scaled.safetensors", FILES + "text_encoders/")
IMAGE = parts.file("vae", "qwen_image_vae.safetensors", FILES + "vae/")
EIGHT_STEPS = parts.file(
    "loras",
    "Qwen-Image-Lightning-8steps-V1.0.safetensors",
    parts.HUB + "lightx2v/Qwen-Image-Lightning/resolve/main/",
)
EDGES = parts.file(
    "controlnet",
    "Qwen-Image-InstantX-ControlNet-Union.safetensors",
    parts.HUB + "Comfy-Org/Qwen-Image-InstantX-ControlNets/resolve/main/split_files/controlnet/",
)


def build(graph: Graph, flavour: str) -> None:
    """20 steps, or 8 with the LoRA that is made for them."""
    unet = IN_16_BITS if flavour == LOW_PRECISION else UNET
    loaded = parts.split_files(graph, unet, (TEXT,), "qwen_image", IMAGE)
    latent = parts.size(graph, "EmptySD3LatentImage", 1328, 1328)
    shift = ("ModelSamplingAuraFlow", 3.1)
    loaded = parts.prepared(graph, flavour, loaded, which_lora=EIGHT_STEPS, shift=shift)
    texts = parts.prompts(graph, loaded.clip, 'a lighthouse at dusk, a sign at its door says "Closed"', "")
    texts = parts.follow(graph, flavour, texts, parts.Edges(EDGES, 1.0, 1328, 1328, needs_vae=True), loaded.vae)
    settings = (8, 1.0, "euler", "simple") if flavour == LORA else (20, 4.0, "euler", "simple")
    parts.save_image(graph, parts.sampler(graph, loaded.model, texts, latent, settings), loaded.vae)


FAMILY = Family("qwen_image", "Qwen-Image", build, (LORA, CONTROLNET, VAE, LOW_PRECISION))
