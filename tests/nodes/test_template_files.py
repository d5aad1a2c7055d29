# SPDX-License-Identifier: Apache-2.0
"""The model files that our templates and the subgraph name: those of ComfyUI's own templates, with the same links.

Whoever ran a model by ComfyUI's template has its files already. That each file is in its folder's list is asked in
test_workflows.py.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pages import ROOT

pytestmark = pytest.mark.comfy

OURS = sorted([*(ROOT / "example_workflows").glob("*.json"), *(ROOT / "subgraphs").glob("*.json")])
ENDS = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin")
# Files that no template of ComfyUI's names.
NOT_THEIRS = {
    "pick_your_lora.safetensors": "no file: it stands for any LoRA of the user's",
    "diffusers_xl_canny_full.safetensors": "ComfyUI has no template of SDXL with a ControlNet",
}


def nodes_of(canvas: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The nodes of a workflow and of the subgraphs in it."""
    yield from canvas["nodes"]
    for subgraph in canvas.get("definitions", {}).get("subgraphs", ()):
        yield from subgraph["nodes"]


def named(canvas: dict[str, Any]) -> set[str]:
    """The model files in the widgets of a workflow."""
    found = set()
    for node in nodes_of(canvas):
        values = node.get("widgets_values") or ()
        values = values.values() if isinstance(values, dict) else values
        found |= {value for value in values if isinstance(value, str) and value.lower().endswith(ENDS)}
    return found


def links(canvas: dict[str, Any]) -> set[tuple[str, str]]:
    """(file, link) of what a workflow offers to download."""
    models = [one for node in nodes_of(canvas) for one in node.get("properties", {}).get("models") or ()]
    return {(one["name"], one["url"].partition("?")[0]) for one in models}


@pytest.fixture(scope="module")
def theirs() -> list[dict[str, Any]]:
    """ComfyUI's own templates."""
    pytest.importorskip("comfyui_workflow_templates_json", reason="ComfyUI's requirements bring its templates")
    folder = importlib.resources.files("comfyui_workflow_templates_json") / "templates"
    files = [file for file in folder.iterdir() if file.name.endswith(".json") and not file.name.startswith("index")]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [one for one in found if isinstance(one, dict) and "nodes" in one]


def test_the_default_files_are_those_of_comfyui_s_own_templates(theirs: list[dict[str, Any]]) -> None:
    known = set[str]().union(*map(named, theirs))
    assert len(known) > 200, "their files are found"
    ours = {file.name: named(json.loads(file.read_text(encoding="utf-8"))) for file in OURS}
    assert len(ours) == 13 and all(ours.values()), "each of ours names some"
    others = {file: names - known - NOT_THEIRS.keys() for file, names in ours.items()}
    assert {file: names for file, names in others.items() if names} == {}
    assert NOT_THEIRS.keys() <= set[str]().union(*ours.values()) - known, "a reason that is none any more"


def test_the_links_are_theirs_too(theirs: list[dict[str, Any]]) -> None:
    known: dict[str, set[str]] = {}
    for name, link in set[tuple[str, str]]().union(*map(links, theirs)):
        known.setdefault(name, set()).add(link)
    ours = set[tuple[str, str]]().union(*(links(json.loads(file.read_text(encoding="utf-8"))) for file in OURS))
    wrong = {name: (link, known[name]) for name, link in ours if name in known and link not in known[name]}
    assert len(ours) > 25 and wrong == {}
