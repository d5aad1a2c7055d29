# SPDX-License-Identifier: Apache-2.0
"""Wan, text to video: 2.1 with 1.3B parameters, and 2.2 with two models of 14B, one for each half of the steps."""

from __future__ import annotations

from workflow_graph import Graph, Out

from . import parts
from .family import LORA, LOW_PRECISION, VAE, Family

FILES21 = parts.HUB + "Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/"
FILES22 = parts.HUB + "Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files/"
TEXT = parts.file("text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors", FILES21 + "text_encoders/")
PROMPT = "waves break against a lighthouse at dusk, aerial shot"


def wan21(graph: Graph, flavour: str) -> None:
    """Wan 2.1 text to video, 1.3B."""
    unet = parts.file("diffusion_models", "wan2.1_t2v_1.3B_fp16.safetensors", FILES21 + "diffusion_models/")
    image = parts.file("vae", "wan_2.1_vae.safetensors", FILES21 + "vae/")
    loaded = parts.split_files(graph, unet, (TEXT,), "wan", image)
    latent = parts.size(graph, "EmptyHunyuanLatentVideo", 832, 480, 33)
    loaded = parts.prepared(graph, flavour, loaded, shift=("ModelSamplingSD3", 8.0))
    texts = parts.prompts(graph, loaded.clip, PROMPT, parts.NEGATIVE)
    samples = parts.sampler(graph, loaded.model, texts, latent, (30, 6.0, "uni_pc", "simple"))
    parts.save_video(graph, samples, loaded.vae, 16.0)


def wan22(graph: Graph, flavour: str) -> None:
    """Wan 2.2: 20 steps, or 4 with the LoRAs that are made for them. Both models have the same artefacts."""
    models = [of_noise(graph, flavour, noise) for noise in ("high", "low")]
    clip = parts.text_encoder(graph, (TEXT,), "wan")
    image = parts.file("vae", "wan_2.1_vae.safetensors", FILES22 + "vae/")
    vae = graph.add("VAELoader", 0, "", {"vae_name": image[0]}, (image,))[0]
    latent = parts.size(graph, "EmptyHunyuanLatentVideo", 640, 640, 81)
    vae = parts.compile_vae(graph, flavour, vae)
    texts = parts.prompts(graph, clip, PROMPT, parts.NEGATIVE)
    latent = half_samplers(graph, models, texts, latent, (4, 1.0) if flavour == LORA else (20, 3.5))
    parts.save_video(graph, latent, vae, 16.0)


def half_samplers(
    graph: Graph, models: list[Out], texts: tuple[Out, Out], latent: Out, settings: tuple[int, float]
) -> Out:
    """Two samplers, each with its model for half of the steps. settings: steps, CFG."""
    steps, cfg = settings
    half = steps // 2
    for title, model, begin, end in (("First half", models[0], 0, half), ("Second half", models[1], half, steps)):
        first = begin == 0
        widgets = {
            "add_noise": "enable" if first else "disable", "noise_seed": 42 if first else 0,
            "control_after_generate": "randomize" if first else "fixed", "steps": steps, "cfg": cfg,
            "sampler_name": "euler", "scheduler": "simple", "start_at_step": begin, "end_at_step": end,
            "return_with_leftover_noise": "enable" if first else "disable",
        }  # fmt: skip
        links = {"model": model, "positive": texts[0], "negative": texts[1], "latent_image": latent}
        latent = graph.add("KSamplerAdvanced", 3, f"Sampler: {title.lower()}", widgets, **links)[0]
    return latent


def of_noise(graph: Graph, flavour: str, noise: str, kind: str = "t2v", lora: str = "v1.1") -> Out:
    """The model for much or for little noise, with all that is done to it. lora: the version of its LoRA."""
    name = f"wan2.2_{kind}_{noise}_noise_14B_fp8_scaled.safetensors"
    unet = parts.file("diffusion_models", name, FILES22 + "diffusion_models/")
    model = parts.diffusion_model(graph, unet, f"Diffusion model for {noise} noise")
    if flavour == LORA:
        name = f"wan2.2_{kind}_lightx2v_4steps_lora_{lora}_{noise}_noise.safetensors"
        model = parts.lora(graph, model, which=parts.file("loras", name, FILES22 + "loras/"))[0]
    model = parts.shifted(graph, model, 5.0)
    return parts.compile_model(graph, flavour, model, f"Nexfort Compile Model, {noise} noise")


WAN21 = Family("wan", "Wan 2.1 text to video", wan21, (LORA, VAE, LOW_PRECISION))
WAN22 = Family("wan22", "Wan 2.2 text to video", wan22, (LORA,))
