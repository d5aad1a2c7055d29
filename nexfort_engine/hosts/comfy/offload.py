# SPDX-License-Identifier: Apache-2.0
"""Where ComfyUI has the weights of a model without dynamic VRAM, as weights/offload.py asks for it and changes it.

ComfyUI loads a model as a whole where that fits, and goes on taking it for loaded when weights of it are in main
memory: it moves, patches and saves them wherever they are. How much of the card a model has it notes down, and asks
others to leave by that; so what leaves is taken off, and others are asked before it comes back.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...weights.offload import is_away
from ...weights.subclass_unwrap import is_plain

FROM = ("cuda",)  # types of devices whose memory is not main memory
SIGNS = ("comfy_cast_weights", "weight_function", "bias_function", "_v")  # of layers elsewhere; `_v` is dynamic VRAM's


class ComfyHome:
    """The weights of one of ComfyUI's models, which is given by a weak reference."""

    def __init__(self, model: weakref.ref[Any]) -> None:
        self._model = model

    @property
    def patcher(self) -> Any:
        """The patcher that runs the model, or None."""
        return getattr(self._model(), "current_patcher", None)

    def may_go(self) -> bool:
        """Whether ComfyUI itself would move the model to main memory, and not page by page."""
        patcher = self.patcher
        return patcher is not None and not is_dynamic(patcher) and patcher.offload_device.type == "cpu"

    def fits(self) -> bool:
        """Whether there is room for all of the model in main memory."""
        import comfy.model_management as management

        return bool(management.get_free_memory(torch.device("cpu")) > self.patcher.model_size())

    def resident(self, layers: list[nn.Module], can_lease: Callable[[nn.Module], bool]) -> list[nn.Module]:
        """Those of some layers whose weights lie on the device as they are, each in a place of its own, or are away.

        can_lease: whether a layer's weights can be leased. A layer that is a region has no place for another forward.
        """
        model = self._model()
        tables = [sub._parameters for sub in (model.modules() if model is not None else ())]
        shared = Counter(id(weight) for table in tables for weight in table.values())
        found = []
        for layer in layers:
            own = [weight for weight in layer._parameters.values() if weight is not None]
            alone = all(is_plain(weight) and shared[id(weight)] == 1 and _is_dense(weight) for weight in own)
            there = not any(map(layer.__dict__.get, (*SIGNS, "forward"))) and all(w.device.type in FROM for w in own)
            if own and alone and (there or is_away(layer)) and can_lease(layer):
                found.append(layer)
        return found

    def has(self, layer: nn.Module) -> bool:
        """Whether ComfyUI itself took a layer off the GPU since, whose own forward casts then, or all of the model."""
        device = getattr(self._model(), "device", None)
        return bool(layer.__dict__.get("comfy_cast_weights")) or (device is not None and device.type not in FROM)

    def make_room(self, device: torch.device, size: int) -> None:
        """Have other models leave a device where weights of this size are to come back."""
        if device.type == "cpu":
            return
        import comfy.model_management as management

        wanted = size + wanted_free(device)
        if management.get_free_memory(device) < wanted:
            model, loaded = self._model(), management.current_loaded_models
            mine = [one for one in loaded if model is not None and getattr(one.model, "model", None) is model]
            management.free_memory(wanted, device, keep_loaded=mine)

    def moved(self, size: int) -> None:
        """Weights of this size came to the device, or left it where that is less than zero."""
        model = self._model()
        if model is not None and hasattr(model, "model_loaded_weight_memory"):
            # never nothing, by which ComfyUI knows a model that is not loaded
            model.model_loaded_weight_memory = max(1, model.model_loaded_weight_memory + size)


def wanted_free(device: torch.device) -> int:
    """Bytes of a device that ComfyUI's user wants free, by --reserve-vram and, since 0.33, --vram-headroom."""
    if device.type == "cpu":
        return 0
    import comfy.model_management as management
    from comfy.cli_args import args

    return int(management.extra_reserved_memory() + getattr(args, "vram_headroom", 0) * (1 << 30))


def _is_dense(weight: torch.Tensor) -> bool:
    """Whether a weight's numbers follow each other in memory, so that a copy lies as it does."""
    turned = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return (turned or weight.is_contiguous()) and weight.element_size() <= 8


def is_dynamic(patcher: Any) -> bool:
    """Whether a patcher is dynamic VRAM's."""
    return bool(getattr(patcher, "is_dynamic", bool)())
