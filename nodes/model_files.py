# SPDX-License-Identifier: Apache-2.0
"""Which model file a compile node's model comes from, by the prompt that runs: the first loader above the node.

It reads the prompt and nothing else. Nodes in between, such as those of LoRAs, name files too and are passed by.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

FILES = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin")
CARRIERS = ("model", "vae", "control_net")  # inputs through which a network is handed on
_MOST = 64  # nodes above


def file_above(nodes: Mapping[str, Any], node: str) -> str | None:
    """The name of the file without its folders, or None where no loader that is known says one."""
    for _ in range(_MOST):
        inputs = (nodes.get(node) or {}).get("inputs")
        if not isinstance(inputs, Mapping):
            return None
        above = next((value for name in CARRIERS if _is_link(value := inputs.get(name))), None)
        if above is None:
            texts = (value for value in inputs.values() if isinstance(value, str))
            found = next((text for text in texts if text.lower().endswith(FILES)), None)
            return PurePosixPath(found.replace("\\", "/")).name if found else None
        node = str(above[0])
    return None


def _is_link(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], (str, int))
