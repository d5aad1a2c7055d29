# SPDX-License-Identifier: Apache-2.0
"""Steps as graphs on weights that are kept packed, under dynamic VRAM: which pages they read, hold, and do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from card_memory import PAGE
from kept_weights import O3, Paged, engine_of, kept, packing_flux, pages_of
from large_rows import few
from patchers import sample
from pretended_graph import Graph, pretend

from nexfort_engine.cudagraphs import step_graphs
from nexfort_engine.dispatch import prepack_cache
from nexfort_engine.dispatch import region as dispatch
from nexfort_engine.dispatch.memory_reclaim import MemoryReclaim
from nexfort_engine.hosts.comfy import model as host
from nexfort_engine.hosts.comfy.weights import ComfyWeights
from nexfort_engine.runtime.forward_context import current

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]


def _double_blocks(patch: pytest.MonkeyPatch) -> Any:
    """A Flux without single blocks: each kind of calls has code of its own for one kind of blocks, not for two."""
    patcher = packing_flux(patch)
    patcher.model.diffusion_model.single_blocks = torch.nn.ModuleList()
    return patcher


class Watched(Paged):
    """replays: for each, the pages of which regions were given weights, and those that were held."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        pretend(patch)
        super().__init__(_double_blocks(patch), patch)
        self.replays: list[tuple[set[int], set[int]]] = []
        read: set[int] = set()
        self.lent_in_a_capture: list[Any] = []
        self.observed = 0
        run, replay, acquire = dispatch.Binding.run, Graph.replay, ComfyWeights.acquire
        observe = step_graphs.StepGraphs._observe

        def ran(binding: Any, weights: list[torch.Tensor], flat: Any, tensors: Any, kept: Any = None) -> Any:
            used = binding.artefact.weights if kept is None else binding.needed
            for weight in map(weights.__getitem__, used):
                at = weight.data_ptr() - self.memory.bytes.data_ptr()
                if 0 <= at < self.memory.bytes.numel():
                    read.update(range(at // PAGE, (at + weight.nbytes - 1) // PAGE + 1))
            return run(binding, weights, flat, tensors, kept)

        def replayed(graph: Graph) -> None:
            held = {page for page in range(self.memory.get_nr_pages()) if self.memory.pinned(page)}
            read.clear()
            replay(graph)
            self.replays.append((set(read), held))

        def leased(provider: Any, layers: list[Any], device: Any) -> Any:
            session = current.get()
            if session is not None and session.observation.capturing:
                self.lent_in_a_capture.append(layers)
            return acquire(provider, layers, device)

        def looked(*args: Any) -> Any:
            self.observed += 1
            return observe(*args)

        patch.setattr(dispatch.Binding, "run", ran)
        patch.setattr(Graph, "replay", replayed)
        patch.setattr(ComfyWeights, "acquire", leased)
        patch.setattr(step_graphs.StepGraphs, "_observe", looked)

    def fetched_anew(self) -> None:
        """As a LoRA under dynamic VRAM leaves the layers: their tensors are the same."""
        for layer in self.layers:
            layer._v_signature = None

    def check(self) -> None:
        assert self.replays and all(read <= held for read, held in self.replays), "a graph read what nobody held"
        assert not self.lent_in_a_capture and not +self.memory.pins


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_graph_holds_no_pages_of_what_is_kept_packed(watched: Watched) -> None:
    first = sample(watched.clone, steps=4)
    assert len(Graph.made) == 1, "captured once the weights were packed, and the others asked for by themselves"
    watched.memory.take_away()
    assert torch.equal(sample(watched.clone, steps=4), first)
    watched.check()
    assert all(read and held <= watched.others and held < pages_of(watched.layers) for read, held in watched.replays)


@pytest.mark.parametrize("first", [2, 3])
def test_a_lora_between_two_steps_of_the_way_to_a_graph(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    sample(watched.clone, steps=first)
    before = kept(watched.clone)
    monkeypatch.setattr(ComfyWeights, "weights_version", lambda _: "with a LoRA")
    watched.fetched_anew()
    sample(watched.clone, steps=5)
    assert not set(kept(watched.clone)) & set(before)
    watched.check()


def _no_room(watched: Watched, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ComfyWeights, "weights_version", lambda _: "with a LoRA")
    patch.setattr(prepack_cache, "room_for", lambda *_: False)
    watched.fetched_anew()


def _nobody_can_say(_: Watched, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ComfyWeights, "weights_version", lambda _: None)  # as with hooks


def _released_meanwhile(watched: Watched, patch: pytest.MonkeyPatch) -> None:
    engine = engine_of(watched.clone)
    engine.release()
    released_weights, once = engine.table.released_weights, []

    def released(used: Any) -> Any:
        found = released_weights(used)
        if not once:
            once.append(engine.release())  # by another thread
        return found

    patch.setattr(engine.graphs, "_released_weights", released)


@pytest.mark.parametrize("change", few([_no_room, _nobody_can_say, _released_meanwhile], [_released_meanwhile]))
def test_a_graph_holds_the_pages_that_it_was_captured_with(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, change: Callable[[Watched, pytest.MonkeyPatch], None]
) -> None:
    sample(watched.clone, steps=2)  # packed, then observed
    assert not Graph.made
    change(watched, monkeypatch)
    sample(watched.clone, steps=5)
    watched.check()


# ---- two kinds of calls --------------------------------------------------------------------------------------


def masked(positive: Any, negative: Any) -> Any:
    """Positive and negative with an attention mask on one of them: other artefacts for that one."""
    extra = {"attention_mask": torch.zeros(1, 80, 80, dtype=torch.bfloat16), "attention_mask_img_shape": (4, 4)}
    return [[positive[0][0], {**positive[0][1], **extra}]], negative


@pytest.mark.parametrize("room", few([True, False], [False]))
def test_two_kinds_of_calls_in_turn_are_both_captured(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    sample(watched.clone, steps=1, cfg=1.0)
    count = len(kept(watched.clone))
    if not room:
        monkeypatch.setattr(prepack_cache, "room_for", lambda *_: False)
        monkeypatch.setattr(MemoryReclaim, "others_give_way", lambda _: False)
    sample(watched.clone, steps=10, edit=masked)
    assert len(kept(watched.clone)) > count, "another artefact"
    assert len(Graph.made) == 2 and watched.observed < 8
    assert all(read <= held for read, held in watched.replays)


def test_a_graph_survives_that_another_kind_is_packed(watched: Watched) -> None:
    sample(watched.clone, steps=5, cfg=1.0)
    assert len(Graph.made) == 1
    sample(watched.clone, steps=1, cfg=1.0, edit=masked)
    before = watched.observed
    sample(watched.clone, steps=3, cfg=1.0)
    assert watched.observed == before and len(Graph.made) == 1


def test_pages_are_given_back_before_a_graph_is_made_and_it_keeps_its_own(watched: Watched) -> None:
    """Also when another kind of call is packed meanwhile."""
    memory, found = watched.memory, []
    free = memory.free_memory
    memory.free_memory = lambda size: found.append((len(Graph.made), bool(watched.replays))) or free(size)  # type: ignore[method-assign]
    first = sample(watched.clone, steps=4, cfg=1.0)
    left = set(memory.resident)
    assert found == [(0, False)] and len(Graph.made) == 1
    assert all(read and held == left for read, held in watched.replays), "the graph needs all that is left"
    filled = {page: memory.filled[page] for page in left}
    sample(watched.clone, steps=1, cfg=1.0, edit=masked)
    assert found == [(0, False), (1, True)] and memory.resident == left
    before = len(watched.replays)
    assert torch.equal(sample(watched.clone, steps=4, cfg=1.0), first)
    assert len(watched.replays) == before + 4, "at once, and in every step"
    assert {page: memory.filled[page] for page in left} == filled, "nothing was read again"
    watched.check()


def test_a_kind_of_call_that_is_not_packed_any_more_keeps_no_pages(watched: Watched) -> None:
    sample(watched.clone, steps=3, cfg=1.0)
    left = set(watched.memory.resident)
    sample(watched.clone, steps=3, cfg=1.0, edit=masked)
    engine_of(watched.clone).release()
    sample(watched.clone, steps=3, cfg=1.0)
    assert sum(map(bool, kept(watched.clone))) < len(kept(watched.clone)) and watched.memory.resident == left


def test_a_graph_whose_pages_were_given_back_is_not_replayed_on_others(watched: Watched) -> None:
    first = sample(watched.clone, steps=4)
    before = len(watched.replays)
    assert engine_of(watched.clone).state.provider.release(watched.layers) and not watched.memory.resident
    assert torch.equal(sample(watched.clone, steps=4), first)
    assert len(watched.replays) == before + 3, "not in the first step"
    watched.check()


def test_a_lora_has_a_graph_made_after_pages_were_given_back(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    sample(watched.clone, steps=4)
    left, graphs = set(watched.memory.resident), len(Graph.made)
    monkeypatch.setattr(ComfyWeights, "weights_version", lambda _: "with a LoRA")
    watched.fetched_anew()
    sample(watched.clone, steps=5)
    assert len(watched.memory.given_back) == 2 and watched.memory.resident == left
    assert len(Graph.made) == graphs + 1
    watched.check()


def test_kinds_of_calls_share_what_stands_in(watched: Watched) -> None:
    """Or what one of them leased could not be had again by the next."""
    sample(watched.clone, steps=4, edit=masked)
    both = [region for region in engine_of(watched.clone).regions if sum(bool(b.kept) for b in region.bindings) == 2]
    assert both
    for region in both:
        one, other = region.bindings
        assert one.kept.placeholders is other.kept.placeholders
        assert prepack_cache.released_weights(region, {id(one), id(other)}) == set(one.kept.placeholders) != set()
        other.kept = None
        assert not prepack_cache.released_weights(region, {id(one), id(other)})
        assert prepack_cache.released_weights(region, {id(one)})


def test_what_is_let_go_of_during_a_capture_is_not_replayed(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sample(watched.clone, steps=4)
    engine, write, once = engine_of(watched.clone), step_graphs.write_result, []
    engine.release()

    def released(*args: Any) -> bool:
        session = current.get()
        if session is not None and session.observation.capturing and not once:
            once.append(any(region.release() for region in engine.regions))  # by another thread
            watched.replays.clear()
        return write(*args)

    monkeypatch.setattr(step_graphs, "write_result", released)
    assert torch.equal(sample(watched.clone, steps=4), wanted)
    assert once == [True] and not watched.replays
    assert torch.equal(sample(watched.clone, steps=4), wanted)
    watched.check()


def test_weights_that_are_resident_cost_no_further_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    clone = host.attach(packing_flux(monkeypatch), O3)
    sample(clone, steps=2)
    assert all(kept(clone)) and len(Graph.made) == 1, "observed, and captured"
