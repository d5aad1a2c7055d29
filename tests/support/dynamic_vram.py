# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's dynamic VRAM without a card: its own patcher, loader, layers and sampler. Only the memory is pretended.

Models that are loaded inside the block get ComfyUI's patcher for dynamic VRAM. Its layers ask for pages of a
`PagedMemory`, eager ones and those on lease. Weights lie in main memory, and so does what is pretended to be the card.
No test lives here. ComfyUI must be imported first (the fixture `comfyui` does it).
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from card_memory import PagedMemory

CARD = torch.device("cpu", 0)  # another device than the CPU for code that compares devices


class Memory(PagedMemory):
    """As a ModelVBAR."""

    def alloc(self, size: int) -> tuple[PagedMemory, int, int]:
        """A place in it."""
        return self.place(size)

    def prioritize(self) -> None:
        """The model is loaded: its pages may be resident."""


@dataclass
class Card:
    """What ComfyUI did on the pretended card. memories: one for each model. done: calls of its functions, by name."""

    size: int
    fits: int | None = None
    memories: list[Memory] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def memory(self, asked_for: int, _index: int) -> Memory:
        """The memory of one more model, as large as all others."""
        self.memories.append(Memory(self.size, self.fits, asked_for))
        return self.memories[-1]

    def pinned(self) -> bool:
        """Whether a page is in use."""
        return any(+memory.pins for memory in self.memories)

    def counted(self) -> Counter[str]:
        """What was done since the last time."""
        found = self.done + Counter(fault=sum(memory.faults for memory in self.memories))
        self.done.clear()
        for memory in self.memories:
            memory.faults = 0
        return found


@contextlib.contextmanager
def dynamic_vram(size: int = 1 << 25, fits: int | None = None) -> Iterator[Card]:
    """size, fits: bytes of each model's memory, and how many of them may be resident."""
    pytest.importorskip("comfy.model_prefetch", reason="this ComfyUI has another dynamic VRAM")
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher
    import comfy.ops
    import comfy.pinned_memory
    import comfy_aimdo.host_buffer
    import comfy_aimdo.model_vbar
    import comfy_aimdo.torch

    from nexfort_engine.hosts.comfy import weights as comfy_weights

    card = Card(size, fits)
    dynamic = comfy.model_patcher.ModelPatcherDynamic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy_aimdo.model_vbar, "vbar_fault", lambda place: place[0].fault(place))
        patch.setattr(comfy_aimdo.model_vbar, "vbar_unpin", lambda place: place[0].unpin(place))
        patch.setattr(comfy_aimdo.model_vbar, "ModelVBAR", card.memory)
        patch.setattr(comfy_aimdo.torch, "aimdo_to_tensor", lambda at, _device: at[0].bytes[at[1] : at[1] + at[2]])
        patch.setattr(comfy_aimdo.host_buffer, "HostBuffer", lambda *_: types.SimpleNamespace(size=0))
        patch.setattr(comfy.pinned_memory, "get_pin", lambda *_, **__: None)
        patch.setattr(comfy.pinned_memory, "pin_memory", lambda *_, **__: False)
        patch.setattr(comfy.model_management, "is_device_cpu", lambda _: False)
        patch.setattr(comfy.model_management, "get_torch_device", lambda: CARD)
        patch.setattr(comfy.memory_management, "aimdo_enabled", True)
        patch.setattr(comfy.model_patcher, "CoreModelPatcher", dynamic)
        patch.setattr(dynamic, "partially_unload_ram", lambda *_, **__: 0)
        patch.setattr(comfy_weights, "_is_paged", lambda layer, _device: "_v" in layer.__dict__)
        _take_the_card_for_another_device(patch)
        _count(patch, card)
        try:
            yield card
        finally:
            with torch.inference_mode():
                comfy.model_management.unload_all_models()


def _take_the_card_for_another_device(patch: pytest.MonkeyPatch) -> None:
    import comfy.model_patcher
    import comfy.ops

    cast, listed = comfy.ops.cast_bias_weight, comfy.model_patcher.ModelPatcher._load_list

    def cast_there(s: Any, input: Any = None, dtype: Any = None, device: Any = None, **more: Any) -> Any:
        return cast(s, input, dtype, CARD if hasattr(s, "_v") else device, **more)

    def listed_there(self: Any, for_dynamic: bool = False, default_device: Any = None) -> Any:
        return listed(self, for_dynamic, None)  # weights of modules that hold others are there, and are not copied

    patch.setattr(comfy.ops, "cast_bias_weight", cast_there)
    patch.setattr(comfy.model_patcher.ModelPatcher, "_load_list", listed_there)


def _count(patch: pytest.MonkeyPatch, card: Card) -> None:
    import comfy.model_patcher
    import comfy.ops

    rows = {
        "patched": (comfy.model_patcher.LowVramPatch, "__call__"),
        "quantised": (comfy.ops.QuantizedTensor, "requantize_from_float"),
        "cast": (comfy.ops, "resolve_cast_module_with_vbar"),
    }
    for name, (owner, attribute) in rows.items():
        patch.setattr(owner, attribute, _counting(getattr(owner, attribute), name, card.done))


def _counting(function: Any, name: str, done: Counter[str]) -> Any:
    def counting(*args: Any, **kwargs: Any) -> Any:
        done[name] += 1
        return function(*args, **kwargs)

    return counting
