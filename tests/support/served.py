# SPDX-License-Identifier: Apache-2.0
"""What tests on a real ComfyUI server share: a base folder with tiny files, shipped workflows cut to them.

The server itself is `nexfort_engine.cli.comfy_server.ComfyServer`. No test lives here.
"""

from __future__ import annotations

import functools
import json
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import by_path
import numpy
import pytest
import tiny_checkpoints
from PIL import Image
from workflow_graph import Graph
from workflow_templates import Template

from nexfort_engine.cli.comfy_server import ComfyServer, find_comfyui

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "workflows" / "api"
LOADERS = {"CheckpointLoaderSimple", "UNETLoader", "CLIPLoader", "DualCLIPLoader", "VAELoader"}
COMPILE_NODES = {"NexfortCompileModel", "NexfortCompileVAE", "NexfortCompileControlNet"}
PICTURE = "example.png"  # what workflows that begin with a picture load; ComfyUI brings one

# Which tiny files stand for those of a workflow, by the beginning of its name, the longest that fits; and what its text
# encoder gives where that cannot be tiny. Of SDXL, Qwen-Image and Z-Image ComfyUI knows one width only, so that theirs
# are not tiny: see test_server_large.py.
TINY: dict[str, dict[str, Any]] = {
    "sd15": {"files": ("sd15_full_checkpoint", "sd15_lora"), "size": (96, 64)},
    "sd15_compile_model_controlnet": {
        "files": ("sd15_checkpoint", "sd15_controlnet"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 768, "pooled": 0},
    },
    "sd35": {
        "files": ("sd3_checkpoint", "sd3_lora", "sd3_controlnet"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 64, "pooled": 2048},
    },
    "pixart": {
        "files": ("pixart_unet", "taesd", "pixart_lora"),
        "size": (320, 256),
        "text": {"tokens": 20, "width": 4096, "pooled": 0},
    },
    "flux": {
        "files": ("flux_unet", "taesd_flux", "flux_lora", "flux_controlnet"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 64, "pooled": 32},
    },
    "flux_schnell": {
        "files": ("schnell_unet", "taesd_flux"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 64, "pooled": 32},
    },
    "wan": {
        "files": ("wan_unet", "wan_vae", "wan_lora"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 4096, "pooled": 0},
    },
    "hunyuan_video": {
        "files": ("hunyuan_video_unet", "wan_vae", "hunyuan_video_lora"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 64, "pooled": 768},
    },
    "hunyuan_video_compile_model_vae": {
        "files": ("hunyuan_video_unet", "hunyuan_video_vae"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 64, "pooled": 768},
    },
    "ltxv": {
        "files": ("ltxv_checkpoint", "ltxv_lora"),
        "size": (128, 96),
        "text": {"tokens": 20, "width": 4096, "pooled": 0, "mask": True},
    },
    "sdxl": {
        "files": ("sdxl_checkpoint", "sdxl_lora", "sdxl_controlnet"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 2048, "pooled": 1280},
    },
    "qwen_image": {
        "files": ("qwen_image_unet", "wan_vae", "qwen_image_lora", "qwen_image_controlnet"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 3584, "pooled": 0},
    },
    "z_image": {
        "files": ("z_image_unet", "taesd_flux", "z_image_lora"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 64, "pooled": 0},
    },
}
TINY["wan22"] = TINY["wan"]
TINY |= {
    "wan_i2v": {**TINY["wan"], "files": ("wan_i2v_unet", "wan_vae", "wan_i2v_lora")},
    "krea2": {
        "files": ("krea2_unet", "wan_vae"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 640, "pooled": 0},
    },
    "flux2": {
        "files": ("flux2_unet", "kl_vae_flux2"),
        "size": (96, 64),
        "text": {"tokens": 20, "width": 64, "pooled": 0},
    },
    "qwen_image_edit": TINY["qwen_image"],
}
TOLERANCE = 1e-4  # fp32 on a CPU
FILE_INPUTS = {
    "ckpt_name": "checkpoint",
    "unet_name": "unet",
    "vae_name": "vae",
    "lora_name": "lora",
    "control_net_name": "controlnet",
    "clip_name": "clip",
    "clip_name1": "clip",
    "clip_name2": "clip",
    "text_encoder": "clip",
}


def comfyui_or_skip() -> Path:
    """The ComfyUI of this machine; skips the test where there is none."""
    found = find_comfyui()
    if found is None:
        pytest.skip("no ComfyUI found; set COMFYUI_PATH to the root of one")
    return found[0]


@functools.cache
def plugin_nodes() -> ModuleType:
    """The plugin's package of nodes as a custom node pack, in this process. ComfyUI must be imported first."""
    name = "custom_nodes/Nexfort"
    by_path.load(name, ROOT)
    return sys.modules[name + ".nodes"]


def base_folder(folder: Path, comfyui: Path, *names: str) -> Path:
    """A base directory for the server: the named tiny files in its models, the testing nodes in its packs."""
    (folder / "custom_nodes").mkdir(parents=True, exist_ok=True)
    pack = folder / "custom_nodes" / "testing_nodes"
    if not pack.exists():
        pack.symlink_to(ROOT / "tests" / "support" / "testing_nodes", target_is_directory=True)
    if names:
        tiny_checkpoints.make(comfyui, folder / "models", *names)
    return folder


def picture(base: Path) -> None:
    """The picture that some workflows begin with, in the base directory."""
    (base / "input").mkdir(exist_ok=True)
    Image.radial_gradient("L").resize((120, 80)).convert("RGB").save(base / "input" / PICTURE)


def name_only(base: Path, graphs: Iterable[Graph]) -> None:
    """An empty file for each that the workflows load: enough where only the loaders' lists are looked at."""
    for name, folder, _ in {model for graph in graphs for node in graph.nodes for model in node["models"]}:
        place = base / "models" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / name).touch()


def server(
    comfyui: Path, base: Path, cache: Path, *extra_args: str, plugin: Path = ROOT, waits: bool = True
) -> ComfyServer:
    """A server on a CPU with the plugin and nothing of the user's. waits: first steps wait for what is compiled."""
    arguments = ["--cpu", "--use-pytorch-cross-attention", "--disable-api-nodes", *extra_args]
    return ComfyServer(
        comfyui,
        plugin=plugin,
        base_dir=base,
        cache_dir=cache,
        extra_args=arguments,
        env={"NEXFORT_WAIT": str(int(waits))},
    )


def request(
    server: ComfyServer,
    path: str,
    data: bytes | None = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Any]:
    """(status, JSON or text) of a request, refused or not. data: the body, JSON unless the headers say otherwise."""
    told = {"Content-Type": "application/json", **(headers or {})}
    asked = urllib.request.Request(server.url + path, data=data, headers=told, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    return status, json.loads(text) if text[:1] in ("{", "[") else text


def tiny_for(name: str) -> dict[str, Any]:
    """The row of TINY for a workflow."""
    return TINY[max((begin for begin in TINY if f"{name}_".startswith(f"{begin}_")), key=len)]


def tiny_workflow(name: str, *, compiled: bool = True, seed: int = 3, tokens: int = 0) -> dict[str, Any]:
    """The shipped API workflow `name` with tiny files, two steps, a small size, its latent and a video's frames saved.

    Text encoders that cannot be tiny are replaced by random conditioning of `tokens` tokens (0: the usual).
    """
    workflow = json.loads((API / f"{name}.json").read_text(encoding="utf-8"))
    return shrunk(workflow, tiny_for(name), name, compiled=compiled, seed=seed, tokens=tokens)


def tiny_template(template: Template, *, compiled: bool = True, seed: int = 3) -> dict[str, Any]:
    """The same of a template."""
    assert template.tiny is not None
    return shrunk(template.graph().api(), TINY[template.tiny], template.name, compiled=compiled, seed=seed)


def shrunk(
    workflow: dict[str, Any], tiny: dict[str, Any], name: str, *, compiled: bool, seed: int, tokens: int = 0
) -> dict[str, Any]:
    """A workflow cut to a row of TINY."""
    for number in list(workflow):
        node = workflow[number]
        inputs = node["inputs"]
        _cut(node, tiny, seed)
        if node["class_type"] in COMPILE_NODES:
            inputs["enabled"] = compiled
        elif node["class_type"] in ("VAEDecode", "VAEDecodeTiled"):
            samples = inputs["samples"]
        elif node["class_type"] == "CreateVideo":
            frames = {"images": inputs["images"], "filename_prefix": f"frames/{name}"}
            workflow["frames"] = {"class_type": "SaveImage", "inputs": frames}
        elif node["class_type"] in ("CLIPLoader", "DualCLIPLoader"):
            del workflow[number]
        elif node["class_type"] == "CLIPTextEncode" and "text" in tiny:
            text = {**tiny["text"], "seed": zlib.crc32(inputs["text"].encode()) % 2048}  # the same text is the same
            workflow[number] = {"class_type": "TestRandomConditioning", "inputs": text}
            if tokens:
                text["tokens"] = tokens
        elif node["class_type"] == "TextEncodeQwenImageEditPlus":
            _see_by_latent(workflow, number, {**tiny["text"], "seed": len(inputs["prompt"])})
    saving = {"samples": samples, "filename_prefix": f"latents/{name}"}
    workflow["latent"] = {"class_type": "SaveLatent", "inputs": saving}
    return dict(workflow)


def _see_by_latent(workflow: dict[str, Any], number: str, text: dict[str, Any]) -> None:
    """Random conditioning with the picture as a reference, for a text encoder that sees pictures."""
    inputs = workflow[number]["inputs"]
    words, seen = f"{number}words", f"{number}seen"
    workflow[words] = {"class_type": "TestRandomConditioning", "inputs": text}
    workflow[seen] = {"class_type": "VAEEncode", "inputs": {"pixels": inputs["image1"], "vae": inputs["vae"]}}
    links = {"conditioning": [words, 0], "latent": [seen, 0]}
    workflow[number] = {"class_type": "ReferenceLatent", "inputs": links}


def _cut(node: dict[str, Any], tiny: dict[str, Any], seed: int) -> None:
    """One node with its tiny file, two steps and a small size. A sampler that takes over goes on at the second step."""
    inputs = node["inputs"]
    width, height = tiny["size"]
    for key in FILE_INPUTS.keys() & inputs.keys():
        inputs[key] = _tiny_name(tiny["files"], FILE_INPUTS[key])
    if node["class_type"] == "FluxKontextImageScale":  # to a million pixels
        fit = {"upscale_method": "bilinear", "width": width, "height": height, "crop": "center"}
        node |= {"class_type": "ImageScale", "inputs": {**inputs, **fit}}
    elif {"width", "height"} <= inputs.keys():
        inputs |= {"width": width, "height": height}
    small = {"steps": 2, "seed": seed, "noise_seed": seed, "length": 5}
    inputs |= {key: value for key, value in small.items() if key in inputs}
    if "end_at_step" in inputs:
        inputs |= {"start_at_step": 1} if inputs["start_at_step"] else {"end_at_step": 1}


def resize(workflow: dict[str, Any], width: int, height: int, batch: int = 1) -> dict[str, Any]:
    """The workflow at another size."""
    for node in workflow.values():
        if {"width", "height", "batch_size"} <= node["inputs"].keys():
            node["inputs"] |= {"width": width, "height": height, "batch_size": batch}
    return workflow


def latent(base: Path, history: dict[str, Any]) -> numpy.ndarray:
    """The latent that a run of `tiny_workflow` saved."""
    from safetensors.numpy import load_file

    (saved,) = history["outputs"]["latent"]["latents"]
    return load_file(base / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]


def images(base: Path, history: dict[str, Any]) -> list[numpy.ndarray]:
    """The images that a run saved, as whole numbers; a video's are its frames, and its own file is only looked up."""
    found = []
    for output in history["outputs"].values():
        for saved in output.get("images", []):
            path = base / "output" / saved["subfolder"] / saved["filename"]
            assert path.stat().st_size > 0
            if path.suffix == ".png":
                found.append(numpy.asarray(Image.open(path)).astype(int))
    return found


def compiled_equals_eager(server: ComfyServer, base: Path, name: str, *, timeout: float = 300) -> None:
    """Run a shipped workflow uncompiled, with another seed, and compiled: latents and images must be the same."""
    made = functools.partial(tiny_workflow, name)
    same_picture(server, base, [made(compiled=False), made(compiled=False, seed=4), made()], timeout=timeout)


def same_picture(server: ComfyServer, base: Path, workflows: list[dict[str, Any]], *, timeout: float = 300) -> None:
    """Run a workflow uncompiled, uncompiled with another seed, and compiled."""
    eager, other, ours = (server.run(workflow, timeout=timeout) for workflow in workflows)
    assert not left_out(server, workflows[-1]), "what ran nothing compiled would be compared with itself"
    wanted = latent(base, eager)
    assert numpy.isfinite(wanted).all()
    assert distance(latent(base, other), wanted) > 100 * TOLERANCE
    assert distance(latent(base, ours), wanted) < TOLERANCE
    pictures = images(base, eager)
    assert pictures and all(image.std() > 5 for image in pictures)
    for image, expected in zip(images(base, ours), pictures, strict=True):
        assert abs(image - expected).max() <= 1  # one step of 8 bits, where rounding tips over


def left_out(server: ComfyServer, workflow: dict[str, Any]) -> list[str]:
    """The compile nodes of a workflow that ran, whose networks did not run compiled."""
    ran = set()
    for engine in server.get("/nexfort/report")["engines"]:
        report = engine["report"]
        if report["artefacts_compiled"] + report["artefacts_loaded"] and report["calls"]:
            ran.update(node["id"] for node in engine["nodes"])
    nodes = [number for number, node in workflow.items() if node["class_type"] in COMPILE_NODES]
    return [f"{number} {workflow[number]['class_type']}" for number in nodes if number not in ran]


def distance(ours: numpy.ndarray, eager: numpy.ndarray) -> float:
    """||ours - eager|| / ||eager||, as everywhere in this project."""
    return float(numpy.linalg.norm(ours - eager) / numpy.linalg.norm(eager))


def _tiny_name(files: tuple[str, ...], kind: str) -> str:
    """The loader's name of the tiny file of one kind. A text encoder has none: its loader is taken out."""
    return next((f"tiny_{file}.safetensors" for file in files if kind in file or _is_vae(file, kind)), "")


def _is_vae(file: str, kind: str) -> bool:
    return kind == "vae" and "taesd" in file
