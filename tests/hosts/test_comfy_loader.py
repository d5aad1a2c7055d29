# SPDX-License-Identifier: Apache-2.0
"""Quantised files with LoRAs through ComfyUI's own loader, as most people run them: compiled wherever weights lie.

Nothing is eager, nothing is compiled after the first picture, and each picture is eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from card_memory import PAGE, loaded_in_part, unload
from dynamic_vram import dynamic_vram
from large_rows import few
from loader_families import CONFIG, FAMILIES, FORMS, Family, file_of, loaded, lora_file, picture, with_lora
from patchers import TOLERANCE, distance
from subjects import graphs_as_they_are

from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
CALLS: list[dict[str, Any]] = [
    *({}, {"seed": 1, "prompt": 1}, {"size": (12, 8)}, {"size": (10, 14), "length": 40}, {"length": 21}, {"cfg": 4.0})
]
ROWS = [{}, {"size": (12, 8), "length": 21}]  # of these, with each LoRA
LEAST = 0.01  # what a LoRA moves a picture by at least


@pytest.fixture(autouse=True)
def uncompiled(tmp_path: Any) -> Iterator[None]:
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "store"))
        yield


class Pair:
    """A model of a family, eager and compiled, after a first picture."""

    def __init__(self, family: Family, form: str) -> None:
        self.family = family
        self.patcher, self.clone = loaded(family, form), host.attach(loaded(family, form), CONFIG)
        self.files = lora_file(family), lora_file(family, 1, rank=lambda i: 1 + 3 * i % 7)
        self.same()
        self.first = self.made()

    def made(self) -> int:
        """How many artefacts there are. None of the regions ever ran eager, and other processes can load them all."""
        found = host.report_of(self.clone).as_dict()  # type: ignore[union-attr]
        assert not found["eager"], found["eager"]
        assert not [note for note in found["notes"] if "lasts only" in note], found["notes"]
        return int(found["artefacts_compiled"])

    def same(self, change: Callable[[Any], Any] = lambda patcher: patcher, *, again: bool = False, **how: Any) -> Any:
        """A picture that both give. again: eager's second one, where none is computed with before it is quantised."""
        changed = change(self.patcher)
        if again:
            picture(self.family, changed, **how)
        wanted = picture(self.family, changed, **how)
        assert distance(picture(self.family, change(self.clone), **how), wanted) < TOLERANCE, how
        return wanted

    def walk(self, *, again: bool = False) -> list[int]:
        """Pictures with LoRAs on and off; how many artefacts there are after those of each LoRA."""
        found = []
        plain = [self.same(again=again, **row) for row in ROWS]
        for file, strength in zip((0, 0, 1), (1.0, 0.5, 1.0), strict=True):

            def change(patcher: Any, file: int = file, strength: float = strength) -> Any:
                return with_lora(patcher, self.files[file], strength)

            moved = [self.same(change, again=again, **row) for row in ROWS]
            assert all(distance(one, other) > LEAST for one, other in zip(moved, plain, strict=True))
            found.append(self.made())
        assert all(torch.equal(self.same(again=again, **row), one) for row, one in zip(ROWS, plain, strict=True))
        return [*found, self.made()]


PAGED = [("h3", "int8_convrot")]
EVERY = [(name, form) for name in FAMILIES for form in FORMS]


@pytest.mark.large  # below they are loaded under dynamic VRAM
@pytest.mark.parametrize(("name", "form"), EVERY)
def test_a_file_with_loras(name: str, form: str) -> None:
    """Loaded as a whole, not at all and in part. ComfyUI computes with a weight in full that it patches on its way:
    the first LoRA of a model that does not fit is another artefact, and no other LoRA is.
    """
    pair = Pair(FAMILIES[name], form)
    for row in CALLS:
        pair.same(**row)
    assert pair.walk() == [pair.first] * 4
    for share in (0.0, 0.5):
        unload()
        with loaded_in_part(share):
            found = pair.walk()
            assert found == found[:1] * 4, (share, found)
        unload()


@pytest.mark.parametrize(("name", "form"), few(EVERY, PAGED))
def test_a_file_with_loras_under_dynamic_vram(name: str, form: str) -> None:
    """Where all pages stay, and where half of them do.

    Eager's stay. What does not is patched in each step, and eager computes with it in full where it computes so at all.
    """
    family = FAMILIES[name]
    file_of(family, form)
    with dynamic_vram() as card:
        pair = Pair(family, form)
        assert pair.walk(again=True) == [pair.first] * 4 and not card.pinned()
        (memory,) = pair.clone.model.dynamic_vbars.values()
        memory.fits = memory.loaded_size() // 2
        memory.free_memory(memory.loaded_size())
        memory.set_watermark(memory.get_nr_pages() * PAGE)
        assert pair.walk(again=True) == [pair.first] * 4 and not card.pinned()
        assert 0 < memory.loaded_size() <= memory.fits
