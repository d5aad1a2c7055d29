# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3.5 large: a transformer, everything in one checkpoint."""

from __future__ import annotations

from workflow_graph import Graph

from . import parts
from .family import CONTROLNET, LORA, Family

CHECKPOINT = parts.file(
    "checkpoints",
    "sd3.5_large_fp8_scaled.safetensors",
    parts.HUB + "Comfy-Org/stable-diffusion-3.5-fp8/resolve/main/",
)
EDGES = parts.file(
    "controlnet",
    "sd3.5_large_controlnet_canny.safetensors",
    parts.HUB + "Comfy-Org/stable-diffusion-3.5-controlnets_ComfyUI_repackaged/resolve/main/split_files/controlnet/",
)


def build(graph: Graph, flavour: str) -> None:
    """The template's steps and CFG; with a ControlNet those of its template."""
    loaded = parts.checkpoint(graph, CHECKPOINT)
    latent = parts.size(graph, "EmptySD3LatentImage", 1024, 1024)
    loaded = parts.prepared(graph, flavour, loaded)
    controlled = flavour == CONTROLNET
    prompt = "a lighthouse on a cliff at dusk, gouache"
    texts = parts.prompts(graph, loaded.clip, prompt, None if controlled else "")
    edges = parts.Edges(EDGES, 0.66, 1024, 1024, (0.3, 0.6), needs_vae=True)
    texts = parts.follow(graph, flavour, texts, edges, loaded.vae)
    settings = (32, 4.5, "euler", "simple") if controlled else (20, 4.01, "euler", "sgm_uniform")
    parts.save_image(graph, parts.sampler(graph, loaded.model, texts, latent, settings), loaded.vae)


FAMILY = Family("sd35", "Stable Diffusion 3.5", build, (LORA, CONTROLNET))
