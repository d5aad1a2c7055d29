# SPDX-License-Identifier: Apache-2.0
"""Small weights of a model under dynamic VRAM, kept at their addresses from one picture to the next.

Dynamic VRAM has no pages for small weights and buffers. ComfyUI copies them to the device each time it loads the model,
which is before each picture, and a CUDA graph would be captured anew for the addresses alone. So after a load the new
numbers go to where they lay before, and the module gets the tensor that it had.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ...weights.subclass_unwrap import is_plain
from .offload import is_dynamic

_NETWORK = "diffusion_model."
_MOST = 1 << 22  # bytes of one weight; a larger one would be held when ComfyUI wants its memory back


class SmallWeights:
    """The small weights of one network, as ComfyUI loaded them first."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[weakref.ref[nn.Module], torch.Tensor]] = {}

    def clear(self) -> None:
        """ComfyUI takes the model off the device."""
        self._kept.clear()

    def loaded(self, patcher: Any) -> None:
        """ComfyUI has loaded the model of a patcher."""
        if not is_dynamic(patcher):
            self._kept.clear()
            return
        before = {key: saved.weight for key, saved in patcher.backup.items()}
        before |= getattr(patcher, "backup_buffers", {})
        for key, original in before.items():
            if key.startswith(_NETWORK):
                self._keep(patcher.model, key, original)

    def _keep(self, model: nn.Module, key: str, original: Any) -> None:
        """Put a weight's numbers where they lay. original: the tensor that it was copied from."""
        path, _, name = key.rpartition(".")
        module = model.get_submodule(path)
        table = module._parameters if name in module._parameters else module._buffers
        now, (of, lay) = table.get(name), self._kept.get(key, (None, None))
        if now is lay:
            return
        if now is None or not is_plain(now) or now.nbytes > _MOST or _is_one_memory(now, original):
            self._kept.pop(key, None)
        elif lay is None or of is None or of() is not module or not _is_alike(now, lay) or _is_one_memory(now, lay):
            self._kept[key] = weakref.ref(module), now
        else:
            with torch.inference_mode(lay.is_inference()), torch.no_grad():
                lay.copy_(now)
            table[name] = lay  # type: ignore[assignment]


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.stride() == other.stride()
    return same and one.dtype == other.dtype and one.device == other.device and type(one) is type(other)


def _is_one_memory(one: torch.Tensor, other: Any) -> bool:
    """Whether a tensor lies in the memory of another one, so that what is written to it is written to the other."""
    if not isinstance(other, torch.Tensor) or not is_plain(other) or one.device != other.device:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
