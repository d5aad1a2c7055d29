# SPDX-License-Identifier: Apache-2.0
"""Which patches (LoRAs and the like) the weights of one model carry, by a name that is the same in every process.

ComfyUI names a set of patches by a random number of its own. Times of steps are compared over processes, so a name is
made of what the patches are: their layers, strengths, kinds and sizes, and some of their numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ...cache.key import primary_key

_SAMPLED = 8  # layers of whose patches some numbers are read
_NUMBERS = 4


class PatchNames:
    """The names of one model's patches."""

    def __init__(self, model: Any) -> None:
        """model: what ComfyUI holds the network in."""
        self._model = weakref.ref(model)
        self._last: tuple[object, str] | None = None  # ComfyUI's number, and the name for it

    def name(self) -> str | None:
        """The name of the patches now, "" without any; None where hooks change weights as well."""
        patcher = getattr(self._model(), "current_patcher", None)
        patches = getattr(patcher, "patches", None)
        if getattr(patcher, "current_hooks", None) or getattr(patcher, "hook_patches", None):
            return None
        if not patches:
            return ""
        number = getattr(patcher, "patches_uuid", None)
        if self._last is None or number is None or self._last[0] != number:
            self._last = number, primary_key({"patches": list(_told(patches))})
        return self._last[1]


def _told(patches: dict[Any, Any]) -> Iterator[list[str]]:
    for place, key in enumerate(sorted(patches, key=str)):
        yield [str(key), *(_one(value, place < _SAMPLED) for patch in patches[key] for value in patch)]


def _one(value: Any, sampled: bool) -> str:
    if isinstance(value, torch.Tensor):
        said = f"{tuple(value.shape)} {value.dtype}"
        if sampled and value.device.type == "cpu" and not value.is_quantized:
            said += f" {value.detach().reshape(-1)[:_NUMBERS].tolist()}"
        return said
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_one(item, sampled) for item in value)})"
    weights = getattr(value, "weights", None)
    return f"{type(value).__name__}{_one(weights, sampled) if isinstance(weights, (list, tuple)) else ''}"
