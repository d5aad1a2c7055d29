# SPDX-License-Identifier: Apache-2.0
"""Pages of dynamic VRAM: few questions that see whatever happened to any of them. ComfyUI is not needed."""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from card_memory import ALIGNED, PAGE, OlderPagedMemory, PagedMemory
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nexfort_engine.hosts.comfy.vram_pages import Pages, _page_length, _stretches, _tell, give_back, paying
from nexfort_engine.hosts.comfy.weights import ComfyWeights

SIZES = st.lists(st.integers(1, 5 * PAGE), min_size=1, max_size=30)


def filled(memory: Any, sizes: list[int]) -> list[Any]:
    """Layers of these sizes whose places were asked for and filled."""
    layers = [SimpleNamespace(_v=memory.place(size)) for size in sizes]
    for layer in layers:
        layer._v_signature = memory.fault(layer._v)
    return layers


def memory_for(sizes: list[int], kind: type[PagedMemory] = PagedMemory) -> PagedMemory:
    size = sum(size + ALIGNED for size in sizes) + PAGE
    return kind(size, asked_for=10 * size)


def given_back(layers: list[Any]) -> Pages:
    """The pages of layers, taken once and let go."""
    pages = Pages()
    for layer in layers:
        pages.took(layer)
    pages.let_go()
    return pages


def touched(places: list[Any]) -> set[int]:
    return {page for _, at, size in places for page in range(at // PAGE, (at + size - 1) // PAGE + 1)}


@pytest.fixture(autouse=True)
def aimdo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two functions that are asked, on the pretended memory that each place names."""
    package, module = ModuleType("comfy_aimdo"), ModuleType("comfy_aimdo.model_vbar")
    module.vbar_fault = lambda place: place[0].fault(place)  # type: ignore[attr-defined]
    module.vbar_unpin = lambda place: place[0].unpin(place)  # type: ignore[attr-defined]
    package.model_vbar = module  # type: ignore[attr-defined]
    _tell.cache_clear()
    monkeypatch.setitem(sys.modules, "comfy_aimdo", package)
    monkeypatch.setitem(sys.modules, "comfy_aimdo.model_vbar", module)


@given(SIZES)
def test_what_is_asked_for_touches_every_page_once(sizes: list[int]) -> None:
    layers = filled(memory_for(sizes), sizes)
    chosen = [place for place, _ in _stretches([(one._v, one._v_signature) for one in layers])]
    pages = [page for place in chosen for page in touched([place])]
    assert sorted(pages) == sorted(touched([layer._v for layer in layers]))
    assert all(page + 1 not in touched(chosen[i + 1 :]) for i, place in enumerate(chosen) for page in touched([place]))


def test_a_memory_that_does_not_tell_its_pages_is_asked_for_every_place() -> None:
    silent = SimpleNamespace()
    rows = [((silent, i * 8, 8), b"\0\0\0\1") for i in range(5)]
    assert [place for place, _ in _stretches(rows)] == [place for place, _ in rows]


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 157 * PAGE, 157 * PAGE + 8])
@pytest.mark.parametrize("asked_for", [None, 1 << 30])
def test_the_length_of_a_page_is_found(size: int, asked_for: int | None) -> None:
    """However much more was asked for than the card has."""
    memory = PagedMemory(size, asked_for=asked_for)
    assert _page_length(memory) is None, "it holds none"
    assert memory.fault((memory, 0, size))
    memory.unpin((memory, 0, size))
    assert _page_length(memory) == PAGE
    memory.loaded_size = lambda: 3 * PAGE * memory.get_nr_pages()  # type: ignore[method-assign]  # it grew meanwhile
    assert _page_length(memory) is None


@given(SIZES, st.data())
def test_a_page_that_went_away_is_noticed_whichever_it_was(sizes: list[int], data: st.DataObject) -> None:
    memory = memory_for(sizes)
    layers = filled(memory, sizes)
    pages = given_back(layers)
    assert pages.take_again() and {page for page in range(memory.get_nr_pages()) if memory.pinned(page)} == touched(
        [layer._v for layer in layers]
    )
    pages.let_go()
    gone = data.draw(st.sampled_from(sorted(touched([layer._v for layer in layers]))))
    memory.take_away_page(gone)
    assert not pages.take_again() and not +memory.pins


@given(SIZES, st.data())
def test_a_layer_that_was_filled_anew_is_noticed(sizes: list[int], data: st.DataObject) -> None:
    memory = memory_for(sizes)
    layers = filled(memory, sizes)
    pages = given_back(layers)
    assert pages.take_again()
    pages.let_go()
    other = data.draw(st.sampled_from(layers))
    other._v_signature = data.draw(st.sampled_from([None, other._v_signature[:]]))
    assert not pages.take_again() and not +memory.pins


def test_layers_that_disagree_about_a_page_are_all_asked() -> None:
    memory = PagedMemory(4 * PAGE)
    first, second = (SimpleNamespace(_v=memory.place(8)) for _ in range(2))
    first._v_signature = memory.fault(first._v)
    memory.unpin(first._v)
    memory.take_away()
    second._v_signature = memory.fault(second._v)
    memory.fault(first._v)
    pages = given_back([first, second])
    assert not pages.take_again() and not +memory.pins


# ---- given back ----------------------------------------------------------------------------------------------


@given(SIZES, st.sampled_from([PagedMemory, OlderPagedMemory]), st.data())
def test_what_is_needed_stays_and_the_rest_goes(sizes: list[int], kind: type[PagedMemory], data: st.DataObject) -> None:
    memory = memory_for(sizes, kind)
    layers = filled(memory, sizes)
    needed = data.draw(st.lists(st.sampled_from(layers), unique_by=id))
    in_use = data.draw(st.lists(st.sampled_from(layers), unique_by=id))
    given_back(layers)
    for layer in in_use:
        memory.fault(layer._v)
    before, pins = set(memory.resident), Counter(memory.pins)
    left = touched([layer._v for layer in (*needed, *in_use)])
    idle = len(before - touched([layer._v for layer in needed]))
    found = give_back(memory, [layer._v for layer in needed])
    if idle < 0.05 * len(before):
        assert not found and memory.resident == before and not memory.given_back
    else:
        assert found == PAGE * len(before - left) and memory.resident == left
    assert +memory.pins == +pins
    for layer in in_use:
        memory.unpin(layer._v)
    assert memory.resident == (left if memory.given_back else before), "nothing goes with the last pin"
    gone = before - memory.resident
    for layer in layers:
        stays = not touched([layer._v]) & gone
        number = memory.fault(layer._v)
        assert number is not None, "all of it may come back"
        assert (number == layer._v_signature) == stays
        memory.unpin(layer._v)


def _share(group: list[Any], needed: list[Any]) -> float:
    """How much of a group's bytes lies in pages that none of the needed places touches; by counting each byte."""
    wanted = {at // PAGE for _, start, size in needed for at in range(start, start + size)}
    going = [at // PAGE not in wanted for _, start, size in group for at in range(start, start + size)]
    return sum(going) / len(going)


@given(st.lists(st.integers(1, 2 * PAGE), min_size=2, max_size=12), st.data())
def test_what_is_kept_pays_where_most_of_it_lies_in_pages_that_go(sizes: list[int], data: st.DataObject) -> None:
    memory = PagedMemory(sum(sizes) + len(sizes) * ALIGNED + PAGE)
    places = [memory.place(size) for size in sizes]
    for place in places:
        memory.fault(place)
    owners = data.draw(st.lists(st.integers(-1, 3), min_size=len(sizes), max_size=len(sizes)))
    groups = [[place for place, owner in zip(places, owners, strict=True) if owner == n] for n in range(4)]
    groups = [group for group in groups if group]
    needed = [place for place, owner in zip(places, owners, strict=True) if owner < 0]
    pays = paying(memory, groups, needed)
    stay = needed + [place for group, going in zip(groups, pays, strict=True) if not going for place in group]
    for group, going in zip(groups, pays, strict=True):
        if going:
            assert _share(group, stay) >= 0.5
        else:
            assert _share(group, [place for place in stay if place not in group]) < 0.5 or _share(group, needed) < 0.5


def test_whatever_is_kept_pays_where_a_memory_does_not_tell_its_pages() -> None:
    memory = SimpleNamespace(base_addr=0)
    assert paying(memory, [[(memory, 0, 8)], []], [(memory, 0, 8)]) == [True, True]


@pytest.mark.comfy
@pytest.mark.usefixtures("comfyui")
def test_layers_are_told_apart_by_their_memory() -> None:
    model, memories = nn.Sequential(*(nn.ReLU() for _ in range(4))), [PagedMemory(20 * PAGE), PagedMemory(20 * PAGE)]
    for layer, memory in zip(model, (memories[0], memories[0], memories[1]), strict=False):
        layer._v = memory.place(2 * PAGE)
        assert memory.fault(layer._v)
        memory.unpin(layer._v)
    provider = ComfyWeights(model)
    assert provider.release([model[3]]) == 0, "it has no place"
    assert provider.release([model[0]]) == 2 * PAGE, "its neighbour stays, and so does what lies elsewhere"
    assert memories[0].resident == {2, 3} and memories[1].resident == {0, 1} and not memories[1].given_back
    assert provider.release(list(model)) == 4 * PAGE
    del model, layer
    assert provider.release([]) == 0, "the model is gone"


@pytest.mark.parametrize(("idle", "goes"), [(0, False), (4, False), (5, True), (100, True)])
def test_little_is_not_worth_it(idle: int, goes: bool) -> None:
    """In hundredths of what is resident."""
    memory = PagedMemory(101 * PAGE)
    whole = memory, 0, 100 * PAGE
    assert memory.fault(whole)
    memory.unpin(whole)
    assert give_back(memory, [(memory, idle * PAGE, (100 - idle) * PAGE)] if idle < 100 else []) == goes * idle * PAGE
    assert bool(memory.given_back) == goes and memory.loaded_size() == (100 - goes * idle) * PAGE
    faults = memory.faults
    assert give_back(memory, [(memory, 0, 100 * PAGE)]) == 0 and memory.faults == faults, "nothing is idle"


def test_what_is_not_resident_is_not_asked_for() -> None:
    memory = PagedMemory(10 * PAGE)
    assert give_back(memory, []) == 0 and not memory.given_back, "it holds nothing"
    one = memory, 0, PAGE
    assert memory.fault(one)
    memory.unpin(one)
    assert give_back(memory, [(memory, 5 * PAGE, 2 * PAGE)]) == PAGE and not memory.resident


def test_a_memory_that_does_not_tell_its_pages_gives_nothing_back() -> None:
    assert give_back(SimpleNamespace(), []) == 0


def test_pages_are_let_go_of_if_giving_back_fails() -> None:
    memory = PagedMemory(4 * PAGE)
    both = memory, 0, 2 * PAGE
    assert memory.fault(both)
    memory.unpin(both)

    def fails(_: int) -> int:
        memory._mark = 0
        raise RuntimeError

    memory.free_memory = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        give_back(memory, [(memory, 0, PAGE)])
    assert not +memory.pins and memory.resident == {0, 1}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_page_that_cannot_be_let_go_of_keeps_no_other(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """comfy_aimdo 0.6.0 raises where the driver fails."""
    memory = memory_for([PAGE] * 3)
    layers, unpinned = filled(memory, [PAGE] * 3), []
    pages = Pages()
    for layer in layers:
        pages.took(layer)

    def unpin(place: Any) -> None:
        unpinned.append(place)
        if place is layers[failing]._v:
            raise RuntimeError("the driver failed")

    monkeypatch.setattr(sys.modules["comfy_aimdo.model_vbar"], "vbar_unpin", unpin)
    with pytest.raises(RuntimeError, match="the driver failed"):
        pages.let_go()
    assert unpinned == [layer._v for layer in layers]
    pages.let_go()
    assert len(unpinned) == 3, "no place is let go of twice"


# ---- an aimdo that lacks a function ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vbar_fault", "vbar_unpin"])
def test_pages_are_not_held_again_without_the_function(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = memory_for([PAGE] * 3)
    pages = given_back(filled(memory, [PAGE] * 3))
    assert pages.take_again()
    pages.let_go()
    monkeypatch.delattr(sys.modules["comfy_aimdo.model_vbar"], name)
    before = memory.faults
    for _ in range(2):
        assert not pages.take_again()
        pages.let_go()
    assert memory.faults == before and not +memory.pins
    (line,) = caplog.messages
    assert name in line and "asked for anew" in line


@pytest.mark.parametrize(
    "name",
    [
        *("vbar_fault", "vbar_unpin", "free_memory", "get_residency", "loaded_size"),
        *("get_nr_pages", "max_size", "base_addr", "prioritize"),
    ],
)
def test_nothing_is_given_back_without_the_function(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is changed: whatever is resident stays so, and nothing is pinned."""
    memory = memory_for([PAGE] * 3, OlderPagedMemory if name == "prioritize" else PagedMemory)
    layers = filled(memory, [PAGE] * 3)
    given_back(layers)
    before, faults, needed = set(memory.resident), memory.faults, [layers[0]._v]
    if name.startswith("vbar_"):
        monkeypatch.delattr(sys.modules["comfy_aimdo.model_vbar"], name)
        lacking: Any = memory
    else:
        lacking = Lacking(memory, name)
    for _ in range(2):
        assert give_back(lacking, [(lacking, *place[1:]) for place in needed]) == 0
    assert memory.resident == before and memory.faults == faults and not +memory.pins and not memory.given_back
    (line,) = caplog.messages
    assert name in line and "stays with the model" in line


class Lacking:
    """A memory without one of its attributes."""

    def __init__(self, memory: PagedMemory, name: str) -> None:
        self._memory, self._name = memory, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._memory, name)


def test_without_the_package_s_module_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_for([PAGE])
    pages = given_back(filled(memory, [PAGE]))
    monkeypatch.delattr(sys.modules["comfy_aimdo"], "model_vbar")
    monkeypatch.setitem(sys.modules, "comfy_aimdo.model_vbar", None)
    assert not pages.take_again() and give_back(memory, []) == 0
    pages.let_go()
    assert not +memory.pins
