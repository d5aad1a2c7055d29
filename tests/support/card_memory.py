# SPDX-License-Identifier: Apache-2.0
"""Where ComfyUI leaves a model's weights: all loaded, in part, not at all, or in pages that go away.

ComfyUI's own patcher puts the layers in the first three states; that it loads only a part is asked of it, as on a small
card. For dynamic VRAM its own code (comfy.ops) runs on pretended memory: places, faults, pins, and pages that are taken
away and lose what they held. No test lives here. ComfyUI must be imported first (the fixture `comfyui` does it).
"""

from __future__ import annotations

import array
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

PAGE = 4096
ALIGNED = 512


@contextlib.contextmanager
def loaded_in_part(share: float) -> Iterator[None]:
    """Patchers load this share of their weights and leave the rest to their layers."""
    import comfy.model_patcher

    kind = comfy.model_patcher.ModelPatcher
    load = kind.load

    def partly(self: Any, device_to: Any = None, *_: Any, **__: Any) -> None:
        load(self, device_to, lowvram_model_memory=int(self.model_size() * share))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "load", partly)
        yield


def unload() -> None:
    """Everything off the device, as `/free` does."""
    import comfy.model_management

    comfy.model_management.unload_all_models()


class PagedMemory:
    """A stretch of memory. fits: how many of its bytes may be resident at once. asked_for: bytes that it was to have.

    faults, pins: what was asked for, and the pins that were not given back, by place. resident: its pages that are.
    filled: for each page how often it was made so. given_back: bytes, each time that some were to go. The rest is named
    and behaves as a ModelVBAR's: pages go from the end, down to a mark above which none is made resident; those in use
    stay.
    """

    base_addr = 0

    def __init__(self, size: int, fits: int | None = None, asked_for: int | None = None) -> None:
        self.max_size = asked_for or size  # ComfyUI asks for ten times the model, and gets what the card has
        self.bytes = torch.zeros(size, dtype=torch.uint8)
        self.fits = self.get_nr_pages() * PAGE if fits is None else fits
        self.faults = 0
        self.pins: Counter[tuple[int, int]] = Counter()
        self._next = 0
        self.filled: Counter[int] = Counter()
        self.resident: set[int] = set()
        self.given_back: list[int] = []
        self._mark = self.get_nr_pages()

    def get_nr_pages(self) -> int:
        return -(-self.bytes.numel() // PAGE)

    def loaded_size(self) -> int:
        return len(self.resident) * PAGE

    def get_residency(self) -> list[int]:
        pinned = {page for at, size in +self.pins for page in range(at // PAGE, (at + size - 1) // PAGE + 1)}
        return [(page in self.resident) + 2 * (page in pinned) for page in range(self.get_nr_pages())]

    def free_memory(self, size: int) -> int:
        """Let pages of this size go from the end; the mark is where it stopped."""
        left = wanted = -(-size // PAGE)
        while left and self._mark:
            self._mark -= 1
            if self._mark in self.resident and not self.pinned(self._mark):
                self.take_away_page(self._mark)
                left -= 1
        self.given_back.append((wanted - left) * PAGE)
        return self.given_back[-1]

    def set_watermark(self, size: int) -> None:
        """Nothing above this many bytes may be resident; less than now is not needed here."""
        assert size % PAGE == 0 and self._mark * PAGE <= size
        self._mark = min(size // PAGE, self.get_nr_pages())

    def place(self, size: int) -> tuple[PagedMemory, int, int]:
        """A place for `size` bytes, as `ModelVBAR.alloc` gives it."""
        offset = self._next
        self._next = -(-(offset + size) // ALIGNED) * ALIGNED
        assert self._next <= self.bytes.numel(), "the pretended memory is too small"
        return self, offset, size

    def fault(self, place: tuple[Any, int, int]) -> array.array[int] | None:
        """Make the pages of a place resident and pin them; None if they do not fit."""
        self.faults += 1
        _, offset, size = place
        pages = range(offset // PAGE, (offset + size - 1) // PAGE + 1)
        new = [page for page in pages if page not in self.resident]
        if pages[-1] >= self._mark or (len(self.resident) + len(new)) * PAGE > self.fits:
            return None
        for page in new:
            self.resident.add(page)
            self.filled[page] += 1
        self.pins[offset, size] += 1
        numbers = [self.filled[page] for page in pages]
        return array.array("I", numbers + [0] * (size // PAGE + 2 - len(numbers)))

    def unpin(self, place: tuple[Any, int, int]) -> None:
        """Give a pin back. What lies above the mark goes with its last one."""
        _, offset, size = place
        self.pins[offset, size] -= 1
        assert self.pins[offset, size] >= 0, "a place was given back twice"
        for page in range(max(self._mark, offset // PAGE), (offset + size - 1) // PAGE + 1):
            if page in self.resident and not self.pinned(page):
                self.take_away_page(page)

    def pinned(self, page: int) -> bool:
        """Whether a place on this page is in use."""
        return any(at // PAGE <= page <= (at + size - 1) // PAGE for at, size in +self.pins)

    def take_away_page(self, page: int) -> None:
        """Somebody else needs the memory of this page."""
        assert not self.pinned(page), "a page is taken away while it is in use"
        self.resident.discard(page)
        self.bytes[page * PAGE : (page + 1) * PAGE] = 0x7F

    def take_away(self) -> None:
        """Somebody else needs the memory: every page goes, and with it what lay there."""
        assert not +self.pins, "pages are taken away while they are in use"
        self.resident.clear()
        self.bytes.fill_(0x7F)  # as floats: large numbers, which no picture survives


class OlderPagedMemory(PagedMemory):
    """As comfy-aimdo 0.3 has it, ComfyUI 0.20's: the mark is raised by what a model does that is loaded."""

    set_watermark = property()  # type: ignore[assignment]

    def prioritize(self) -> None:
        """All of it may be resident again, and before that of other models."""
        self._mark = self.get_nr_pages()


def page(patcher: Any, memory: PagedMemory, patch: pytest.MonkeyPatch) -> list[Any]:
    """Put the layers of a patcher's network under dynamic VRAM, as its patcher's `load` does, and give them.

    With no device but the CPU, layers look for the device of their weights: a layer on lease counts as paged anyway.
    """
    import comfy.memory_management
    import comfy.pinned_memory
    import comfy_aimdo.model_vbar
    import comfy_aimdo.torch

    from nexfort_engine.hosts.comfy import weights as comfy_weights

    patch.setattr(comfy_aimdo.model_vbar, "vbar_fault", lambda place: place[0].fault(place))
    patch.setattr(comfy_aimdo.model_vbar, "vbar_unpin", lambda place: place[0].unpin(place))
    patch.setattr(comfy_aimdo.torch, "aimdo_to_tensor", lambda at, _device: at[0].bytes[at[1] : at[1] + at[2]])
    patch.setattr(comfy.pinned_memory, "get_pin", lambda *_, **__: None)
    patch.setattr(comfy.pinned_memory, "pin_memory", lambda *_, **__: False)
    patch.setattr(comfy_weights, "_is_paged", lambda layer, _device: "_v" in layer.__dict__)
    layers = []
    for name, layer in patcher.model.named_modules():
        if hasattr(layer, "comfy_cast_weights") and layer.weight is not None:
            layer.comfy_cast_weights, layer.seed_key, layer._v_signature = True, name, None
            layer.weight_lowvram_function = layer.bias_lowvram_function = None
            layer._v = memory.place(comfy.memory_management.vram_aligned_size([layer.weight, layer.bias]))
            layers.append(layer)
    return layers
