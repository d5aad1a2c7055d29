# SPDX-License-Identifier: Apache-2.0
"""Z-Image Turbo. Its ControlNets are patches of the model, not ControlNets: a compile node has nothing to do there."""

from __future__ import annotations

from workflow_graph import Graph

from . import parts
from .family import LORA, LOW_PRECISION, Family

FILES = parts.HUB + "Comfy-Org/z_image_turbo/resolve/main/split_files/"
UNET = parts.file("diffusion_models", "z_image_turbo_bf16.safetensors", FILES + "diffusion_models/")
TEXT = parts.file("text_encoders", "qwen_3_4b.safetensors", FILES + "text_encoders/")
IMAGE = parts.file("vae", "ae.safetensors", FILES + "vae/")
PIXEL_ART = parts.file(
    "loras",
    "pixel_art_style_z_image_turbo.safetensors",
    parts.HUB + "tarn59/pixel_art_style_lora_z_image_turbo/resolve/main/",
)


def build(graph: Graph, flavour: str) -> None:
    """Eight steps without a negative prompt."""
    loaded = parts.split_files(graph, UNET, (TEXT,), "lumina2", IMAGE)
    latent = parts.size(graph, "EmptySD3LatentImage", 1024, 1024)
    shift = ("ModelSamplingAuraFlow", 3.0)
    loaded = parts.prepared(graph, flavour, loaded, which_lora=PIXEL_ART, shift=shift)
    prompt = "a lighthouse on a cliff at dusk, " + ("Pixel art style." if flavour == LORA else "film photograph")
    texts = parts.prompts(graph, loaded.clip, prompt, None)
    samples = parts.sampler(graph, loaded.model, texts, latent, (8, 1.0, "res_multistep", "simple"))
    parts.save_image(graph, samples, loaded.vae)


FAMILY = Family("z_image", "Z-Image Turbo", build, (LORA, LOW_PRECISION))
