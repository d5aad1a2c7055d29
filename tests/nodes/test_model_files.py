# SPDX-License-Identifier: Apache-2.0
"""Which file a compile node's model comes from, in prompts as ComfyUI queues them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import by_path
import pytest

FILE = Path(__file__).resolve().parents[2] / "nodes" / "model_files.py"
file_above = by_path.load("nexfort_model_files_alone", FILE).file_above
LOADER = {"class_type": "UNETLoader", "inputs": {"unet_name": "folder\\flux1-dev.safetensors", "weight": "default"}}
LORA = {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["1", 0], "lora_name": "a.safetensors"}}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ({"1": LOADER, "9": {"inputs": {"model": ["1", 0]}}}, "flux1-dev.safetensors"),
        ({"1": LOADER, "2": LORA, "9": {"inputs": {"model": ["2", 0]}}}, "flux1-dev.safetensors"),
        ({"1": {"inputs": {"vae_name": "ae.safetensors"}}, "9": {"inputs": {"vae": ["1", 0]}}}, "ae.safetensors"),
        ({"1": {"inputs": {"name": "no file"}}, "9": {"inputs": {"model": ["1", 0]}}}, None),
        ({"9": {"inputs": {"model": ["9", 0]}}}, None),
        ({"9": {"inputs": {"model": ["gone", 0]}}}, None),
        ({"9": {"inputs": "odd"}}, None),
        ({}, None),
    ],
)
def test_the_first_loader_above_names_the_file(nodes: dict[str, Any], expected: str | None) -> None:
    assert file_above(nodes, "9") == expected
