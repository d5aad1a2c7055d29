# SPDX-License-Identifier: Apache-2.0
"""What happens to a model between and during prompts: swapped, merged, moved, evicted, split, out of memory.

ComfyUI's own patchers, nodes, memory management and sampler do it. Every picture is eager's, nothing is compiled.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from backbones import make
from card_memory import loaded_in_part, unload
from patchers import (
    CONFIG,
    MOVES,
    TOLERANCE,
    Pair,
    another,
    distance,
    families,
    in_the_middle,
    nothing_new,
    one_family,
    patcher_around,
    reported,
    sample,
)
from subjects import graphs_as_they_are

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.hosts.comfy import model as host

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("comfyui", "artefact_cache")]
one = pytest.mark.parametrize("name", ["comfy_flux"])


@one_family
def test_two_checkpoints_take_turns(pair: Callable[[str], Pair], name: str) -> None:
    at = pair(name)
    patcher = another(name)
    compiled = host.attach(patcher, CONFIG)
    wanted, own, before = sample(patcher), sample(at.patcher), sample(at.clone)
    assert distance(wanted, own) > MOVES
    first = sample(compiled)
    assert distance(first, wanted) < TOLERANCE
    found = host.report_of(compiled).as_dict()  # type: ignore[union-attr]
    assert found["artefacts_compiled"] == 0 and found["artefacts_loaded"] > 0 and not found["eager"]
    mark = at.mark()
    for _ in range(2):
        assert torch.equal(sample(at.clone), before) and torch.equal(sample(compiled), first)
    nothing_new(at.since(mark))


@one
def test_two_nodes_with_different_options_take_turns(pair: Callable[[str], Pair], name: str) -> None:
    at = pair(name)
    before, wanted = sample(at.clone), sample(at.patcher)
    other = host.attach(at.patcher, CompileConfig.parse("jit"))
    mark = at.mark()
    for _ in range(2):
        assert distance(sample(other), wanted) < TOLERANCE
        assert torch.equal(sample(at.clone), before) and torch.equal(sample(at.patcher), wanted)
    nothing_new(at.since(mark))


def merged(how: str, patcher: Any, other: Any) -> Any:
    """What ComfyUI's merging nodes make of two models."""
    from comfy_extras import nodes_model_merging as nodes

    if how == "added":
        made = nodes.ModelAdd().merge(patcher, other)
    elif how == "subtracted":
        made = nodes.ModelSubtract().merge(patcher, other, 0.6)
    elif how == "by blocks":
        ratios = {"img_in.": 0.9, "double_blocks.0.": 0.2, "double_blocks.1.": 1.0, "single_blocks.": 0.5}
        made = nodes.ModelMergeBlocks().merge(patcher, other, **ratios)
    else:
        made = nodes.ModelMergeSimple().merge(patcher, other, 0.4)
    return made[0]


@one_family
def test_a_merge_of_two_is_honoured_in_either_order(pair: Callable[[str], Pair], name: str) -> None:
    at, other = pair(name), another(name)
    nothing_new(at.honours(lambda patcher: merged("simple", patcher, other)))


@pytest.mark.parametrize("how", ["added", "subtracted", "by blocks"])
def test_every_kind_of_merge(pair: Callable[[str], Pair], how: str) -> None:
    at, other = pair("comfy_flux"), another("comfy_flux")
    nothing_new(at.honours(lambda patcher: merged(how, patcher, other)))


@one
def test_a_compiled_model_that_is_merged_into_another_gives_its_weights_alone(
    pair: Callable[[str], Pair], name: str
) -> None:
    at, other = pair(name), another(name)
    plain, before, mark = sample(at.patcher), sample(at.clone), at.mark()
    wanted = sample(merged("simple", other, at.patcher))
    assert distance(wanted, plain) > MOVES and distance(wanted, sample(other)) > MOVES
    made = merged("simple", other, at.clone)
    assert torch.equal(sample(made), wanted) and at.since(mark)["calls"] == 0, "it is as eager as what it is made of"
    compiled = host.attach(made, CONFIG)
    assert distance(sample(compiled), wanted) < TOLERANCE
    assert not reported(compiled)["artefacts_compiled"] and not reported(compiled)["eager"]
    at.is_left_by(plain, before)


@one
def test_a_model_that_was_unloaded_is_loaded_again(pair: Callable[[str], Pair], name: str) -> None:
    at = pair(name)
    plain, before = sample(at.patcher), sample(at.clone)
    unload()
    at.is_left_by(plain, before)


@families
def test_weights_leave_in_the_middle_of_a_prompt(pair: Callable[[str], Pair], name: str) -> None:
    at = pair(name)
    plain, before, mark = sample(at.patcher), sample(at.clone), at.mark()
    borrowed: list[int] = []

    def leave() -> None:
        at.patcher.unpatch_model(torch.device("cpu"), unpatch_weights=False)
        with loaded_in_part(0.3):
            at.patcher.load(torch.device("cpu"))
        layers = [m for m in at.network.modules() if hasattr(m, "comfy_cast_weights")]
        borrowed.append(sum(bool(m.comfy_cast_weights) for m in layers))

    assert distance(sample(in_the_middle(at.clone, leave)), plain) < TOLERANCE
    assert borrowed[0] > 4, "nothing left"
    nothing_new(at.since(mark))
    unload()
    at.is_left_by(plain, before)


@one
def test_the_batch_follows_the_memory_that_is_free(
    pair: Callable[[str], Pair], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management

    at = pair(name)
    plain, before, mark = sample(at.patcher), sample(at.clone), at.mark()
    batches: list[int] = []
    at.network.register_forward_pre_hook(lambda _module, args: batches.append(args[0].shape[0]))
    with monkeypatch.context() as patch:
        patch.setattr(comfy.model_management, "get_free_memory", lambda *_, **__: 1)
        alone = sample(at.patcher)
        assert set(batches) == {1}, "both conditions still run at once"
        at.network._forward_pre_hooks.clear()
        assert distance(alone, plain) < TOLERANCE
        assert distance(sample(at.clone), alone) < TOLERANCE
    nothing_new(at.since(mark))
    at.is_left_by(plain, before)


@one_family
def test_the_batch_changes_from_step_to_step(
    pair: Callable[[str], Pair], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others come and go on the device while a prompt runs: both conditions at once, one after the other, at once."""
    import comfy.model_management

    at, steps = pair(name), {"steps": 4}
    plain, before, mark = sample(at.patcher, **steps), sample(at.clone, **steps), at.mark()
    batches: list[int] = []
    handle = at.network.register_forward_pre_hook(lambda _module, args: batches.append(args[0].shape[0]))
    for pattern in ((1 << 40, 1), (1, 1 << 40, 1 << 40)):
        with monkeypatch.context() as patch:
            free = itertools.cycle(pattern)
            patch.setattr(comfy.model_management, "get_free_memory", lambda *_, free=free, **__: next(free))
            assert distance(sample(at.patcher, **steps), plain) < TOLERANCE
            handle.remove()
            assert distance(sample(at.clone, **steps), plain) < TOLERANCE
    assert {1, 2} <= set(batches), "the batch does not change"
    nothing_new(at.since(mark))
    at.is_left_by(plain, before, **steps)


@one
def test_every_prompt_makes_its_nodes_anew(pair: Callable[[str], Pair], name: str) -> None:
    """The patchers go, the model stays. Whole prompts under each of ComfyUI's caches: test_comfy_caches.py."""
    at = pair(name)
    before, mark = sample(at.clone), at.mark()
    for _ in range(3):
        made = host.attach(at.patcher.clone(), CONFIG)
        gone = weakref.ref(made)
        assert torch.equal(sample(made), before)
        del made
        unload()
        gc.collect()
        assert gone() is None
    nothing_new(at.since(mark))


@families
def test_a_model_that_is_gone_leaves_nothing_behind(pair: Callable[[str], Pair], name: str) -> None:
    def used() -> list[weakref.ref[Any]]:
        at = pair(name)
        sample(at.clone, size=(24, 16))
        engine = next(e for e in host._live.listed() if e.report is at.report)
        weights = [weakref.ref(w) for w in at.network.parameters()]
        return [weakref.ref(at.network), weakref.ref(engine), *weights]

    left = used()
    unload()
    for _ in range(3):
        gc.collect()
    assert len(left) > 10 and not [one for one in left if one() is not None]


@one
def test_no_memory_is_for_comfyui_to_deal_with(
    pair: Callable[[str], Pair], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nexfort_engine.runtime.artifact import Binding

    at = pair(name)
    plain, before, mark = sample(at.patcher), sample(at.clone), at.mark()

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left on the device")

    with monkeypatch.context() as patch:
        patch.setattr(Binding, "run", full)
        with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
            sample(at.clone)
    nothing_new(at.since(mark))
    at.is_left_by(plain, before)


@one
def test_an_interrupt_ends_the_step_and_nothing_else(pair: Callable[[str], Pair], name: str) -> None:
    import comfy.model_management as management

    at = pair(name)
    plain, before, mark = sample(at.patcher), sample(at.clone), at.mark()
    with pytest.raises(management.InterruptProcessingException):
        sample(in_the_middle(at.clone, management.interrupt_current_processing))
    management.interrupt_current_processing(False)
    nothing_new(at.since(mark))
    at.is_left_by(plain, before)


def test_an_interrupt_while_the_first_step_is_planned_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is run eagerly beside the first one; ComfyUI's own layers may see the interrupt there."""
    import comfy.model_management as management

    from nexfort_engine.compilation import planner

    def interrupted(self: Any, call: Any, args: Any, kwargs: Any) -> Any:
        management.interrupt_current_processing()
        return call(*args, **kwargs)

    with graphs_as_they_are():
        patcher = another("comfy_flux", seed=11)
        compiled = host.attach(patcher, CompileConfig.parse("jit:benchmark"))
        with monkeypatch.context() as patch:
            patch.setattr(planner.Planner, "_observe", interrupted)
            with pytest.raises(management.InterruptProcessingException):
                sample(compiled)
        assert not host.report_of(compiled).as_dict()["notes"]  # type: ignore[union-attr]
        assert distance(sample(compiled), sample(patcher)) < TOLERANCE


def test_a_deep_clone_runs_on_its_own_model(pair: Callable[[str], Pair]) -> None:
    """As for a second GPU: the wrapper travels with the clone and finds the model that runs."""
    at = pair("comfy_flux")
    twin = patcher_around(make("comfy_flux").module, family="Flux")
    at.patcher.cached_patcher_init = (lambda *_, **__: twin, ())
    at.clone.cached_patcher_init = at.patcher.cached_patcher_init
    before = sample(at.clone)
    if not hasattr(at.clone, "deepclone_multigpu"):
        pytest.skip("this ComfyUI has no clones for several GPUs")
    deep = at.clone.deepclone_multigpu(torch.device("cpu"))
    assert deep.model is not at.clone.model
    with torch.no_grad():
        deep.model.diffusion_model.img_in.weight.mul_(2.0)
    wanted = sample(twin)
    assert distance(wanted, before) > MOVES
    assert distance(sample(deep), wanted) < TOLERANCE
    assert host.report_of(deep) is not at.report
    assert torch.equal(sample(at.clone), before)


def test_what_stays_is_allocated_apart_from_comfyuis_own_record(
    pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ComfyUI has a compiler of allocations of its own; this version may not, so its name is put there."""
    import comfy.model_prefetch

    from nexfort_engine.compilation import builder, lookup

    inside, seen = [0], []

    @contextlib.contextmanager
    def pause(*_: Any, **__: Any) -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    monkeypatch.setattr(comfy.model_prefetch, "pause_malloc_graph", pause, raising=False)
    loads, lowers = lookup.Finder.load_code, builder.lower_all

    def load(*args: Any) -> None:
        seen.append(("load", inside[0]))
        loads(*args)

    def lower(*args: Any, **words: Any) -> None:
        seen.append(("lower", inside[0]))
        lowers(*args, **words)

    monkeypatch.setattr(lookup.Finder, "load_code", load)
    monkeypatch.setattr(builder, "lower_all", lower)
    at = pair("comfy_flux")
    lookup._loaded.clear()
    compiled = host.attach(another("comfy_flux"), CONFIG)
    sample(compiled)
    sample(host.attach(at.patcher, CompileConfig.parse({"dynamic": False})))
    kinds = {kind for kind, _ in seen}
    assert kinds == {"load", "lower"} and all(depth == 1 for _, depth in seen), seen
    assert inside == [0] and isinstance(comfy.model_prefetch, types.ModuleType)


def test_graphs_go_with_an_unloaded_model_and_stay_when_a_clone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with graphs_as_they_are():
        clone = host.attach(patcher_around(make("comfy_flux").module, flux=True), CONFIG)
        sample(clone)
        (engine,) = clone.model.diffusion_model.__dict__["_nexfort_engines"].values()
        released: list[bool] = []
        monkeypatch.setattr(engine.graphs, "release", lambda: released.append(True))
        other = clone.clone()
        sample(other)
        other.detach(unpatch_all=False)  # as a patcher does at its end
        del other
        gc.collect()
        assert not released
        unload()
        assert released
