# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files with random weights, as small as ComfyUI's own detection accepts, for its own loaders.

Each file has exactly the keys of the real one: it is the state dict of ComfyUI's own class at a small size,
so that its checkpoint, diffusion model, text encoder, VAE and LoRA loaders take it like any other. The weights
have a scale at which every input matters to the result. Same name and seed, same bytes. Nothing here runs a
model.

    python tests/support/tiny_checkpoints.py --comfyui ~/comfy/ComfyUI --models base/models flux_unet taesd_flux

ComfyUI is imported only when a file is made. As it has modules with common names, call `make`, which does it
in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_autoencoders import LTXV_VAE, hunyuan_video_vae, kl_vae, ltxv_vae, taesd, wan_vae
from tiny_controlnets import flux_controlnet, qwen_image_controlnet, sd3_controlnet, sd15_controlnet, sdxl_controlnet
from tiny_networks import (
    flux2_unet,
    flux_unet,
    hunyuan_video_unet,
    krea2_unet,
    ltxv_unet,
    pixart_unet,
    qwen_image_unet,
    random_weights,
    sd3_unet,
    sd15_unet,
    sdxl_unet,
    wan_i2v_unet,
    wan_unet,
    z_image_unet,
)

KEPT = "NEXFORT_TEST_FILES"
LARGE = 64 << 20  # bytes


@dataclass(frozen=True)
class Tiny:
    """One file: where it belongs in ComfyUI's models folder, and what builds its state dict from a seed.

    metadata: what its header says besides.
    """

    folder: str
    build: Callable[[int], dict[str, Any]]
    doc: str
    metadata: dict[str, str] | None = None

    def path(self, models: Path, name: str) -> Path:
        """Where the file lies below a models folder. The loaders list it by `path.name`."""
        return models / self.folder / f"tiny_{name}.safetensors"


# ---- the parts ------------------------------------------------------------------------------------------


def _prefixed(prefix: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in weights.items()}


def clip_l(seed: int) -> dict[str, Any]:
    """CLIP-L at full size in half precision (about 250 MB): its sizes are fixed in ComfyUI."""
    import torch
    from comfy.sd1_clip import SDClipModel

    found = random_weights(SDClipModel(device="cpu", dtype=torch.float32).transformer, seed, torch.float16)
    for name in (
        "text_model.embeddings.token_embedding.weight",
        "text_model.embeddings.position_embedding.weight",
    ):
        found[name] = (found[name].float() * found[name].shape[1] ** 0.5 * 0.02).half()
    return found


def sd15_checkpoint(seed: int, text_encoder: bool = False) -> dict[str, Any]:
    """UNet and VAE in one file in the layout of Stable Diffusion 1.5, with CLIP-L or without."""
    found = _prefixed("model.diffusion_model.", sd15_unet(seed)) | _prefixed("first_stage_model.", taesd(4)(seed))
    if text_encoder:
        found |= _prefixed("cond_stage_model.transformer.", clip_l(seed))
        # The SD1 layout has no text projection.
        found.pop("cond_stage_model.transformer.text_projection.weight", None)
    return found


def sd3_checkpoint(seed: int) -> dict[str, Any]:
    """UNet and VAE in one file in the layout of Stable Diffusion 3, without text encoders."""
    return _prefixed("model.diffusion_model.", sd3_unet(seed)) | _prefixed("first_stage_model.", taesd(16)(seed))


def ltxv_checkpoint(seed: int) -> dict[str, Any]:
    """Transformer and VAE in one file in the layout of LTX-Video."""
    return _prefixed("model.diffusion_model.", ltxv_unet(seed)) | _prefixed("vae.", ltxv_vae(seed))


def lora(
    base: Callable[[int], dict[str, Any]], rank: int = 4, *, huge: bool = False
) -> Callable[[int], dict[str, Any]]:
    """A LoRA on every matrix inside the blocks of `base`, in the naming that fits any family.

    huge: `base` has gigabytes, so none of its numbers are made; not every network can be built without.
    """

    def build(seed: int) -> dict[str, Any]:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() if huge else nullcontext():
            shapes = {name: tensor.shape for name, tensor in base(0).items()}
        found = {}
        for name, shape in shapes.items():
            # Z-Image calls its blocks layers
            if not name.endswith(".weight") or len(shape) != 2 or not ("block" in name or name.startswith("layers.")):
                continue
            key = f"diffusion_model.{name.removesuffix('.weight')}"
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
            found[f"{key}.lora_A.weight"] = torch.randn((rank, shape[1]), generator=generator) / shape[1] ** 0.5
            found[f"{key}.lora_B.weight"] = torch.randn((shape[0], rank), generator=generator) / rank**0.5
        return found

    return build


def sdxl_checkpoint(seed: int) -> dict[str, Any]:
    """UNet and VAE in one file in the layout of Stable Diffusion XL, without text encoders."""
    return _prefixed("model.diffusion_model.", sdxl_unet(seed)) | _prefixed("first_stage_model.", taesd(4)(seed))


# ---- the files ------------------------------------------------------------------------------------------

FILES: dict[str, Tiny] = {
    "sd15_checkpoint": Tiny("checkpoints", sd15_checkpoint, "SD1.5 UNet + VAE"),
    "sd15_full_checkpoint": Tiny("checkpoints", lambda s: sd15_checkpoint(s, True), "SD1.5 UNet + VAE + CLIP-L"),
    "sd3_checkpoint": Tiny("checkpoints", sd3_checkpoint, "SD3 + VAE"),
    "ltxv_checkpoint": Tiny(
        "checkpoints", ltxv_checkpoint, "LTX-Video + VAE", {"config": json.dumps({"vae": LTXV_VAE})}
    ),
    "sd15_unet": Tiny("diffusion_models", sd15_unet, "SD1.5 UNet"),
    "flux_unet": Tiny("diffusion_models", flux_unet, "Flux transformer"),
    "schnell_unet": Tiny("diffusion_models", lambda s: flux_unet(s, False), "Flux transformer without guidance"),
    "sd3_unet": Tiny("diffusion_models", sd3_unet, "SD3 transformer"),
    "wan_unet": Tiny("diffusion_models", wan_unet, "Wan 2.1 text-to-video transformer"),
    "wan_i2v_unet": Tiny("diffusion_models", wan_i2v_unet, "Wan 2.2 image-to-video transformer"),
    "krea2_unet": Tiny("diffusion_models", krea2_unet, "Krea 2 transformer"),
    "flux2_unet": Tiny("diffusion_models", flux2_unet, "FLUX.2 Klein transformer"),
    "pixart_unet": Tiny("diffusion_models", pixart_unet, "PixArt Sigma transformer"),
    "hunyuan_video_unet": Tiny("diffusion_models", hunyuan_video_unet, "HunyuanVideo transformer"),
    "sdxl_checkpoint": Tiny("checkpoints", sdxl_checkpoint, "SDXL UNet at full width + VAE, 2.6 GB"),
    "qwen_image_unet": Tiny("diffusion_models", qwen_image_unet, "Qwen-Image transformer at full width, 1.4 GB"),
    "z_image_unet": Tiny("diffusion_models", z_image_unet, "Z-Image transformer at full width, 2.2 GB"),
    "sd15_controlnet": Tiny("controlnet", sd15_controlnet, "ControlNet for sd15_unet"),
    "sdxl_controlnet": Tiny("controlnet", sdxl_controlnet, "ControlNet for SDXL at full width"),
    "sd3_controlnet": Tiny("controlnet", sd3_controlnet, "ControlNet for sd3_unet"),
    "flux_controlnet": Tiny("controlnet", flux_controlnet, "ControlNet for flux_unet"),
    "qwen_image_controlnet": Tiny("controlnet", qwen_image_controlnet, "ControlNet for Qwen-Image at full width"),
    "clip_l": Tiny("text_encoders", clip_l, "CLIP-L text encoder, full size"),
    "taesd": Tiny("vae", taesd(4), "small autoencoder, 4 channels"),
    "taesd_flux": Tiny("vae", taesd(16), "small autoencoder, 16 channels"),
    "kl_vae": Tiny("vae", kl_vae(4), "AutoencoderKL, 4 channels"),
    "kl_vae_flux": Tiny("vae", kl_vae(16), "AutoencoderKL, 16 channels"),
    "kl_vae_flux2": Tiny("vae", kl_vae(32, normed=True), "AutoencoderKL of FLUX.2"),
    "wan_vae": Tiny("vae", wan_vae, "Wan 2.1 video autoencoder"),
    "hunyuan_video_vae": Tiny("vae", hunyuan_video_vae, "HunyuanVideo autoencoder, full size, 0.5 GB"),
    "sd15_lora": Tiny("loras", lora(sd15_unet), "LoRA for sd15_unet"),
    "flux_lora": Tiny("loras", lora(flux_unet), "LoRA for flux_unet"),
    "wan_lora": Tiny("loras", lora(wan_unet), "LoRA for wan_unet"),
    "wan_i2v_lora": Tiny("loras", lora(wan_i2v_unet), "LoRA for wan_i2v_unet"),
    "pixart_lora": Tiny("loras", lora(pixart_unet), "LoRA for pixart_unet"),
    "sd3_lora": Tiny("loras", lora(sd3_unet), "LoRA for sd3_unet"),
    "hunyuan_video_lora": Tiny("loras", lora(hunyuan_video_unet), "LoRA for hunyuan_video_unet"),
    "ltxv_lora": Tiny("loras", lora(ltxv_unet), "LoRA for ltxv_unet"),
    "sdxl_lora": Tiny("loras", lora(sdxl_unet, huge=True), "LoRA for sdxl_unet"),
    "qwen_image_lora": Tiny("loras", lora(qwen_image_unet, huge=True), "LoRA for qwen_image_unet"),
    "z_image_lora": Tiny("loras", lora(z_image_unet, huge=True), "LoRA for z_image_unet"),
}


def make(comfyui: Path, models: Path, *names: str, seed: int = 0) -> dict[str, Path]:
    """Write the named files below `models` in a process of its own; those already there stay.

    Files that are not large are made once for all tests of a run, in the directory that KEPT names: importing ComfyUI
    takes longer than making one.
    """
    paths = {name: FILES[name].path(models, name) for name in names}
    store = Path(os.environ[KEPT]) if os.environ.get(KEPT) else None
    for name, path in paths.items():
        if store is not None and not path.exists() and _kept(store, name, seed).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_kept(store, name, seed), path)
    missing = [name for name, path in paths.items() if not path.exists()]
    if missing:
        _make_in_another_process(comfyui, models, missing, seed)
    if store is not None:
        for name in missing:
            _keep(paths[name], _kept(store, name, seed))
    return paths


def _kept(store: Path, name: str, seed: int) -> Path:
    return store / f"{name}_{seed}.safetensors"


def _keep(path: Path, kept: Path) -> None:
    if path.stat().st_size < LARGE:
        partial = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(path, partial)
        partial.replace(kept)


def _make_in_another_process(comfyui: Path, models: Path, names: list[str], seed: int) -> None:
    given = {"--comfyui": comfyui, "--models": models, "--seed": seed}
    options = [str(word) for option in given.items() for word in option]
    command = [sys.executable, __file__, *options, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"making {', '.join(names)} failed with status {done.returncode}:\n{done.stderr[-4000:]}")


def write(models: Path, name: str, seed: int = 0) -> Path:
    """Write one file, unless it is there. ComfyUI must be importable."""
    import torch
    from safetensors.torch import save_file

    path = FILES[name].path(models, name)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            weights = FILES[name].build(seed)
        partial = path.with_suffix(".partial")
        save_file(weights, partial, FILES[name].metadata)
        partial.replace(path)
    return path


def _import_comfyui(comfyui: Path) -> None:
    """Make ComfyUI importable here, set up for a machine without a GPU."""
    sys.path.insert(0, str(comfyui))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    comfy.cli_args.args.use_pytorch_cross_attention = True


def main() -> None:
    """The command line: write the named files."""
    parser = argparse.ArgumentParser(description="Write tiny checkpoint files with random weights.")
    parser.add_argument("--comfyui", type=Path, required=True, help="where ComfyUI lies")
    parser.add_argument("--models", type=Path, required=True, help="the models folder to write below")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="+", choices=sorted(FILES), metavar="name", help=", ".join(sorted(FILES)))
    args = parser.parse_args()
    _import_comfyui(args.comfyui.expanduser().resolve())
    for name in args.names:
        print(write(args.models, name, args.seed))


if __name__ == "__main__":
    main()
