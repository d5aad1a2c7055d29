# SPDX-License-Identifier: Apache-2.0
"""The video models that people run most, as ComfyUI's own templates load them: Wan 2.2, LTX-2.3, MiniMax-H3."""

from __future__ import annotations

from workflow_graph import Graph

from . import parts
from .family import COMPILED, LORA
from .wan import FILES22, TEXT, half_samplers, of_noise

LTX = parts.HUB + "Lightricks/LTX-2.3-fp8/resolve/main/"
LTX_COMFY = parts.HUB + "Comfy-Org/ltx-2.3/resolve/main/split_files/loras/"
LTX_TEXT = parts.HUB + "Comfy-Org/ltx-2/resolve/main/split_files/text_encoders/"
H3 = parts.HUB + "Comfy-Org/MiniMax-H3/resolve/main/"
H3_TURBO = parts.HUB + "lightx2v/Minimax-h3-Turbo/resolve/main/"
PROMPT = "waves break against a lighthouse at dusk, aerial shot, the sound of wind and surf"
# The eight steps that the LoRA is made for.
DISTILLED = "1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0"


def wan22_i2v(graph: Graph) -> None:
    """Wan 2.2 from a picture: two networks of two steps each, with the LoRAs that are made for that."""
    models = [of_noise(graph, LORA, noise, "i2v", "v1") for noise in ("high", "low")]
    clip = parts.text_encoder(graph, (TEXT,), "wan")
    image = parts.file("vae", "wan_2.1_vae.safetensors", FILES22 + "vae/")
    vae = graph.add("VAELoader", 0, "", {"vae_name": image[0]}, (image,))[0]
    first = graph.add("LoadImage", 0, "First picture", {"image": parts.PICTURE, "upload": "image"})[0]
    positive, negative = parts.prompts(graph, clip, "the light turns slowly, clouds move past", parts.NEGATIVE)
    size = {"width": 640, "height": 640, "length": 81, "batch_size": 1}
    links = {"positive": positive, "negative": negative, "vae": vae, "start_image": first}
    positive, negative, latent = graph.add("WanImageToVideo", 2, "", size, **links)
    latent = half_samplers(graph, models, (positive, negative), latent, (4, 1.0))
    parts.save_video(graph, latent, vae, 16.0)


def ltx23(graph: Graph) -> None:
    """LTX-2.3, a video with its sound: eight steps with the LoRA that is made for them."""
    whole = parts.file("checkpoints", "ltx-2.3-22b-dev-fp8.safetensors", LTX)
    text = parts.file("text_encoders", "gemma_3_12B_it_fp4_mixed.safetensors", LTX_TEXT)
    name = "ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors"
    distilled = parts.file("loras", name, LTX_COMFY)
    model, _, vae = graph.add("CheckpointLoaderSimple", 0, "", {"ckpt_name": whole[0]}, (whole,))
    widgets = {"text_encoder": text[0], "ckpt_name": whole[0], "device": "default"}
    clip = graph.add("LTXAVTextEncoderLoader", 0, "", widgets, (text, whole))[0]
    sound = graph.add("LTXVAudioVAELoader", 0, "", {"ckpt_name": whole[0]}, (whole,))[0]
    frames = {"width": 640, "height": 352, "length": 121, "batch_size": 1}
    video = graph.add("EmptyLTXVLatentVideo", 0, "", frames)[0]
    silence = {"frames_number": 121, "frame_rate": 25, "batch_size": 1}
    audio = graph.add("LTXVEmptyLatentAudio", 0, "", silence, audio_vae=sound)[0]
    model = parts.lora(graph, model, which=distilled, strength=0.5)[0]
    model = parts.compile_model(graph, COMPILED, model)
    texts = parts.prompts(graph, clip, PROMPT, parts.NEGATIVE)
    rate = {"frame_rate": 25.0}
    positive, negative = graph.add("LTXVConditioning", 2, "", rate, positive=texts[0], negative=texts[1])
    latent = graph.add("LTXVConcatAVLatent", 3, video_latent=video, audio_latent=audio)[0]
    guider = graph.add("CFGGuider", 3, "", {"cfg": 1.0}, model=model, positive=positive, negative=negative)[0]
    sigmas = graph.add("ManualSigmas", 3, "", {"sigmas": DISTILLED})[0]
    samples = parts.advanced_sampler(graph, guider, sigmas, latent, "euler")
    video, audio = graph.add("LTXVSeparateAVLatent", 4, av_latent=samples)
    heard = graph.add("LTXVAudioVAEDecode", 4, samples=audio, audio_vae=sound)[0]
    parts.save_video(graph, video, vae, 25.0, tiled=True, audio=heard)


def minimax_h3(graph: Graph) -> None:
    """MiniMax-H3, a video with its sound: six steps with the LoRA that is made for few."""
    name = "minimax_h3_fl2va_pruned_int8_convrot.safetensors"
    unet = parts.file("diffusion_models", name, H3 + "diffusion_models/")
    text = parts.file("text_encoders", "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", H3 + "text_encoders/")
    turbo = parts.file("loras", "minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors", H3_TURBO)
    vaes = [
        parts.file("vae", f"minimax_h3_{kind}.safetensors", H3 + "vae/")
        for kind in ("video_vae_fp16", "audio_vae_fp32")
    ]
    loaded = parts.split_files(graph, unet, (text,), "minimax", vaes[0])
    sound = graph.add("VAELoader", 0, "VAE of the sound", {"vae_name": vaes[1][0]}, (vaes[1],))[0]
    model = parts.compile_model(graph, COMPILED, parts.lora(graph, loaded.model, which=turbo)[0])
    widgets = {"prompt": PROMPT, "width": 832, "height": 480, "length": 56}
    links = {"clip": loaded.clip, "vae": loaded.vae}
    positive, latent = graph.add("MiniMaxH3ImageToVideo", 2, "Prompt and size", widgets, **links)
    guider = graph.add("BasicGuider", 3, model=model, conditioning=positive)[0]
    steps = {"scheduler": "simple", "steps": 6, "denoise": 1.0}
    sigmas = graph.add("BasicScheduler", 3, "", steps, model=model)[0]
    samples = parts.advanced_sampler(graph, guider, sigmas, latent, "res_multistep")
    heard = graph.add("VAEDecodeAudio", 4, samples=samples, vae=sound)[0]
    parts.save_video(graph, samples, loaded.vae, 24.0, audio=heard)
