# SPDX-License-Identifier: Apache-2.0
"""Pages of ComfyUI's dynamic VRAM, held while a region runs.

Each layer has a place in a stretch of memory whose pages go away when something else needs the room. Asking for a place
(`vbar_fault`) makes its pages resident, pins them, and tells a number for each: another number than before means that
the page went away in between, and with it what it held. Each question costs as much as the launch of a kernel, and a
block has many more layers than runs of pages: it is the runs that are asked for.

Pages that nobody asks for any more stay until somebody else needs the room, or until they are given back (`give_back`).

The functions are comfy_aimdo's, and another version may lack one. Then the log says so in one line, and what needs it
is left: pages are not held again, so that weights are asked for anew, or none are given back.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Callable, Iterator
from itertools import groupby, repeat
from operator import contains, is_
from typing import Any

log = logging.getLogger("nexfort")

Place = tuple[Any, int, int]  # (memory, address, bytes), as ComfyUI keeps it in a layer's `_v`
_AIMDO = "comfy_aimdo"
_HOLDING = "weights under dynamic VRAM are asked for anew in each step"
_GIVING = "memory of weights that are not needed stays with the model until ComfyUI wants it"
_LEAST = 0.05  # of what a memory holds: for less nobody should wait until the device has done all it was told


class Pages:
    """The pages of some layers as they were when the layers' weights were put there."""

    def __init__(self) -> None:
        self._layers: list[dict[str, Any]] = []  # attributes
        self._filled: list[tuple[Place, Any]] = []  # place and its pages' numbers, of each layer
        self._stretches: list[tuple[Place, bytes]] | None = None
        self._numbers: list[Any] = []
        self._held: list[Place] = []

    def took(self, layer: Any) -> None:
        """ComfyUI's code asked for this layer's place and filled it. `let_go` gives it back."""
        self._held.append(layer._v)
        self._layers.append(layer.__dict__)
        self._filled.append((layer._v, layer.__dict__.get("_v_signature")))
        self._stretches = None

    def take_again(self) -> bool:
        """Hold all of them once more. False, and nothing is held: a page went away, or a layer was filled anew."""
        fault = _function("vbar_fault", _HOLDING)
        if fault is None or _function("vbar_unpin", _HOLDING) is None:
            return False
        if self._stretches is None:
            self._stretches, self._numbers = _stretches(self._filled), [numbers for _, numbers in self._filled]
        numbers_now = map(dict.get, self._layers, repeat("_v_signature"))
        if not all(map(is_, numbers_now, self._numbers)) or any(map(contains, self._layers, repeat("_prefetch"))):
            return False
        for place, numbers in self._stretches:
            found = fault(place)
            if found is not None:
                self._held.append(place)
            if found is None or not bytes(found).startswith(numbers):  # it has room to spare
                self.let_go()
                return False
        return True

    def let_go(self) -> None:
        """Give back what is held."""
        _unpin(self._held)


def _unpin(places: list[Place]) -> None:
    """Let go of each place once, and take it off the list. Raises the first error when all were tried."""
    if not places:
        return
    unpin = _function("vbar_unpin", _HOLDING)
    if unpin is None:
        places.clear()
        return
    first: Exception | None = None
    while places:
        try:
            unpin(places.pop(0))
        except RuntimeError as error:  # of comfy_aimdo 0.6.0 and newer, where the driver fails
            first = first or error
    if first is not None:
        raise first


def give_back(memory: Any, needed: list[Place]) -> int:
    """Give back the pages of a memory that none of the needed places touches, if they are worth it. Returns bytes.

    Those of the needed places are held meanwhile: they stay as they are, and are not read anew. Whoever asks for one of
    the others later is told another number, and fills it again.
    """
    fault, can_end = _function("vbar_fault", _GIVING), _function("vbar_unpin", _GIVING) is not None
    length = _page_length(memory) if _gives_back(memory) else None
    if length is None or fault is None or not can_end:
        return 0
    resident = _resident(memory)
    wanted = resident.intersection(page for place in needed for page in _pages_of(place, length))
    if len(resident) - len(wanted) < _LEAST * len(resident):
        return 0
    held = []
    try:
        for place, _ in _runs(memory, length, dict.fromkeys(wanted, 0)):
            if fault(place) is not None:
                held.append(place)
        # pages go from the end, those in use excepted, and it waits for the device before the first
        return int(memory.free_memory(memory.loaded_size()))
    finally:
        try:
            _raise_mark(memory, length)  # what is held would go with its last pin, being above the mark
        finally:
            _unpin(held)


def unheld() -> str | None:
    """Why pages can't be asked for and let go of, or None. ComfyUI's own code for layers calls the same functions."""
    lost = [name for name in ("vbar_fault", "vbar_unpin") if _function(name, "") is None]
    return f"{_AIMDO} has no {lost[0]}" if lost else None


def _function(name: str, left: str) -> Callable[..., Any] | None:
    """A function of comfy_aimdo, or None. left: what is left without it, for the log."""
    try:
        from comfy_aimdo import model_vbar
    except ImportError:
        model_vbar = None
    found = getattr(model_vbar, name, None)
    if found is None and left:
        _tell(name, left)
    return found


def _gives_back(memory: Any) -> bool:
    """Whether a memory has what giving back takes."""
    marks = ("set_watermark", "get_nr_pages") if hasattr(memory, "set_watermark") else ("prioritize",)
    asked = ("base_addr", "max_size", "loaded_size", "get_residency", "free_memory", *marks)
    lost = next((name for name in asked if not hasattr(memory, name)), None)
    if lost is not None:
        _tell(lost, _GIVING)
    return lost is None


@functools.cache
def _tell(name: str, left: str) -> None:
    """Once a process."""
    log.warning("Nexfort: this version of %s has no %s: %s", _AIMDO, name, left)


def paying(memory: Any, groups: list[list[Place]], needed: list[Place]) -> list[bool]:
    """Which groups of places lie by half of their bytes or more in pages that would go with those of all that do.

    needed: other places. All groups where the memory does not tell its pages' size, and none where too little would go.
    """
    length, found = _page_length(memory), [True] * len(groups)
    while length is not None:
        stay = [place for pays, group in zip(found, groups, strict=True) if not pays for place in group]
        wanted = {page for place in [*needed, *stay] for page in _pages_of(place, length)}
        still = [pays and _pays(group, wanted, length) for pays, group in zip(found, groups, strict=True)]
        if still == found:
            resident = _resident(memory)
            return found if len(resident - wanted) >= _LEAST * len(resident) else [False] * len(groups)
        found = still
    return found


def _pays(group: list[Place], wanted: set[int], length: int) -> bool:
    going = 0
    for memory, address, size in group:
        start = address - memory.base_addr
        for page in set(_pages_of((memory, address, size), length)) - wanted:
            going += min(start + size, (page + 1) * length) - max(start, page * length)
    return 2 * going >= sum(size for *_, size in group)


def _raise_mark(memory: Any, length: int) -> None:
    """Let all of a memory be resident again: giving back lowered the mark above which nothing may be."""
    if hasattr(memory, "set_watermark"):
        memory.set_watermark(memory.get_nr_pages() * length)
    else:  # of older versions; it puts the model before others too, which loading it did already
        memory.prioritize()


def _stretches(filled: list[tuple[Place, Any]]) -> list[tuple[Place, bytes]]:
    """Places that together touch the same pages, one for each run of them, with the pages' numbers.

    The places as they are where the memory does not tell its pages' size, or layers disagree about a page's number.
    """
    as_they_are = [(place, bytes(numbers)) for place, numbers in filled]
    memories = {id(place[0]): place[0] for place, _ in filled}
    lengths = {key: _page_length(memory) for key, memory in memories.items()}
    pages_of: dict[int, dict[int, int]] = {key: {} for key in memories}  # page -> its number
    for place, numbers in filled:
        length, pages = lengths[id(place[0])], pages_of[id(place[0])]
        if length is None:
            return as_they_are
        for page, number in zip(_pages_of(place, length), numbers, strict=False):  # numbers has room to spare
            if pages.setdefault(page, number) != number:
                return as_they_are
    return [found for key, memory in memories.items() for found in _runs(memory, lengths[key] or 0, pages_of[key])]


def _resident(memory: Any) -> set[int]:
    return {page for page, flags in enumerate(memory.get_residency()) if flags & 1}


def _pages_of(place: Place, length: int) -> range:
    """The pages that a place touches."""
    memory, address, size = place
    start = address - memory.base_addr
    return range(start // length, (start + max(1, size) - 1) // length + 1)


def _runs(memory: Any, length: int, pages: dict[int, int]) -> Iterator[tuple[Place, bytes]]:
    """Pages that follow one another, as one place each, with their numbers."""
    for _, run in groupby(enumerate(sorted(pages)), lambda at: at[1] - at[0]):
        found = [page for _, page in run]
        start, end = found[0] * length, min((found[-1] + 1) * length, int(memory.max_size))
        yield (memory, memory.base_addr + start, end - start), array("I", [pages[page] for page in found]).tobytes()


def _page_length(memory: Any) -> int | None:
    """Bytes of a page. None where the memory does not tell, for want of a function too, or holds none now.

    It is asked what it holds: a memory that is larger than the card has fewer pages than its size says.
    """
    try:
        memory.base_addr, memory.max_size  # noqa: B018  # asked for whether they are there
        length, rest = divmod(int(memory.loaded_size()), sum(flags & 1 for flags in memory.get_residency()))
    except (AttributeError, ZeroDivisionError):
        return None
    # another thread may have come between the two questions
    return None if rest or not length or length & (length - 1) else length
