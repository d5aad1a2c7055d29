# SPDX-License-Identifier: Apache-2.0
"""What the families share: files, loaders, what is done to a model, prompts, sampler, results.

Columns of the canvas: 0 what is loaded, 1 what is done to it, 2 the prompt, 3 sampling, 4 the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workflow_graph import Graph, Out

from .family import CONTROLNET, LOW_PRECISION, PLAIN, VAE
from .family import LORA as WITH_LORA

HUB = "https://huggingface.co/"
FLUX_TEXT = HUB + "comfyanonymous/flux_text_encoders/resolve/main/"
NEGATIVE = "blurry, low quality, watermark, text"
PICTURE = "example.png"  # comes with ComfyUI

File = tuple[str, str, str]  # name, folder, address


def file(folder: str, name: str, where: str = "") -> File:
    """A file to load; `where` is the address it is kept below, empty if it has to be renamed by hand."""
    return name, folder, where and where + name


ANY_LORA = file("loras", "pick_your_lora.safetensors")


@dataclass(frozen=True)
class Loaded:
    """The three that every workflow has."""

    model: Out
    clip: Out
    vae: Out


# ---- loaders ---------------------------------------------------------------------------------------------


def checkpoint(graph: Graph, whole: File) -> Loaded:
    """Model, text encoder and VAE from one file."""
    return Loaded(*graph.add("CheckpointLoaderSimple", 0, "", {"ckpt_name": whole[0]}, (whole,)))


def diffusion_model(graph: Graph, unet: File, title: str = "") -> Out:
    """A model from a file of its own."""
    return graph.add("UNETLoader", 0, title, {"unet_name": unet[0], "weight_dtype": "default"}, (unet,))[0]


def text_encoder(graph: Graph, texts: tuple[File, ...], kind: str) -> Out:
    """One text encoder, or two as one."""
    names = ["clip_name"] if len(texts) == 1 else ["clip_name1", "clip_name2"]
    widgets = {name: text[0] for name, text in zip(names, texts, strict=True)} | {"type": kind}
    loader = "CLIPLoader" if len(texts) == 1 else "DualCLIPLoader"
    return graph.add(loader, 0, "", widgets | {"device": "default"}, texts)[0]


def split_files(graph: Graph, unet: File, texts: tuple[File, ...], kind: str, vae: File) -> Loaded:
    """Model, text encoder and VAE from files of their own."""
    model = diffusion_model(graph, unet)
    clip = text_encoder(graph, texts, kind)
    return Loaded(model, clip, graph.add("VAELoader", 0, "", {"vae_name": vae[0]}, (vae,))[0])


def size(graph: Graph, kind: str, width: int, height: int, length: int = 0) -> Out:
    """The empty latent, where the size is set; `length` in frames for a video."""
    frames = {"length": length} if length else {}
    return graph.add(kind, 0, "", {"width": width, "height": height, **frames, "batch_size": 1})[0]


# ---- what is done to the model ---------------------------------------------------------------------------


def lora(
    graph: Graph, model: Out, clip: Out | None = None, which: File = ANY_LORA, strength: float = 1.0
) -> tuple[Out, ...]:
    """A LoRA on the model, and on the text encoder where the family's LoRAs have a part for it."""
    widgets: dict[str, object] = {"lora_name": which[0], "strength_model": strength}
    if clip is None:
        return graph.add("LoraLoaderModelOnly", 1, "", widgets, (which,), model=model)
    return graph.add("LoraLoader", 1, "", widgets | {"strength_clip": 1.0}, (which,), model=model, clip=clip)


def shifted(graph: Graph, model: Out, shift: float, kind: str = "ModelSamplingSD3") -> Out:
    """The model with another shift of its noise."""
    return graph.add(kind, 1, "", {"shift": shift}, model=model)[0]


def compile_model(graph: Graph, flavour: str, model: Out, title: str = "") -> Out:
    """The node this is all about, last before the sampler; nothing in the plain flavour."""
    if flavour == PLAIN:
        return model
    widgets = _widgets("O3" if flavour == LOW_PRECISION else "O2")
    return graph.add("NexfortCompileModel", 1, title, widgets, model=model)[0]


def compile_vae(graph: Graph, flavour: str, vae: Out) -> Out:
    """The same for the VAE, in the flavour that has it."""
    return graph.add("NexfortCompileVAE", 1, "", _widgets("O2"), vae=vae)[0] if flavour == VAE else vae


def _widgets(mode: str) -> dict[str, object]:
    given = {"mode": mode, "dynamic": True, "memory_format": "channels_last"}
    return {**given, "options": "", "enabled": True, "verify": False, "wait": False}


def prepared(
    graph: Graph,
    flavour: str,
    loaded: Loaded,
    *,
    which_lora: File = ANY_LORA,
    lora_has_clip: bool = False,
    shift: tuple[str, float] | None = None,
) -> Loaded:
    """What was loaded with all that the flavour does to it: LoRA, shift of the noise (node, value), compile nodes."""
    if flavour == WITH_LORA:
        found = lora(graph, loaded.model, loaded.clip if lora_has_clip else None, which_lora)
        loaded = replace(loaded, **dict(zip(("model", "clip"), found, strict=False)))
    model = shifted(graph, loaded.model, shift[1], shift[0]) if shift else loaded.model
    model = compile_model(graph, flavour, model)
    return replace(loaded, model=model, vae=compile_vae(graph, flavour, loaded.vae))


# ---- what is asked for -----------------------------------------------------------------------------------


def prompts(graph: Graph, clip: Out, positive: str, negative: str | None) -> tuple[Out, Out]:
    """The two text encodings; without a negative text it is the positive one emptied."""
    first = graph.add("CLIPTextEncode", 2, "", {"text": positive}, clip=clip)[0]
    if negative is None:
        return first, graph.add("ConditioningZeroOut", 2, conditioning=first)[0]
    return first, graph.add("CLIPTextEncode", 2, "Negative prompt", {"text": negative}, clip=clip)[0]


@dataclass(frozen=True)
class Edges:
    """A ControlNet that follows the edges of a picture, and how it is used."""

    net: File
    strength: float
    width: int
    height: int
    thresholds: tuple[float, float] = (0.4, 0.8)
    needs_vae: bool = False  # its hints are latents


def follow(graph: Graph, flavour: str, texts: tuple[Out, Out], edges: Edges, vae: Out) -> tuple[Out, Out]:
    """The prompts with a compiled ControlNet behind them; unchanged in the other flavours."""
    if flavour != CONTROLNET:
        return texts
    net = graph.add("ControlNetLoader", 0, "", {"control_net_name": edges.net[0]}, (edges.net,))[0]
    net = graph.add("NexfortCompileControlNet", 1, "", _widgets("O2"), control_net=net)[0]
    image = graph.add("LoadImage", 0, "Picture to follow", {"image": PICTURE, "upload": "image"})[0]
    fit = {"upscale_method": "bilinear", "width": edges.width, "height": edges.height, "crop": "center"}
    image = graph.add("ImageScale", 1, "", fit, image=image)[0]
    low, high = edges.thresholds
    image = graph.add("Canny", 1, "", {"low_threshold": low, "high_threshold": high}, image=image)[0]
    widgets = {"strength": edges.strength, "start_percent": 0.0, "end_percent": 1.0}
    links = {"positive": texts[0], "negative": texts[1], "control_net": net, "image": image}
    links |= {"vae": vae} if edges.needs_vae else {}
    positive, negative = graph.add("ControlNetApplyAdvanced", 2, "", widgets, **links)
    return positive, negative


# ---- sampling and the result -----------------------------------------------------------------------------


Settings = tuple[int, float, str, str]  # steps, CFG, method, scheduler


def sampler(graph: Graph, model: Out, texts: tuple[Out, Out], latent: Out, settings: Settings) -> Out:
    """A KSampler."""
    steps, cfg, name, scheduler = settings
    widgets = {
        "seed": 42, "control_after_generate": "randomize", "steps": steps, "cfg": cfg, "sampler_name": name,
        "scheduler": scheduler, "denoise": 1.0,
    }  # fmt: skip
    links = {"model": model, "positive": texts[0], "negative": texts[1], "latent_image": latent}
    return graph.add("KSampler", 3, "", widgets, **links)[0]


def advanced_sampler(graph: Graph, guider: Out, sigmas: Out, latent: Out, method: str) -> Out:
    """The sampler whose parts are nodes of their own."""
    seed = {"noise_seed": 42, "control_after_generate": "randomize"}
    links = {
        "noise": graph.add("RandomNoise", 3, "", seed)[0],
        "guider": guider,
        "sampler": graph.add("KSamplerSelect", 3, "", {"sampler_name": method})[0],
        "sigmas": sigmas,
        "latent_image": latent,
    }
    return graph.add("SamplerCustomAdvanced", 3, **links)[0]


def save_image(graph: Graph, samples: Out, vae: Out) -> None:
    """Decode and save an image."""
    image = graph.add("VAEDecode", 4, samples=samples, vae=vae)[0]
    graph.add("SaveImage", 4, "", {"filename_prefix": f"nexfort/{graph.name}"}, images=image)


def save_video(graph: Graph, samples: Out, vae: Out, fps: float, tiled: bool = False, audio: Out | None = None) -> None:
    """Decode and save a video."""
    tiles = {"tile_size": 256, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}
    kind, widgets = ("VAEDecodeTiled", tiles) if tiled else ("VAEDecode", {})
    frames = graph.add(kind, 4, "", widgets, samples=samples, vae=vae)[0]
    heard = {} if audio is None else {"audio": audio}
    video = graph.add("CreateVideo", 4, "", {"fps": fps}, images=frames, **heard)[0]
    saving = {"filename_prefix": f"nexfort/{graph.name}", "format": "auto", "codec": "auto"}
    graph.add("SaveVideo", 4, "", saving, video=video)
