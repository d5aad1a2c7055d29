# SPDX-License-Identifier: Apache-2.0
"""LTX-Video, text to video: model and VAE in one checkpoint, the text encoder in a file of its own."""

from __future__ import annotations

from dataclasses import replace

from workflow_graph import Graph

from . import parts
from .family import LORA, Family

CHECKPOINT = parts.file(
    "checkpoints", "ltx-video-2b-v0.9.safetensors", parts.HUB + "Lightricks/LTX-Video/resolve/main/"
)
TEXT = parts.file("text_encoders", "t5xxl_fp16.safetensors", parts.FLUX_TEXT)
PROMPT = (
    "Waves break against a lighthouse on a cliff at dusk. Its lamp turns slowly and lights the spray. The camera "
    "circles the tower from above. The sky is dark blue with a last band of orange. The scene is real-life footage."
)
NEGATIVE = "low quality, worst quality, deformed, distorted, motion smear, motion artifacts"


def build(graph: Graph, flavour: str) -> None:
    """A scheduler of its own, which looks at the size of the latent."""
    loaded = parts.checkpoint(graph, CHECKPOINT)
    loaded = replace(loaded, clip=parts.text_encoder(graph, (TEXT,), "ltxv"))
    latent = parts.size(graph, "EmptyLTXVLatentVideo", 768, 512, 97)
    loaded = parts.prepared(graph, flavour, loaded)
    positive, negative = parts.prompts(graph, loaded.clip, PROMPT, NEGATIVE)
    rate = {"frame_rate": 25.0}
    positive, negative = graph.add("LTXVConditioning", 2, "", rate, positive=positive, negative=negative)
    steps = {"steps": 30, "max_shift": 2.05, "base_shift": 0.95, "stretch": True, "terminal": 0.1}
    widgets = {"add_noise": True, "noise_seed": 42, "control_after_generate": "randomize", "cfg": 3.0}
    links = {
        "model": loaded.model,
        "positive": positive,
        "negative": negative,
        "sampler": graph.add("KSamplerSelect", 3, "", {"sampler_name": "euler"})[0],
        "sigmas": graph.add("LTXVScheduler", 3, "", steps, latent=latent)[0],
        "latent_image": latent,
    }
    samples = graph.add("SamplerCustom", 3, "", widgets, **links)[0]
    parts.save_video(graph, samples, loaded.vae, 24.0)


# Each part of its VAE keeps frames of its own for the next chunk: a compile node there would leave all of it eager.
FAMILY = Family("ltxv", "LTX-Video text to video", build, (LORA,))
