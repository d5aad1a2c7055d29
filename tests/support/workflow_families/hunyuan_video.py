# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo, text to video."""

from __future__ import annotations

from workflow_graph import Graph

from . import parts
from .family import LORA, LOW_PRECISION, VAE, Family

FILES = parts.HUB + "Comfy-Org/HunyuanVideo_repackaged/resolve/main/split_files/"
UNET = parts.file("diffusion_models", "hunyuan_video_t2v_720p_bf16.safetensors", FILES + "diffusion_models/")
TEXTS = (
    parts.file("text_encoders", "clip_l.safetensors", parts.FLUX_TEXT),
    parts.file("text_encoders", "llava_llama3_fp8_scaled.safetensors", FILES + "text_encoders/"),
)
IMAGE = parts.file("vae", "hunyuan_video_vae_bf16.safetensors", FILES + "vae/")


def build(graph: Graph, flavour: str) -> None:
    """Guidance instead of a negative prompt; the steps are planned by the model before its noise is shifted."""
    loaded = parts.split_files(graph, UNET, TEXTS, "hunyuan_video", IMAGE)
    latent = parts.size(graph, "EmptyHunyuanLatentVideo", 848, 480, 73)
    unshifted = loaded.model
    loaded = parts.prepared(graph, flavour, loaded, shift=("ModelSamplingSD3", 7.0))
    prompt = "waves break against a lighthouse at dusk, slow aerial shot"
    positive = graph.add("CLIPTextEncode", 2, "", {"text": prompt}, clip=loaded.clip)[0]
    positive = graph.add("FluxGuidance", 2, "", {"guidance": 6.0}, conditioning=positive)[0]
    seed = {"noise_seed": 42, "control_after_generate": "randomize"}
    links = {
        "noise": graph.add("RandomNoise", 3, "", seed)[0],
        "guider": graph.add("BasicGuider", 3, model=loaded.model, conditioning=positive)[0],
        "sampler": graph.add("KSamplerSelect", 3, "", {"sampler_name": "euler"})[0],
        "sigmas": graph.add(
            "BasicScheduler", 3, "", {"scheduler": "simple", "steps": 20, "denoise": 1.0}, model=unshifted
        )[0],
        "latent_image": latent,
    }
    samples = graph.add("SamplerCustomAdvanced", 3, **links)[0]
    parts.save_video(graph, samples, loaded.vae, 24.0, tiled=True)


FAMILY = Family("hunyuan_video", "HunyuanVideo text to video", build, (LORA, VAE, LOW_PRECISION))
