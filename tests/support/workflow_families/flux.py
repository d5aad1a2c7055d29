# SPDX-License-Identifier: Apache-2.0
"""Flux.1: dev and schnell from text, Kontext from a picture and what is to become of it."""

from __future__ import annotations

from workflow_graph import Graph, Out

from . import parts
from .family import CONTROLNET, LORA, LOW_PRECISION, VAE, Family

LUMINA = parts.HUB + "Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae/"
UNETS = {
    "dev": parts.file("diffusion_models", "flux1-dev.safetensors", parts.HUB + "Comfy-Org/flux1-dev/resolve/main/"),
    "schnell": parts.file(
        "diffusion_models", "flux1-schnell.safetensors", parts.HUB + "Comfy-Org/flux1-schnell/resolve/main/"
    ),
    "kontext": parts.file(
        "diffusion_models",
        "flux1-dev-kontext_fp8_scaled.safetensors",
        parts.HUB + "Comfy-Org/flux1-kontext-dev_ComfyUI/resolve/main/split_files/diffusion_models/",
    ),
}
EDGES = parts.file(
    "controlnet",
    "flux-canny-controlnet-v3.safetensors",
    parts.HUB + "XLabs-AI/flux-controlnet-collections/resolve/main/",
)


def _load(graph: Graph, kind: str, t5: str) -> parts.Loaded:
    texts = tuple(parts.file("text_encoders", f"{name}.safetensors", parts.FLUX_TEXT) for name in ("clip_l", t5))
    image = parts.file("vae", "ae.safetensors", LUMINA)
    return parts.split_files(graph, UNETS[kind], texts, "flux", image)


def _guided(graph: Graph, positive: Out, guidance: float) -> Out:
    """Guidance instead of a negative prompt."""
    return graph.add("FluxGuidance", 2, "", {"guidance": guidance}, conditioning=positive)[0]


def dev(graph: Graph, flavour: str) -> None:
    """Flux.1 dev."""
    loaded = _load(graph, "dev", "t5xxl_fp16")
    latent = parts.size(graph, "EmptySD3LatentImage", 1024, 1024)
    loaded = parts.prepared(graph, flavour, loaded)
    positive, negative = parts.prompts(graph, loaded.clip, "a lighthouse on a cliff at dusk, long exposure", None)
    texts = _guided(graph, positive, 3.5), negative
    texts = parts.follow(graph, flavour, texts, parts.Edges(EDGES, 0.7, 1024, 1024, (0.15, 0.3)), loaded.vae)
    samples = parts.sampler(graph, loaded.model, texts, latent, (20, 1.0, "euler", "simple"))
    parts.save_image(graph, samples, loaded.vae)


def schnell(graph: Graph, flavour: str) -> None:
    """Flux.1 schnell: four steps, and no guidance to set."""
    loaded = _load(graph, "schnell", "t5xxl_fp16")
    latent = parts.size(graph, "EmptySD3LatentImage", 1024, 1024)
    loaded = parts.prepared(graph, flavour, loaded)
    texts = parts.prompts(graph, loaded.clip, "a lighthouse on a cliff at dusk, paper cut", None)
    samples = parts.sampler(graph, loaded.model, texts, latent, (4, 1.0, "euler", "simple"))
    parts.save_image(graph, samples, loaded.vae)


def kontext(graph: Graph, flavour: str) -> None:
    """Flux.1 Kontext dev: the picture is a reference beside the latent, and says the size."""
    loaded = _load(graph, "kontext", "t5xxl_fp8_e4m3fn_scaled")
    picture = graph.add("LoadImage", 0, "Picture to change", {"image": parts.PICTURE, "upload": "image"})[0]
    loaded = parts.prepared(graph, flavour, loaded)
    picture = graph.add("FluxKontextImageScale", 1, image=picture)[0]
    latent = graph.add("VAEEncode", 1, pixels=picture, vae=loaded.vae)[0]
    positive, negative = parts.prompts(graph, loaded.clip, "the same picture as a watercolour at dusk", None)
    positive = graph.add("ReferenceLatent", 2, conditioning=positive, latent=latent)[0]
    texts = _guided(graph, positive, 2.5), negative
    samples = parts.sampler(graph, loaded.model, texts, latent, (20, 1.0, "euler", "simple"))
    parts.save_image(graph, samples, loaded.vae)


DEV = Family("flux", "Flux.1 dev", dev, (LORA, CONTROLNET, VAE, LOW_PRECISION))
SCHNELL = Family("flux_schnell", "Flux.1 schnell", schnell, (LOW_PRECISION,))
KONTEXT = Family("flux_kontext", "Flux.1 Kontext dev", kontext, (LORA,))
