# SPDX-License-Identifier: Apache-2.0
"""Model files that a workflow names and ComfyUI does not have: one a line, with the folder and a link where known.

The links are those of the shipped workflows, by the file's name. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..hosts.comfy_install import plugin_root

HEAD = "the workflow needs model files that this ComfyUI does not have:"
_FILES = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin")


def is_missing_model(problem: Mapping[str, Any]) -> bool:
    """Whether a problem of a node is that a file is in no list of ComfyUI's."""
    name = (problem.get("extra_info") or {}).get("received_value")
    return problem.get("type") == "value_not_in_list" and isinstance(name, str) and name.lower().endswith(_FILES)


def missing_models(node_errors: Mapping[str, Any] | None) -> list[str]:
    """A line for each file that ComfyUI's answer to a workflow says is in no list of its."""
    known, lines = _known(), dict[str, None]()
    for node, found in (node_errors or {}).items():
        for problem in found.get("errors", ()):
            if is_missing_model(problem):
                name = problem["extra_info"]["received_value"]
                folder, link = known.get(Path(name.replace("\\", "/")).name, ("", ""))
                place = f" -> models/{folder}" if folder else ""
                lines[f"{name}{place} (node {node}, {found.get('class_type')})" + (f"  {link}" if link else "")] = None
    return list(lines)


def _known() -> dict[str, tuple[str, str]]:
    """Folder and link of each model file that a shipped workflow names."""
    root, known = plugin_root(), dict[str, tuple[str, str]]()
    folders = () if root is None else (root / "workflows" / "canvas", root / "example_workflows")
    for file in sorted(file for folder in folders for file in folder.glob("*.json")):
        try:
            nodes = json.loads(file.read_text(encoding="utf-8"))["nodes"]
            models = [model for node in nodes for model in node.get("properties", {}).get("models", ())]
            known |= {model["name"]: (str(model["directory"]), str(model["url"])) for model in models}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a file that the user changed
            continue
    return known
