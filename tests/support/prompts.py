# SPDX-License-Identifier: Apache-2.0
"""Prompts as ComfyUI's own executor runs them, with its own caches of outputs, in this process.

The nodes are ComfyUI's and the plugin's; a random conditioning stands for text encoders, and what an output node would
write is kept. Loaders read tiny files of a Flux. No test lives here. ComfyUI must be imported first (the fixture
`comfyui` in conftest.py does it).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import by_path
import pytest
import torch
from patchers import in_the_middle

ROOT = Path(__file__).resolve().parents[2]
BOUND_TO_NODES = ("comfy_execution.graph", "comfy_execution.caching", "execution", "comfy_extras.nodes_controlnet")
WIDGETS = {"mode": "O2", "dynamic": True, "memory_format": "contiguous_format", "wait": True}
Prompt = dict[str, dict[str, Any]]


_load = functools.cache(by_path.load)  # ComfyUI's nodes must be the same classes in every test


@contextlib.contextmanager
def comfyui_nodes(comfyui: Path) -> Iterator[Any]:
    """ComfyUI's module `nodes` under its name, which is also that of the plugin's package, with the plugin's nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))  # ComfyUI's puts a folder in front
        found = _load("nodes", comfyui / "nodes.py")
        patch.setitem(sys.modules, "nodes", found)
        for name in BOUND_TO_NODES:
            patch.setattr(importlib.import_module(name), "nodes", found)
        ours = _load("nexfort_nodes", ROOT / "nodes")
        testing = _load("nexfort_testing_nodes", ROOT / "tests" / "support" / "testing_nodes")
        more = {
            **{kind.define_schema().node_id: kind for kind in (*ours.NODES, testing.TestRandomConditioning)},
            **{kind.__name__: kind for kind in _more_of_comfyui()},
            **{"TestKeep": Keep, "TestInTheMiddle": InTheMiddle},
        }
        patch.setattr(found, "NODE_CLASS_MAPPINGS", {**found.NODE_CLASS_MAPPINGS, **more})
        yield found


def _more_of_comfyui() -> list[type]:
    """Nodes that ComfyUI loads besides its first file."""
    from comfy_extras.nodes_controlnet import SetUnionControlNetType
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    return [SetUnionControlNetType, ModelMergeSimple]


class Keep:
    """An output node that keeps the latent that it is given."""

    CATEGORY, FUNCTION, OUTPUT_NODE = "testing", "keep", True
    RETURN_TYPES: tuple[str, ...] = ()
    kept: torch.Tensor | None = None

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"samples": ("LATENT",)}}

    def keep(self, samples: dict[str, Any]) -> dict[str, Any]:
        Keep.kept = samples["samples"].clone()
        return {}


class InTheMiddle:
    """A node on whose model something happens between the first and the second step."""

    CATEGORY, FUNCTION, RETURN_TYPES = "testing", "change", ("MODEL",)
    action: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def change(self, model: Any) -> tuple[Any]:
        return (in_the_middle(model, lambda: InTheMiddle.action()),)


class Failed(Exception):
    """A prompt ended with an error; the text is what the front end is told."""


class Executor:
    """ComfyUI's executor with one of its caches, and no browser connected.

    cache: the name of a cache type. limits: what its flags set, `ram` and `ram_inactive` in GB, `lru`.
    """

    def __init__(self, cache: str, **limits: float) -> None:
        import execution

        nobody = SimpleNamespace(client_id=None, last_node_id=None, sockets_metadata={}, send_sync=lambda *_: None)
        arguments = {"lru": 0, "ram": 0.0, "ram_inactive": 0.0, **limits}
        self.of_comfyui = execution.PromptExecutor(nobody, execution.CacheType[cache], arguments)

    def run(self, prompt: Prompt) -> torch.Tensor:
        """The latent that a prompt keeps. Raises Failed with what a user would read."""
        Keep.kept = None
        self.of_comfyui.execute(prompt, str(uuid.uuid4()), execute_outputs=["keep"])
        for event, told in self.of_comfyui.status_messages:
            if event == "execution_error":
                raise Failed(f"{told['node_type']}: {told['exception_type']}: {told['exception_message']}")
            if event == "execution_interrupted":
                raise Failed(f"{told['node_type']} was interrupted")
        assert Keep.kept is not None, "the executor took the latent from its cache"
        return Keep.kept

    @property
    def cached(self) -> set[str]:
        """The nodes of the last prompt that it did not run."""
        return {one for event, told in self.of_comfyui.status_messages if event == "execution_cached"
                for one in told["nodes"]}  # fmt: skip


def flux_prompt(
    file: str, *, compiled: bool, lora: float = 0.0, seed: int = 0, size: int = 128, width: int = 16
) -> Prompt:
    """Loader, LoRA, compile node, a node for what happens in the middle, sampler. width: of the prompt's vectors."""

    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": inputs}

    words = {"tokens": 20, "width": width, "pooled": 8}
    found = {
        "model": node("UNETLoader", unet_name=file, weight_dtype="default"),
        "compile": node("NexfortCompileModel", model=["model", 0], **WIDGETS, options="", enabled=compiled),
        "middle": node("TestInTheMiddle", model=["compile", 0]),
        "positive": node("TestRandomConditioning", seed=1, **words),
        "negative": node("TestRandomConditioning", seed=2, **words),
        "empty": node("EmptyLatentImage", width=size, height=size, batch_size=1),
        "sampler": node(
            "KSampler", model=["middle", 0], positive=["positive", 0], negative=["negative", 0],
            latent_image=["empty", 0], seed=seed, steps=2, cfg=4.0, sampler_name="euler", scheduler="simple",
            denoise=1.0,
        ),
        "keep": node("TestKeep", samples=["sampler", 0]),
    }  # fmt: skip
    if lora:
        given = {"lora_name": "tiny.safetensors", "strength_model": lora}
        found["lora"] = node("LoraLoaderModelOnly", model=["model", 0], **given)
        found["compile"]["inputs"]["model"] = ["lora", 0]
    return found


def tiny_files(folder: Path) -> tuple[str, str]:
    """Two checkpoints of one Flux and a LoRA for it, where ComfyUI's loaders look; the names of the checkpoints."""
    import folder_paths
    from lora_files import file_for
    from quantised import load, plain_weights
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(7)
    first = {name: weight.clone() for name, weight in plain_weights().items()}
    other = {name: w * (1.0 + 0.5 * torch.randn(w.shape, generator=generator)) for name, w in first.items()}
    save_file(first, folder / "first.safetensors")
    save_file(other, folder / "other.safetensors")
    save_file(file_for(load(first)), folder / "tiny.safetensors")
    for kind in ("diffusion_models", "loras"):
        folder_paths.add_model_folder_path(kind, str(folder))
    return "first.safetensors", "other.safetensors"
