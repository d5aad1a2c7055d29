# SPDX-License-Identifier: Apache-2.0
"""Pages of ComfyUI's dynamic VRAM, held while a region runs.

Each layer has a place in a stretch of memory whose pages go away when something else needs the room. Asking for a place
(`vbar_fault`) makes its pages resident, pins them, and tells a number for each: another number than before means that
the page went away in between, and with it what it held. Small layers share a page and a large one has several, so a few
places hold the pages of a whole block; only those are asked for, because each question costs as much as a kernel's
launch.
"""

from __future__ import annotations

from typing import Any

Place = tuple[Any, int, int]  # (memory, address, bytes), as ComfyUI keeps it in a layer's `_v`


class Pages:
    """The pages of some layers as they were when the layers' weights were put there."""

    def __init__(self) -> None:
        self._filled: list[tuple[dict[str, Any], Place, Any]] = []  # (attributes of a layer, place, numbers)
        self._enough: list[tuple[Place, bytes]] | None = None
        self._held: list[Place] = []

    def took(self, layer: Any) -> None:
        """ComfyUI's code asked for this layer's place and filled it. `let_go` gives it back."""
        self._held.append(layer._v)
        self._filled.append((layer.__dict__, layer._v, layer.__dict__.get("_v_signature")))
        self._enough = None

    def take_again(self) -> bool:
        """Hold all of them once more. False, and nothing is held: a page went away, or a layer was filled anew."""
        from comfy_aimdo import model_vbar

        if any([own.get("_v_signature") is not numbers or "_prefetch" in own for own, _, numbers in self._filled]):
            return False
        if self._enough is None:
            self._enough = _enough(self._filled)
        for place, numbers in self._enough:
            found = model_vbar.vbar_fault(place)
            if found is not None:
                self._held.append(place)
            if found is None or bytes(found) != numbers:
                self.let_go()
                return False
        return True

    def let_go(self) -> None:
        """Give back what is held."""
        if not self._held:
            return
        from comfy_aimdo import model_vbar

        for place in self._held:
            model_vbar.vbar_unpin(place)
        self._held.clear()


def _enough(filled: list[tuple[dict[str, Any], Place, Any]]) -> list[tuple[Place, bytes]]:
    """The fewest places found that touch every page, each with its pages' numbers. All of them if layers disagree."""
    every = [(place, bytes(numbers)) for _, place, numbers in filled]
    touched: list[tuple[list[tuple[int, int]], tuple[Place, bytes]]] = []
    numbers_of: dict[tuple[int, int], int] = {}
    for row, (_, place, numbers) in zip(every, filled, strict=True):
        pages = _pages_of(place)
        if pages is None:
            return every
        for page, number in zip(pages, numbers, strict=False):  # numbers has room to spare
            if numbers_of.setdefault(page, number) != number:
                return every
        touched.append((pages, row))
    chosen: list[tuple[Place, bytes]] = []
    seen: set[tuple[int, int]] = set()
    for pages, row in sorted(touched, key=lambda one: -len(one[0])):
        if not seen.issuperset(pages):
            seen.update(pages)
            chosen.append(row)
    return chosen


def _pages_of(place: Place) -> list[tuple[int, int]] | None:
    """The pages that a place touches: (memory, page). None where the memory does not tell its pages' size."""
    memory, address, size = place
    try:
        count, length, start = memory.get_nr_pages(), memory.max_size, memory.base_addr
    except AttributeError:
        return None
    page = 1 << max(0, -(-int(length) // count) - 1).bit_length()  # a power of two; the last page may be cut short
    first, last = (address - start) // page, (address - start + max(1, size) - 1) // page
    return [(id(memory), number) for number in range(first, last + 1)]
