# SPDX-License-Identifier: Apache-2.0
"""Workflows to warm the cache with: a user's own, compiled and cut to one step, or one made for a model file.

Pure functions from API-format workflows to such workflows. What a node takes and gives is read from the server's
`/object_info`; of model files only the header is read.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Workflow = dict[str, Any]
Classes = Mapping[str, Mapping[str, Any]]

COMPILERS = {"MODEL": ("NexfortCompileModel", "model"), "VAE": ("NexfortCompileVAE", "vae")}
_VAE_KEYS = ("first_stage_model.", "vae.")
_READABLE = (".safetensors", ".sft")
_HEADER_LIMIT = 100_000_000  # that of the safetensors format


class CannotWarmError(ValueError):
    """There is no workflow that would warm this; the text says what was found and what to do."""


# -- a given workflow ----------------------------------------------------------------------------------------


def prepared(workflow: Mapping[str, Any], classes: Classes, settings: Mapping[str, Any], steps: int = 1) -> Workflow:
    """The workflow with each sampler cut to `steps`, and everything that runs a model or a VAE behind a compile node.

    settings: widgets of inserted compile nodes, where they are not to have their defaults.
    """
    found = copy.deepcopy(dict(workflow))
    for node in found.values():
        _shorten(node, classes, steps)
    for kind, (compiler, slot) in COMPILERS.items():
        inserted: dict[tuple[str, int], str] = {}
        for number, name, link in list(_users(found, classes, kind)):
            if _is_compiled(found, classes, link, kind):
                continue
            place = (str(link[0]), int(link[1]))
            if place not in inserted:
                inserted[place] = _free_number(found, f"nexfort_{slot}")
                inputs = {slot: list(link), **widgets(classes, compiler, settings)}
                found[inserted[place]] = {"class_type": compiler, "inputs": inputs}
            found[number]["inputs"][name] = [inserted[place], 0]
    return found


def compiles_anything(workflow: Mapping[str, Any]) -> bool:
    """Whether any compile node is in it."""
    names = {name for name, _ in COMPILERS.values()}
    return any(node["class_type"] in names for node in workflow.values())


def widgets(classes: Classes, compiler: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The required widgets of a compile node: those of `settings` that it has, else its defaults."""
    if compiler not in classes:
        raise CannotWarmError(
            f"this ComfyUI has no node {compiler}: expected the plugin to be loaded; its log says why it is not"
        )
    required = classes[compiler]["input"].get("required", {})
    defaults = {name: spec[1]["default"] for name, spec in required.items() if len(spec) > 1 and "default" in spec[1]}
    return {name: settings.get(name, value) for name, value in defaults.items()}


def _shorten(node: dict[str, Any], classes: Classes, steps: int) -> None:
    """One step runs every block once, which is all that compiling takes."""
    inputs = node["inputs"]
    if "steps" not in inputs or not (_takes(node, classes, "MODEL") or "SIGMAS" in _gives(node, classes)):
        return
    inputs["steps"] = steps
    if "start_at_step" in inputs:  # the second of two samplers would have nothing left to do
        inputs["start_at_step"] = 0


def _users(workflow: Workflow, classes: Classes, kind: str) -> Iterator[tuple[str, str, list[Any]]]:
    """(node, input, link) wherever a model or VAE is run: by nodes that take one, give none, and do not save it."""
    for number, node in workflow.items():
        if kind in _gives(node, classes) or classes.get(node["class_type"], {}).get("output_node"):
            continue
        for name in _takes(node, classes, kind):
            if isinstance(link := node["inputs"].get(name), list):
                yield number, name, link


def _is_compiled(workflow: Workflow, classes: Classes, link: list[Any], kind: str) -> bool:
    """Whether a compile node lies on the way from the loader."""
    seen: set[str] = set()
    waiting = [str(link[0])]
    while waiting:
        number = waiting.pop()
        node = workflow.get(number)
        if node is None or number in seen:
            continue
        seen.add(number)
        if node["class_type"] == COMPILERS[kind][0]:
            return True
        before = [node["inputs"].get(name) for name in _takes(node, classes, kind)]
        waiting += [str(one[0]) for one in before if isinstance(one, list)]
    return False


def _takes(node: Mapping[str, Any], classes: Classes, kind: str) -> list[str]:
    groups = classes.get(node["class_type"], {}).get("input", {})
    return [name for group in ("required", "optional") for name, spec in (groups.get(group) or {}).items()
            if spec and spec[0] == kind]  # fmt: skip


def _gives(node: Mapping[str, Any], classes: Classes) -> list[Any]:
    return list(classes.get(node["class_type"], {}).get("output") or ())


def _free_number(workflow: Workflow, stem: str) -> str:
    count = 1
    while f"{stem}_{count}" in workflow:
        count += 1
    return f"{stem}_{count}"


# -- a model file --------------------------------------------------------------------------------------------


def kind_of(file: Path) -> str:
    """ "checkpoints" for a file with model and VAE, "diffusion_models" for one with the network alone.

    Only the header of a safetensors file is read. CannotWarmError for anything else.
    """
    if file.suffix.lower() not in _READABLE:
        raise CannotWarmError(
            f"{file} is no safetensors file, and others cannot be looked into without running them; expected "
            f"{' or '.join(_READABLE)}, or a workflow that loads it for `warm --workflow`"
        )
    names = _tensor_names(file)
    return "checkpoints" if any(name.startswith(_VAE_KEYS) for name in names) else "diffusion_models"


def _tensor_names(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= _HEADER_LIMIT:
                raise CannotWarmError(f"{file} is no safetensors file: expected a header, found none")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise CannotWarmError(
            f"the model {file} cannot be read ({error.strerror}): expected the path of a file"
        ) from error
    except ValueError as error:
        raise CannotWarmError(f"{file} is no safetensors file: its header is not JSON") from error
    return [str(name) for name in header] if isinstance(header, dict) else []


def for_model(
    folder: str, name: str, classes: Classes, settings: Mapping[str, Any], sizes: Mapping[str, int], steps: int = 1
) -> Workflow:
    """A workflow that samples with a model file, named as its loader lists it, and decodes where it has a VAE.

    folder: what `kind_of` said. sizes: width, height, batch and length of the pictures or the video.
    """
    whole = folder == "checkpoints"
    loader: dict[str, Any] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": name}}
    if not whole:
        loader = {"class_type": "UNETLoader", "inputs": {"unet_name": name, "weight_dtype": "default"}}
    sampler = {
        "model": ["compiled", 0], "positive": ["inputs", 0], "negative": ["inputs", 0], "latent_image": ["inputs", 1],
        "seed": 0, "steps": steps, "cfg": 5.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
    }  # fmt: skip
    workflow: Workflow = {
        "model": loader,
        "compiled": {
            "class_type": "NexfortCompileModel",
            "inputs": {"model": ["model", 0], **widgets(classes, "NexfortCompileModel", settings)},
        },
        "inputs": {"class_type": "NexfortWarmInputs", "inputs": {"model": ["model", 0], **sizes}},
        "sampled": {"class_type": "KSampler", "inputs": sampler},
    }
    if not whole:
        saved = {"samples": ["sampled", 0], "filename_prefix": "warm"}
        return {**workflow, "end": {"class_type": "SaveLatent", "inputs": saved}}
    vae = {"vae": ["model", 2], **widgets(classes, "NexfortCompileVAE", settings)}
    return {
        **workflow,
        "vae": {"class_type": "NexfortCompileVAE", "inputs": vae},
        "decoded": {"class_type": "VAEDecode", "inputs": {"samples": ["sampled", 0], "vae": ["vae", 0]}},
        "end": {"class_type": "PreviewImage", "inputs": {"images": ["decoded", 0]}},
    }
