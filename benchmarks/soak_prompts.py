# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.soak` sends: random prompts for small models, their workflows, and the files they load.

    COMFYUI_PATH=... python -m benchmarks.soak_prompts MODELS_FOLDER flux sd21

writes the files, for which ComfyUI is imported: so it is run as a process of its own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# backbone -> the node that makes its empty latent with more of its inputs, and the inputs of its conditioning
MODELS: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "flux": ("EmptySD3LatentImage", {}, {"width": 64, "pooled": 32}),
    "sd21": ("EmptyLatentImage", {}, {"width": 1024, "pooled": 0}),
    "wan": ("EmptyHunyuanLatentVideo", {"length": 5}, {"width": 4096, "pooled": 0}),
}
STEPS = 2
_SMALLEST, _LARGEST, _GRID = 64, 320, 16  # pixels of a side
_RANK = 4


@dataclass(frozen=True)
class Prompt:
    """One prompt. cancel: seconds after which it is interrupted. bypass: the compile node. free: before it."""

    model: str
    width: int
    height: int
    tokens: int
    seed: int
    strength: float = 0.0  # of the LoRA; 0: without
    cancel: float | None = None
    bypass: bool = False
    free: bool = False

    def workflow(self, compiled: bool = True) -> dict[str, Any]:
        """In ComfyUI's API format; the latent is saved by the node "latent"."""
        latent, more, text = MODELS[self.model]
        conditioning = {"class_type": "SoakConditioning", "inputs": {**text, "tokens": self.tokens, "seed": self.seed}}
        sampling = {"seed": self.seed, "steps": STEPS, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}
        nodes: dict[str, Any] = {
            "model": _node("UNETLoader", unet_name=f"{self.model}.safetensors", weight_dtype="default"),
            "text": conditioning,
            "size": _node(latent, width=self.width, height=self.height, batch_size=1, **more),
        }
        model = ["model", 0]
        if self.strength:
            lora = {"lora_name": f"{self.model}_lora.safetensors", "strength_model": self.strength}
            nodes["lora"] = _node("LoraLoaderModelOnly", model=model, **lora)
            model = ["lora", 0]
        if compiled and not self.bypass:
            widgets = {"mode": "O2", "dynamic": True, "memory_format": "channels_last"}
            nodes["compile"] = _node("NexfortCompileModel", model=model, **widgets)
            model = ["compile", 0]
        inputs = {"positive": ["text", 0], "negative": ["text", 0], "latent_image": ["size", 0], "denoise": 1.0}
        nodes["sampler"] = _node("KSampler", model=model, **inputs, **sampling)
        nodes["latent"] = _node("SaveLatent", samples=["sampler", 0], filename_prefix="latents/soak")
        return nodes


def _node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def first(models: Sequence[str]) -> int:
    """The prompts after which every model ran without a LoRA and with one, each at two sizes."""
    return 4 * len(models)


def prompts(count: int, seed: int, models: Sequence[str]) -> Iterator[Prompt]:
    """So many prompts: the first ones, then others at random."""
    draw = random.Random(seed)
    ways = [(model, lora) for model in models for lora in (False, True)]

    def side() -> int:
        return draw.randrange(_SMALLEST, _LARGEST + 1, _GRID)

    for number in range(count):
        calm = number < first(models)
        model, lora = ways[number % len(ways)] if calm else draw.choice(ways)
        yield Prompt(
            model=model,
            width=side(),
            height=side(),
            tokens=draw.randrange(8, 120),
            seed=draw.randrange(1 << 20),
            strength=draw.choice((0.25, 0.5, 1.0, round(draw.uniform(0.1, 1.5), 3))) if lora else 0.0,
            cancel=draw.uniform(0.0, 0.6) if not calm and draw.random() < 0.1 else None,
            bypass=not calm and draw.random() < 0.1,
            free=not calm and draw.random() < 0.05,
        )


def write_files(folder: Path, models: Sequence[str]) -> None:
    """The models and a LoRA for each, below ComfyUI's folder of models. ComfyUI must be importable."""
    import torch
    from safetensors.torch import save_file

    from .backbones import BACKBONES, state_dict

    for name in models:
        weights = state_dict(BACKBONES[name].at_small_size(), torch.device("cpu"))
        files = {Path("diffusion_models", f"{name}.safetensors"): weights}
        files[Path("loras", f"{name}_lora.safetensors")] = dict(_lora(weights))
        for file, content in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            save_file({key: tensor.contiguous() for key, tensor in content.items()}, folder / file)


def _lora(weights: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A LoRA on every matrix inside the blocks, in the naming that fits any family."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith(".weight") and weight.ndim == 2 and "block" in name:
            key = f"diffusion_model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            yield f"{key}.lora_A.weight", torch.randn((_RANK, columns), generator=generator) / columns**0.5
            yield f"{key}.lora_B.weight", torch.randn((rows, _RANK), generator=generator) / _RANK**0.5


if __name__ == "__main__":
    from .one_run import as_without_card, find_comfyui

    where, *names = sys.argv[1:]
    find_comfyui()
    as_without_card()
    write_files(Path(where), names)
