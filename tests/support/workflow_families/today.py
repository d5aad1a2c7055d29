# SPDX-License-Identifier: Apache-2.0
"""The image models that people run most, as ComfyUI's own templates load them: Qwen-Image, its edit, Krea 2, FLUX.2."""

from __future__ import annotations

from workflow_graph import Graph

from . import parts
from .family import COMPILED
from .qwen_image import FILES, IMAGE, TEXT

HUB = parts.HUB
QWEN_EDIT = HUB + "Comfy-Org/Qwen-Image-Edit_ComfyUI/resolve/main/split_files/diffusion_models/"
LIGHTNING = HUB + "lightx2v/Qwen-Image-2512-Lightning/resolve/main/"
EDIT_LIGHTNING = HUB + "lightx2v/Qwen-Image-Edit-2511-Lightning/resolve/main/"
KREA = HUB + "Comfy-Org/Krea-2/resolve/main/"
KLEIN = HUB + "black-forest-labs/FLUX.2-klein-base-9b-fp8/resolve/main/"
KLEIN_TEXT = HUB + "Comfy-Org/flux2-klein-9B/resolve/main/split_files/text_encoders/"
FLUX2_VAE = HUB + "Comfy-Org/flux2-dev/resolve/main/split_files/vae/"


def qwen_image_2512(graph: Graph) -> None:
    """Four steps with the LoRA that is made for them."""
    unet = parts.file("diffusion_models", "qwen_image_2512_fp8_e4m3fn.safetensors", FILES + "diffusion_models/")
    four = parts.file("loras", "Qwen-Image-2512-Lightning-4steps-V1.0-fp32.safetensors", LIGHTNING)
    loaded = parts.split_files(graph, unet, (TEXT,), "qwen_image", IMAGE)
    latent = parts.size(graph, "EmptySD3LatentImage", 1328, 1328)
    model = parts.lora(graph, loaded.model, which=four)[0]
    model = parts.compile_model(graph, COMPILED, parts.shifted(graph, model, 3.1, "ModelSamplingAuraFlow"))
    texts = parts.prompts(graph, loaded.clip, 'a lighthouse at dusk, a sign at its door says "Closed"', "")
    parts.save_image(graph, parts.sampler(graph, model, texts, latent, (4, 1.0, "euler", "simple")), loaded.vae)


def qwen_image_edit(graph: Graph) -> None:
    """The picture is a reference beside the latent, and the text encoder sees it too. Four steps with their LoRA."""
    unet = parts.file("diffusion_models", "qwen_image_edit_2511_int8_convrot.safetensors", QWEN_EDIT)
    four = parts.file("loras", "Qwen-Image-Edit-2511-Lightning-4steps-V1.0-bf16.safetensors", EDIT_LIGHTNING)
    loaded = parts.split_files(graph, unet, (TEXT,), "qwen_image", IMAGE)
    picture = graph.add("LoadImage", 0, "Picture to change", {"image": parts.PICTURE, "upload": "image"})[0]
    model = parts.lora(graph, loaded.model, which=four)[0]
    model = parts.compile_model(graph, COMPILED, parts.shifted(graph, model, 3.1, "ModelSamplingAuraFlow"))
    picture = graph.add("FluxKontextImageScale", 2, "A size that the model knows", image=picture)[0]
    texts = []
    for title, prompt in (("What is to change", "the same picture as a pop art poster"), ("Negative prompt", "")):
        links = {"clip": loaded.clip, "vae": loaded.vae, "image1": picture}
        text = graph.add("TextEncodeQwenImageEditPlus", 2, title, {"prompt": prompt}, **links)[0]
        method = {"reference_latents_method": "index_timestep_zero"}
        texts.append(graph.add("FluxKontextMultiReferenceLatentMethod", 2, "", method, conditioning=text)[0])
    latent = graph.add("VAEEncode", 2, pixels=picture, vae=loaded.vae)[0]
    settings = (4, 1.0, "euler", "simple")
    parts.save_image(graph, parts.sampler(graph, model, (texts[0], texts[1]), latent, settings), loaded.vae)


def krea2_turbo(graph: Graph) -> None:
    """Eight steps without a negative prompt."""
    unet = parts.file("diffusion_models", "krea2_turbo_fp8_scaled.safetensors", KREA + "diffusion_models/")
    text = parts.file("text_encoders", "qwen3vl_4b_fp8_scaled.safetensors", KREA + "text_encoders/")
    loaded = parts.split_files(graph, unet, (text,), "krea2", parts.file("vae", IMAGE[0], KREA + "vae/"))
    latent = parts.size(graph, "EmptyLatentImage", 1024, 1024)
    model = parts.compile_model(graph, COMPILED, loaded.model)
    texts = parts.prompts(graph, loaded.clip, "a lighthouse on a cliff at dusk, ink and watercolour", None)
    parts.save_image(graph, parts.sampler(graph, model, texts, latent, (8, 1.0, "euler", "simple")), loaded.vae)


def flux2_klein(graph: Graph) -> None:
    """FLUX.2 Klein with 9B parameters: 20 steps with its own scheduler."""
    unet = parts.file("diffusion_models", "flux-2-klein-base-9b-fp8.safetensors", KLEIN)
    text = parts.file("text_encoders", "qwen_3_8b_fp8mixed.safetensors", KLEIN_TEXT)
    loaded = parts.split_files(graph, unet, (text,), "flux2", parts.file("vae", "flux2-vae.safetensors", FLUX2_VAE))
    latent = parts.size(graph, "EmptyFlux2LatentImage", 1024, 1024)
    model = parts.compile_model(graph, COMPILED, loaded.model)
    positive, negative = parts.prompts(graph, loaded.clip, "a lighthouse on a cliff at dusk, 80s film photograph", "")
    guider = graph.add("CFGGuider", 3, "", {"cfg": 5.0}, model=model, positive=positive, negative=negative)[0]
    sigmas = graph.add("Flux2Scheduler", 3, "", {"steps": 20, "width": 1024, "height": 1024})[0]
    samples = parts.advanced_sampler(graph, guider, sigmas, latent, "euler")
    parts.save_image(graph, samples, loaded.vae)
