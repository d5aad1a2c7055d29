# SPDX-License-Identifier: Apache-2.0
"""The example workflows, written once: both `workflows/*.json` and `workflows/api/*.json` come from here.

    python tests/workflow_source.py           says whether the files are what this source gives
    python tests/workflow_source.py --write   writes them

Widgets stand in the order of the front end; tests/nodes/test_workflows.py proves names, order and link types
against a real server. It needs no ComfyUI itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from workflow_graph import Graph, Out

WORKFLOWS = Path(__file__).resolve().parent.parent / "workflows"
FLAVOURS = {
    "compile_model": "model compiled",
    "compile_model_vae": "model and VAE compiled",
    "compile_model_lora": "model compiled, with a LoRA",
}
LORA = "pick_your_lora.safetensors"

# ---- parts that families share ---------------------------------------------------------------------------


def compile_model(graph: Graph, model: Out, column: int, memory_format: str) -> Out:
    """The node this is all about, last before the sampler."""
    widgets = {"mode": "O2", "dynamic": True, "memory_format": memory_format, "options": "", "enabled": True}
    return graph.add("NexfortCompileModel", column, "Nexfort Compile Model", widgets, model=model)[0]


def compile_vae(graph: Graph, vae: Out, column: int, memory_format: str) -> Out:
    """The same for the VAE."""
    widgets = {"mode": "O2", "dynamic": True, "memory_format": memory_format, "options": "", "enabled": True}
    return graph.add("NexfortCompileVAE", column, "Nexfort Compile VAE", widgets, vae=vae)[0]


def prompts(graph: Graph, clip: Out, column: int, positive: str, negative: str | None) -> tuple[Out, Out]:
    """The two text encodings; without a negative text it is the positive one emptied."""
    first = graph.add("CLIPTextEncode", column, "Prompt", {"text": positive}, clip=clip)[0]
    if negative is None:
        return first, graph.add("ConditioningZeroOut", column, "No negative prompt", conditioning=first)[0]
    return first, graph.add("CLIPTextEncode", column, "Negative prompt", {"text": negative}, clip=clip)[0]


def sampler(graph: Graph, column: int, steps: int, cfg: float, name: str, scheduler: str, **links: Out) -> Out:
    """A KSampler with the usual links."""
    widgets = {
        "seed": 42, "control_after_generate": "randomize", "steps": steps, "cfg": cfg, "sampler_name": name,
        "scheduler": scheduler, "denoise": 1.0,
    }  # fmt: skip
    return graph.add("KSampler", column, "", widgets, **links)[0]


def image_size(graph: Graph, column: int, kind: str, width: int, height: int) -> Out:
    """The empty latent, where the size is set."""
    return graph.add(kind, column, "Image size", {"width": width, "height": height, "batch_size": 1})[0]


def show(graph: Graph, column: int, samples: Out, vae: Out) -> None:
    """Decode and save an image."""
    image = graph.add("VAEDecode", column, samples=samples, vae=vae)[0]
    graph.add("SaveImage", column, "", {"filename_prefix": f"nexfort/{graph.name}"}, images=image)


NEGATIVE = "blurry, low quality, watermark, text"
EXPECT = """\
## {title}

**What to expect**
- The first step compiles the model: seconds to a minute, with progress on the sampler and in the log.
- After that every size, batch and prompt length runs at full speed. Change them: nothing compiles again.
- After a restart the compiled artefacts are loaded from disk, so the first image starts warm.
- The picture is the one you get without the node. To compare, bypass it (Ctrl+B) and queue the same seed.
{more}
**Files this workflow wants**
{files}

Any other model of the same family works as well: choose it in the loader."""
MORE = {
    "compile_model": "",
    "compile_model_vae": "- The VAE is compiled when it first decodes, and serves every size after that.\n",
    "compile_model_lora": (
        "- A LoRA is weights, and weights are not compiled in: choose another one or move its strength, and "
        "nothing compiles again. Put the LoRA before Nexfort Compile Model.\n"
    ),
}


def describe(graph: Graph, family: str, flavour: str, remark: str) -> None:
    """The note at the left: what to expect, and which files to get where."""
    lines = [
        f"- `models/{folder}/{name}`" + (f" ([get it]({address}))" if address else "")
        for node in graph.nodes
        for name, folder, address in node["models"]
    ]
    lines += [remark] if remark else []
    title = f"{family}: {FLAVOURS[flavour]}"
    graph.note = EXPECT.format(title=title, more=MORE[flavour], files="\n".join(lines))


def lora(graph: Graph, column: int, model: Out, clip: Out | None = None) -> tuple[Out, ...]:
    """A LoRA on the model, and on the text encoder where the family's LoRAs have a part for it."""
    models = ((LORA, "loras", ""),)
    if clip is None:
        widgets = {"lora_name": LORA, "strength_model": 1.0}
        return graph.add("LoraLoaderModelOnly", column, "LoRA", widgets, models, model=model)
    widgets = {"lora_name": LORA, "strength_model": 1.0, "strength_clip": 1.0}
    return graph.add("LoraLoader", column, "LoRA", widgets, models, model=model, clip=clip)


# ---- the families ----------------------------------------------------------------------------------------

HUB = "https://huggingface.co/"
FLUX_TEXT = HUB + "comfyanonymous/flux_text_encoders/resolve/main/"
LUMINA = HUB + "Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files/"
WAN = HUB + "Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/"
SD15 = HUB + "Comfy-Org/stable-diffusion-v1-5-archive/resolve/main/"
SDXL = HUB + "stabilityai/stable-diffusion-xl-base-1.0/resolve/main/"

File = tuple[str, str, str]  # name, folder, address


def file(folder: str, name: str, where: str = "") -> File:
    """A file to load; `where` is the address it is kept below, empty if it has to be renamed by hand."""
    return name, folder, where and where + name


def split_files(graph: Graph, unet: File, texts: tuple[File, ...], kind: str, vae: File) -> tuple[Out, Out, Out]:
    """Model, text encoder and VAE from files of their own."""
    widgets: dict[str, object] = {"unet_name": unet[0], "weight_dtype": "default"}
    model = graph.add("UNETLoader", 0, "", widgets, (unet,))[0]
    names = ["clip_name"] if len(texts) == 1 else ["clip_name1", "clip_name2"]
    widgets = {name: text[0] for name, text in zip(names, texts, strict=True)} | {"type": kind}
    loader = "CLIPLoader" if len(texts) == 1 else "DualCLIPLoader"
    clip = graph.add(loader, 0, "", widgets | {"device": "default"}, texts)[0]
    return model, clip, graph.add("VAELoader", 0, "", {"vae_name": vae[0]}, (vae,))[0]


def compiled(graph: Graph, flavour: str, model: Out, vae: Out, formats: tuple[str, str]) -> tuple[Out, Out]:
    """Model and VAE as the flavour wants them; `formats` are the memory formats of the two."""
    model = compile_model(graph, model, 1, formats[0])
    return model, compile_vae(graph, vae, 1, formats[1]) if flavour == "compile_model_vae" else vae


def stable_diffusion(graph: Graph, flavour: str, checkpoint: File, size: int, prompt: str) -> None:
    """SD1.5 and SDXL: one checkpoint file; a UNet, so channels_last."""
    model, clip, vae = graph.add("CheckpointLoaderSimple", 0, "", {"ckpt_name": checkpoint[0]}, (checkpoint,))
    latent = image_size(graph, 0, "EmptyLatentImage", size, size)
    if flavour == "compile_model_lora":
        model, clip = lora(graph, 1, model, clip)
    model, vae = compiled(graph, flavour, model, vae, ("channels_last", "channels_last"))
    positive, negative = prompts(graph, clip, 2, prompt, NEGATIVE)
    links = {"model": model, "positive": positive, "negative": negative, "latent_image": latent}
    show(graph, 4, sampler(graph, 3, 20, 7.0, "euler", "normal", **links), vae)


def sd15(graph: Graph, flavour: str) -> None:
    """Stable Diffusion 1.5."""
    checkpoint = file("checkpoints", "v1-5-pruned-emaonly-fp16.safetensors", SD15)
    stable_diffusion(graph, flavour, checkpoint, 512, "a lighthouse on a cliff at dusk, oil painting")


def sdxl(graph: Graph, flavour: str) -> None:
    """Stable Diffusion XL."""
    checkpoint = file("checkpoints", "sd_xl_base_1.0.safetensors", SDXL)
    stable_diffusion(graph, flavour, checkpoint, 1024, "a lighthouse on a cliff at dusk, photograph")


def pixart(graph: Graph, flavour: str) -> None:
    """PixArt Sigma."""
    unet = file("diffusion_models", "PixArt-Sigma-XL-2-1024-MS.safetensors")
    text = file("text_encoders", "t5xxl_fp16.safetensors", FLUX_TEXT)
    image = file("vae", "sdxl_vae.safetensors", HUB + "stabilityai/sdxl-vae/resolve/main/")
    model, clip, vae = split_files(graph, unet, (text,), "pixart", image)
    latent = image_size(graph, 0, "EmptyLatentImage", 1024, 1024)
    if flavour == "compile_model_lora":
        model = lora(graph, 1, model)[0]
    model, vae = compiled(graph, flavour, model, vae, ("channels_last", "channels_last"))
    positive, negative = prompts(graph, clip, 2, "a lighthouse on a cliff at dusk, watercolour", NEGATIVE)
    links = {"model": model, "positive": positive, "negative": negative, "latent_image": latent}
    show(graph, 4, sampler(graph, 3, 20, 4.5, "dpmpp_2m", "normal", **links), vae)


def flux(graph: Graph, flavour: str) -> None:
    """Flux.1 dev; guidance instead of a negative prompt."""
    unet = file("diffusion_models", "flux1-dev.safetensors", HUB + "Comfy-Org/flux1-dev/resolve/main/")
    texts = tuple(file("text_encoders", f"{name}.safetensors", FLUX_TEXT) for name in ("clip_l", "t5xxl_fp16"))
    model, clip, vae = split_files(graph, unet, texts, "flux", file("vae", "ae.safetensors", LUMINA + "vae/"))
    latent = image_size(graph, 0, "EmptySD3LatentImage", 1024, 1024)
    if flavour == "compile_model_lora":
        model = lora(graph, 1, model)[0]
    model, vae = compiled(graph, flavour, model, vae, ("channels_last", "channels_last"))
    positive, negative = prompts(graph, clip, 2, "a lighthouse on a cliff at dusk, long exposure", None)
    positive = graph.add("FluxGuidance", 2, "", {"guidance": 3.5}, conditioning=positive)[0]
    links = {"model": model, "positive": positive, "negative": negative, "latent_image": latent}
    show(graph, 4, sampler(graph, 3, 20, 1.0, "euler", "simple", **links), vae)


def wan(graph: Graph, flavour: str) -> None:
    """Wan 2.1 text to video, 1.3B. Its VAE has a time axis: no channels_last."""
    unet = file("diffusion_models", "wan2.1_t2v_1.3B_fp16.safetensors", WAN + "diffusion_models/")
    text = file("text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors", WAN + "text_encoders/")
    image = file("vae", "wan_2.1_vae.safetensors", WAN + "vae/")
    model, clip, vae = split_files(graph, unet, (text,), "wan", image)
    size = {"width": 832, "height": 480, "length": 33, "batch_size": 1}
    latent = graph.add("EmptyHunyuanLatentVideo", 0, "Video size", size)[0]
    if flavour == "compile_model_lora":
        model = lora(graph, 1, model)[0]
    model = graph.add("ModelSamplingSD3", 1, "", {"shift": 8.0}, model=model)[0]
    model, vae = compiled(graph, flavour, model, vae, ("channels_last", "channels_last"))
    positive, negative = prompts(graph, clip, 2, "waves break against a lighthouse at dusk, aerial shot", NEGATIVE)
    links = {"model": model, "positive": positive, "negative": negative, "latent_image": latent}
    samples = sampler(graph, 3, 30, 6.0, "uni_pc", "simple", **links)
    frames = graph.add("VAEDecode", 4, samples=samples, vae=vae)[0]
    video = graph.add("CreateVideo", 4, "", {"fps": 16.0}, images=frames)[0]
    saving = {"filename_prefix": f"nexfort/{graph.name}", "format": "auto", "codec": "auto"}
    graph.add("SaveVideo", 4, "", saving, video=video)


PIXART_REMARK = (
    "\nThe transformer is published as "
    "[diffusion_pytorch_model.safetensors]("
    + HUB
    + "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS/tree/main/transformer); save it under the name above."
)
FAMILIES = {
    "sd15": ("Stable Diffusion 1.5", sd15, ""),
    "sdxl": ("Stable Diffusion XL", sdxl, ""),
    "pixart": ("PixArt Sigma", pixart, PIXART_REMARK),
    "flux": ("Flux.1 dev", flux, ""),
    "wan": ("Wan 2.1 text to video", wan, ""),
}


def build_all() -> dict[str, Graph]:
    """Every example workflow by name."""
    found = {}
    for key, (family, build, remark) in FAMILIES.items():
        for flavour in FLAVOURS:
            graph = Graph(f"{key}_{flavour}")
            build(graph, flavour)
            describe(graph, family, flavour, remark)
            found[graph.name] = graph
    return found


def files() -> dict[Path, str]:
    """Path -> text of every file below `workflows/`."""
    found = {}
    for name, graph in build_all().items():
        for path, content in ((f"{name}.json", graph.ui()), (f"api/{name}.json", graph.api())):
            found[WORKFLOWS / path] = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return found


def main() -> None:
    """Compare or write; exit status 1 when a file differs."""
    if "--write" in sys.argv[1:]:
        for path, text in files().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    different = [
        path for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in different:
        print(f"{path.relative_to(WORKFLOWS.parent)} differs; python tests/workflow_source.py --write")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
