# SPDX-License-Identifier: Apache-2.0
"""Workflows to warm with: compile nodes put in where they lack, samplers cut short, and those made for a model file."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from nexfort_engine.cli import warm_workflow
from nexfort_engine.cli.warm_workflow import CannotWarmError


def described(inputs: dict[str, str], outputs: list[str], *, saves: bool = False) -> dict[str, Any]:
    """A node as /object_info describes it."""
    return {"input": {"required": {name: [kind] for name, kind in inputs.items()}},
            "output": outputs, "output_node": saves}  # fmt: skip


WIDGETS = {
    "mode": ["COMBO", {"options": ["O2", "jit"], "default": "O2"}],
    "dynamic": ["BOOLEAN", {"default": True}],
    "memory_format": ["COMBO", {"default": "channels_last"}],
}
CLASSES: dict[str, Any] = {
    "CheckpointLoaderSimple": described({"ckpt_name": "COMBO"}, ["MODEL", "CLIP", "VAE"]),
    "LoraLoaderModelOnly": described({"model": "MODEL"}, ["MODEL"]),
    "KSampler": described({"model": "MODEL", "steps": "INT", "latent_image": "LATENT"}, ["LATENT"]),
    "KSamplerAdvanced": described({"model": "MODEL", "steps": "INT", "start_at_step": "INT"}, ["LATENT"]),
    "BasicScheduler": described({"model": "MODEL", "steps": "INT"}, ["SIGMAS"]),
    "Flux2Scheduler": described({"steps": "INT"}, ["SIGMAS"]),
    "BasicGuider": described({"model": "MODEL"}, ["GUIDER"]),
    "ModelSave": described({"model": "MODEL"}, [], saves=True),
    "VAEDecode": described({"samples": "LATENT", "vae": "VAE"}, ["IMAGE"]),
    "SaveImage": described({"images": "IMAGE"}, [], saves=True),
    "Upscale": described({"steps": "INT"}, ["IMAGE"]),
    "NexfortCompileModel": {
        "input": {
            "required": {"model": ["MODEL", {}], **WIDGETS},
            "optional": {"options": ["STRING", {"default": ""}]},
        },
        "output": ["MODEL"],
    },
    "NexfortCompileVAE": {"input": {"required": {"vae": ["VAE", {}], **WIDGETS}}, "output": ["VAE"]},
}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


PLAIN = {
    "1": node("CheckpointLoaderSimple", ckpt_name="a.safetensors"),
    "2": node("LoraLoaderModelOnly", model=["1", 0]),
    "3": node("KSampler", model=["2", 0], steps=30, seed=4),
    "4": node("VAEDecode", samples=["3", 0], vae=["1", 2]),
    "5": node("SaveImage", images=["4", 0]),
}


def test_compile_nodes_are_put_last_before_what_runs_them() -> None:
    before = copy.deepcopy(PLAIN)
    made = warm_workflow.prepared(PLAIN, CLASSES, {})
    assert before == PLAIN, "the given workflow is left alone"
    model, vae = made["3"]["inputs"]["model"], made["4"]["inputs"]["vae"]
    assert made[model[0]]["class_type"] == "NexfortCompileModel" and made[model[0]]["inputs"]["model"] == ["2", 0]
    assert made[vae[0]]["class_type"] == "NexfortCompileVAE" and made[vae[0]]["inputs"]["vae"] == ["1", 2]
    assert made[model[0]]["inputs"] == {
        "model": ["2", 0], "mode": "O2", "dynamic": True, "memory_format": "channels_last"
    }  # fmt: skip
    assert made["2"] == PLAIN["2"] and made["3"]["inputs"]["seed"] == 4
    assert len(made) == len(PLAIN) + 2 and warm_workflow.compiles_anything(made)


def test_what_is_compiled_already_is_not_compiled_twice() -> None:
    once = warm_workflow.prepared(PLAIN, CLASSES, {"mode": "jit"})
    assert warm_workflow.prepared(once, CLASSES, {}) == once
    above = {
        **PLAIN,
        "c": node("NexfortCompileModel", model=["1", 0]),
        "2": node("LoraLoaderModelOnly", model=["c", 0]),
    }
    made = warm_workflow.prepared(above, CLASSES, {})
    assert made["3"]["inputs"]["model"] == ["2", 0], "it lies further up"
    assert sum(one["class_type"] == "NexfortCompileModel" for one in made.values()) == 1


def test_one_compile_node_serves_all_who_share_a_model() -> None:
    workflow = {
        "1": PLAIN["1"],
        "2": node("BasicScheduler", model=["1", 0], steps=20),
        "3": node("BasicGuider", model=["1", 0]),
    }
    made = warm_workflow.prepared(workflow, CLASSES, {})
    assert made["2"]["inputs"]["model"] == made["3"]["inputs"]["model"] and len(made) == 4


def test_settings_go_to_inserted_nodes_only() -> None:
    workflow = {
        **PLAIN,
        "c": node("NexfortCompileModel", model=["2", 0], mode="O2"),
        "3": node("KSampler", model=["c", 0]),
    }
    made = warm_workflow.prepared(workflow, CLASSES, {"mode": "jit", "memory_format": "contiguous_format"})
    assert made["c"]["inputs"]["mode"] == "O2"
    inserted = made[made["4"]["inputs"]["vae"][0]]["inputs"]
    assert (inserted["mode"], inserted["memory_format"]) == ("jit", "contiguous_format")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (node("KSampler", model=["1", 0], steps=30), {"steps": 1}),
        (node("KSampler", model=["1", 0], steps=["9", 0]), {"steps": 1}),
        (node("KSamplerAdvanced", model=["1", 0], steps=30, start_at_step=20), {"steps": 1, "start_at_step": 0}),
        (node("BasicScheduler", model=["1", 0], steps=8), {"steps": 1}),
        (node("Flux2Scheduler", steps=8), {"steps": 1}),
        (node("Upscale", steps=8), {"steps": 8}),
        (node("Unknown", steps=8), {"steps": 8}),
    ],
)
def test_samplers_and_schedulers_are_cut_short(given: dict[str, Any], expected: dict[str, Any]) -> None:
    made = warm_workflow.prepared({"1": PLAIN["1"], "2": given}, CLASSES, {})["2"]["inputs"]
    assert {name: made[name] for name in expected} == expected
    assert warm_workflow.prepared({"1": PLAIN["1"], "2": given}, CLASSES, {}, 3)["2"]["inputs"]["steps"] in (3, 8)


def test_what_only_saves_a_model_is_left_alone() -> None:
    workflow = {"1": PLAIN["1"], "2": node("ModelSave", model=["1", 0])}
    made = warm_workflow.prepared(workflow, CLASSES, {})
    assert made == workflow and not warm_workflow.compiles_anything(made)


def test_a_loop_in_a_workflow_ends() -> None:
    workflow = {
        "1": node("LoraLoaderModelOnly", model=["2", 0]),
        "2": node("LoraLoaderModelOnly", model=["1", 0]),
        "3": node("KSampler", model=["1", 0], steps=2),
    }
    assert warm_workflow.compiles_anything(warm_workflow.prepared(workflow, CLASSES, {}))


def test_a_server_without_the_plugin_is_one_sentence() -> None:
    classes = {name: one for name, one in CLASSES.items() if not name.startswith("Nexfort")}
    with pytest.raises(CannotWarmError, match="NexfortCompileModel: expected the plugin"):
        warm_workflow.prepared(PLAIN, classes, {})


# ---- model files -------------------------------------------------------------------------------------------


def header_of(path: Path, *names: str) -> Path:
    """A file with nothing but the header of a safetensors file."""
    text = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["model.diffusion_model.x", "first_stage_model.y", "cond_stage_model.z"], "checkpoints"),
        (["model.diffusion_model.x"], "diffusion_models"),
        (["double_blocks.0.img_attn.qkv.weight"], "diffusion_models"),
    ],
)
def test_the_header_tells_the_kind_of_file(tmp_path: Path, names: list[str], kind: str) -> None:
    assert warm_workflow.kind_of(header_of(tmp_path / "m.safetensors", *names)) == kind


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("m.ckpt", b"x"), ("m.gguf", b"GGUF"), ("m.safetensors", b""), ("m.safetensors", b"\xff" * 20),
        ("m.safetensors", struct.pack("<Q", 4) + b"nope"), ("m.safetensors", None),
    ],
)  # fmt: skip
def test_what_cannot_be_warmed_is_one_sentence(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CannotWarmError) as refused:
        warm_workflow.kind_of(tmp_path / name)
    assert str(tmp_path / name) in str(refused.value) and "\n" not in str(refused.value)


def test_a_workflow_for_a_file_samples_and_decodes_where_it_can() -> None:
    sizes = {"width": 640, "height": 512, "batch": 2, "length": 9}
    whole = warm_workflow.for_model("checkpoints", "a.safetensors", CLASSES, {"mode": "jit"}, sizes)
    assert whole["model"]["inputs"]["ckpt_name"] == "a.safetensors"
    assert whole["inputs"]["inputs"] == {"model": ["model", 0], **sizes}
    assert whole["compiled"]["inputs"]["mode"] == whole["vae"]["inputs"]["mode"] == "jit"
    assert whole["sampled"]["inputs"]["steps"] == 1 and whole["sampled"]["inputs"]["model"] == ["compiled", 0]
    network = warm_workflow.for_model("diffusion_models", "a.safetensors", CLASSES, {}, sizes, 2)
    assert network["model"]["class_type"] == "UNETLoader" and network["sampled"]["inputs"]["steps"] == 2
    assert "vae" not in network
