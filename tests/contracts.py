# SPDX-License-Identifier: Apache-2.0
"""The promises, one test each, over every tiny backbone of backbones.py.

Each first asserts that what it varies moves the eager result by a hundred times the tolerance, so that none can pass on
a network that ignores it. "Nothing new" means neither compiled nor loaded: a cache that is warm from an earlier run
hides nothing.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backbones import BACKBONES, make, tensors_of
from halves import half_of
from inputs import shuffled_calls
from outside import unexplained
from restarted import counting, digests
from subjects import (
    MOVES,
    TOLERANCE,
    Beside,
    Subject,
    cold_subject,
    distance,
    equal_bits,
    graph_subject,
    graphs_as_they_are,
    names,
    new_since,
    subject,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nexfort_engine.compilation import jobs as lowering
from nexfort_engine.dispatch import forward_shim
from nexfort_engine.dispatch import region as dispatch
from nexfort_engine.lowering import inductor as lower

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
every = pytest.mark.parametrize("name", names())
with_options = pytest.mark.parametrize("name", names(where=lambda kind: bool(kind.edits)))


@pytest.fixture
def tiny(host: str) -> Subject:
    """The backbone after its first compiled call, shared by the tests of a session: leave it as it was."""
    return subject(host)


# ---- the result ---------------------------------------------------------------------------------------------


@every
def test_result_equals_eager(tiny: Subject) -> None:
    base = tiny.eager()
    for call in ({}, {"seed": 1}, {"prompt": 1}, {"step": 1}, {"batch": 1}, {"length": tiny.tiny.kind.lengths[1]}):
        wanted = tiny.eager(**call)
        if call and "batch" not in call:
            assert distance(wanted, base) > MOVES, f"{call} does not matter to the network"
        assert distance(tiny.run(**call), wanted) < TOLERANCE, call


@every
def test_same_call_gives_the_same_bits(tiny: Subject) -> None:
    assert distance(tiny.eager(seed=1), tiny.eager()) > MOVES
    first = tiny.run()
    tiny.run(seed=1)
    assert equal_bits(tiny.run(), first)


@every
def test_a_verified_step_is_the_same_step(tiny: Subject) -> None:
    before, calls = tiny.run(), tiny.report.calls
    tiny.engine.verify_next()
    assert equal_bits(tiny.run(), before)
    told = tiny.report.as_dict()
    assert told["calls"] == calls + 1
    verified, eager = told["verifications"][-1], {row["region"] for row in told["eager"]}
    assert verified["distance"] < TOLERANCE
    rows = {row["region"]: row for row in verified["regions"]}
    assert rows.keys() == {row["name"] for row in told["regions"]} - eager
    assert not [row for row in rows.values() if row["over"] or row["unjudged"]]


@every
def test_nothing_runs_as_python_that_the_report_does_not_name(tiny: Subject) -> None:
    assert unexplained(tiny.module, {"eager": []}, tiny.eager), "without the engine everything runs so"
    assert not unexplained(tiny.module, tiny.report.as_dict(), tiny.run)


# ---- one artefact for all ------------------------------------------------------------------------------------


def _walk(tiny: Subject, most: int) -> list[dict[str, Any]]:
    """Every size, prompt length and batch, or `most` of them, in an order that is shuffled and always the same."""
    kind = tiny.tiny.kind
    calls = shuffled_calls(kind.sizes, kind.lengths)
    for name, values in (("batch", (1, 2, 3, 4)), ("size", kind.sizes), ("length", kind.lengths)):
        assert {call[name] for call in calls[:most]} == set(values)
    return calls[:most]


def _assert_walk_needs_nothing_new(tiny: Subject, most: int = 60) -> None:
    kind = tiny.tiny.kind
    assert distance(tiny.eager(length=kind.lengths[1]), tiny.eager()) > MOVES
    rows = [row for tensor in tiny.eager() for row in tensor[:2]]
    assert distance(rows[:1], rows[1:2]) > MOVES, "both rows of the batch give the same"
    surprises = []
    with counting() as counted:
        for call in _walk(tiny, most):
            mark = tiny.report.mark()
            error = tiny.same(**call)
            new = new_since(tiny, mark)
            if [row["region"] for row in new.get("eager", ())] == [kind.bound_to_sizes]:
                del new["eager"]
            if new or not error < TOLERANCE:
                surprises.append((call, error, new))
    assert not surprises, "\n".join(map(str, surprises))
    assert counted.as_dict() == {"exports": 0, "lowerings": 0}


@every
def test_first_call_serves_every_size_length_and_batch(tiny: Subject) -> None:
    _assert_walk_needs_nothing_new(tiny)


@functools.cache
def _batch_of_one_first(name: str) -> tuple[Subject, list[Any]]:
    """A backbone whose first call was one of batch 1, and what others saw of its module meanwhile.

    Each look gives whether its weights were its own and whether it gave the eager result, or an error.
    """
    cold = cold_subject(make(name))
    beside = Beside(functools.partial(cold.run, batch=1, size=cold.tiny.kind.sizes[0]))

    def look() -> tuple[bool, bool]:
        values = cold.module.state_dict()
        fake = any(type(v) is not torch.Tensor and type(v) is not nn.Parameter for v in values.values())
        return list(values) == cold.keys_before and not fake, equal_bits(cold.eager(), cold.eager_before)

    return cold, beside.while_running(look)


@every
def test_batch_of_one_first_serves_every_size_length_and_batch(host: str) -> None:
    with graphs_as_they_are():
        cold, _ = _batch_of_one_first(host)
        assert cold.same(batch=1, size=cold.tiny.kind.sizes[0]) < TOLERANCE
        assert cold.report.as_dict()["artefacts_compiled"] > 0
        _assert_walk_needs_nothing_new(cold, most=20)


@every
def test_any_first_call_serves_every_size_length_and_batch(host: str) -> None:
    with graphs_as_they_are():
        cold = cold_subject(make(host))
        kind = cold.tiny.kind
        assert cold.same(batch=3, size=kind.sizes[3], length=kind.lengths[2]) < TOLERANCE
        assert cold.report.as_dict()["artefacts_compiled"] > 0
        _assert_walk_needs_nothing_new(cold, most=20)


@every
def test_twelve_blocks_need_what_two_need(tiny: Subject) -> None:
    deep = Subject(make(tiny.tiny.name, depth=12))
    assert sum(1 for _ in deep.module.modules()) > 2 * sum(1 for _ in tiny.module.modules())
    assert deep.same() < TOLERANCE
    again = tiny.again()
    again.run()
    wanted, found = again.report.as_dict(), deep.report.as_dict()
    assert found["artefacts_compiled"] == 0 and not found["eager"]
    assert {row["key"] for row in found["artefacts"]} == {row["key"] for row in wanted["artefacts"]}


# ---- what persists ------------------------------------------------------------------------------------------


def _installed(request: pytest.FixtureRequest) -> list[str]:
    """The backbones that can be made here."""
    hosts = {"torch"}
    try:
        import diffusers  # noqa: F401

        hosts.add("diffusers")
    except ImportError:
        pass
    try:
        request.getfixturevalue("comfyui")
        hosts.add("comfy")
    except pytest.skip.Exception:
        pass
    return [name for name, kind in BACKBONES.items() if kind.host in hosts]


@pytest.mark.parametrize("half", [0, 1])  # those that conftest.py's scheduler has compiled in this process
def test_second_process_compiles_nothing_and_gives_the_same_bits(
    request: pytest.FixtureRequest, artefact_cache: Path, half: int
) -> None:
    names_here = [name for name in _installed(request) if half_of(name) == half]
    wanted = {name: digests(subject(name).tiny, subject(name).compiled) for name in names_here}
    assert all(len(set(found)) == len(found) for found in wanted.values()), "two calls of a backbone gave the same"
    environment = {**os.environ, "NEXFORT_CACHE_DIR": str(artefact_cache)}
    if any(BACKBONES[name].host == "comfy" for name in names_here):
        environment["COMFYUI_PATH"] = str(request.getfixturevalue("comfyui"))
    here = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parent), str(here)])
    command = [sys.executable, str(here / "restarted.py"), *names_here, *(["--control"] if half == 0 else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["counted"] == {"exports": 0, "lowerings": 0}
    if half == 0:  # once is enough: the hooks are the same
        assert answer["control"]["problem"] is None
        assert min(answer["control"]["exports"], answer["control"]["lowerings"]) > 0, "the hooks see nothing"
    for name, found in answer["backbones"].items():
        assert found["artefacts_compiled"] == 0 and found["artefacts_loaded"] > 0, name
        assert {row["region"] for row in found["eager"]} <= {BACKBONES[name].bound_to_sizes}, name
        assert found["digests"] == wanted[name], name


# ---- the model stays itself ----------------------------------------------------------------------------------


def _assert_plain(tiny: Subject) -> None:
    """The module is what it was before it was compiled, and nothing of the engine is left in it."""
    assert list(tiny.module.state_dict()) == tiny.keys_before == list(tiny.compiled.state_dict())
    assert equal_bits(tiny.eager(), tiny.eager_before)


def _assert_nothing_left(tiny: Subject) -> None:
    assert not forward_shim._installed
    assert not [path for path, sub in tiny.module.named_modules() if "forward" in vars(sub)]


@every
def test_model_is_itself_before_during_and_after(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(tiny.compiled, type(tiny.module))
    inside, looked = threading.Event(), threading.Event()
    run = dispatch.Region._run

    def paused(region: Any, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert looked.wait(60)
        return run(region, *args)

    monkeypatch.setattr(dispatch.Region, "_run", paused)
    thread = threading.Thread(target=tiny.run, daemon=True)
    thread.start()
    assert inside.wait(60)
    try:
        _assert_plain(tiny)
        assert [path for path, sub in tiny.module.named_modules() if "forward" in vars(sub)], "no call was under way"
    finally:
        looked.set()
        thread.join(60)
    _assert_plain(tiny)
    _assert_nothing_left(tiny)


@every
def test_model_is_itself_for_others_while_it_is_captured(host: str) -> None:
    with graphs_as_they_are():
        cold, looks = _batch_of_one_first(host)
    assert len(looks) > 3
    wrong = [answer for answer in looks if answer != (True, True)]
    assert not wrong, f"{len(wrong)} of {len(looks)} looks saw another model, such as {wrong[0]!r}"
    told = cold.report.as_dict()["eager"]
    assert {row["region"] for row in told} <= {cold.tiny.kind.bound_to_sizes}


@every
def test_compiled_and_uncompiled_run_at_once(tiny: Subject) -> None:
    calls: list[dict[str, Any]] = [{}, {"seed": 1}, {"step": 1, "batch": 1}]
    assert distance(tiny.eager(**calls[1]), tiny.eager()) > MOVES
    wanted = {True: [tiny.run(**c) for c in calls], False: [tiny.eager(**c) for c in calls]}
    mark = tiny.report.mark()
    problems: list[Any] = []
    start = threading.Barrier(3)

    def work(compiled: bool) -> None:
        start.wait(60)
        try:
            for _ in range(5):
                for call, result in zip(calls, wanted[compiled], strict=True):
                    found = tiny.run(**call) if compiled else tiny.eager(**call)
                    if not equal_bits(found, result):
                        problems.append((compiled, call, distance(found, result)))
        except Exception as error:  # shown by the assertion below
            problems.append((compiled, error))

    workers = [threading.Thread(target=work, args=(compiled,)) for compiled in (True, False, True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not problems and not new_since(tiny, mark)
    _assert_nothing_left(tiny)


# ---- faults --------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """As ComfyUI's: no Exception, so that nothing takes it for a fault."""


def _fail_with(error: BaseException) -> Callable[[list[Any]], Any]:
    def code(_inputs: list[Any]) -> Any:
        raise error

    return code


@every
def test_exception_inside_a_step_leaves_the_model_usable(tiny: Subject) -> None:
    before = tiny.run()
    tiny = tiny.again()
    tiny.run()
    args, kwargs = tiny.tiny.make_inputs()
    narrow = {k: v[..., :-3] if k in ("context", "encoder_hidden_states") else v for k, v in kwargs.items()}
    narrow_args = tuple(v[..., :-3] if i == 2 else v for i, v in enumerate(args))  # diffusers' UNet
    with torch.inference_mode():
        with pytest.raises(RuntimeError) as in_eager:
            tiny.module(*narrow_args, **narrow)
        with pytest.raises(type(in_eager.value)):
            tiny.compiled(*narrow_args, **narrow)
    _assert_plain(tiny)
    _assert_nothing_left(tiny)
    used = [binding for region in tiny.engine.regions for binding in region.bindings]
    code, used[-1].code = used[-1].code, _fail_with(Interrupt("cancelled"))
    with pytest.raises(Interrupt):
        tiny.run()
    used[-1].code = code
    _assert_plain(tiny)
    _assert_nothing_left(tiny)
    mark = tiny.report.mark()
    assert equal_bits(tiny.run(), before)
    assert not new_since(tiny, mark)


@every
def test_failing_region_is_latched_and_the_step_completes(tiny: Subject) -> None:
    wanted = tiny.eager()
    tiny = tiny.again()
    tiny.run()
    for region in [region for region in tiny.engine.regions if region.bindings]:
        for binding in region.bindings:
            binding.code = _fail_with(RuntimeError("the card fell off"))
        mark = tiny.report.mark()
        assert distance(tiny.run(), wanted) < TOLERANCE, region.path
        assert [row["region"] for row in tiny.report.since(mark)["eager"]] == [region.path]
        assert "the card fell off" in tiny.report.since(mark)["eager"][0]["reason"]
        again = tiny.report.mark()
        assert distance(tiny.run(), wanted) < TOLERANCE, region.path
        new = new_since(tiny, again)
        aside = [row["region"] for row in new.pop("eager", ())]
        assert not new and aside in ([], ["(whole module)"]), "a latched region is tried again"
        if aside:  # so little of its weight is left that the engine steps aside as a whole
            break
    assert equal_bits(tiny.run(), wanted), "every region is latched, so all of it is eager"


class SlowLowering:
    """Stands for a lowering that takes a minute; `began` says when it is under way, `then` is what it does at last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Callable[..., None] | None = None) -> None:
        self.began, self.release = threading.Event(), threading.Event()
        self._then = then
        monkeypatch.setenv("NEXFORT_WORKERS", "0")
        monkeypatch.setattr(lower, "lower", self._lower)

    def _lower(self, *args: Any) -> None:
        self.began.set()
        self.release.wait(60)
        if self._then is not None:
            return self._then(*args)
        raise lower.LoweringFailed("it was only a test")


@every
def test_cancel_comes_within_a_second_while_lowering(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()

    def cancel() -> None:
        if cancelled.is_set():
            raise Interrupt("cancelled")

    cold = cold_subject(make(host), cancel=cancel)
    slow = SlowLowering(monkeypatch)
    stopped: list[float] = []

    def work() -> None:
        with pytest.raises(Interrupt):
            cold.run()
        stopped.append(time.monotonic())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        assert slow.began.wait(60)
        time.sleep(0.2)
        pressed = time.monotonic()
        cancelled.set()
        thread.join(20)
        assert stopped and stopped[0] - pressed < 1.0
    finally:
        slow.release.set()
    _assert_plain(cold)
    _assert_nothing_left(cold)


def test_cancelled_compile_is_taken_up_again(threads: int) -> None:
    asked = 0

    def cancel() -> None:
        nonlocal asked
        asked += 1
        if asked == 4:  # before each capture and while something is lowered: some of them are under way
            raise Interrupt("cancelled")

    cold = cold_subject(make("torch_dit"), cancel=cancel)
    with pytest.raises(Interrupt):
        cold.run()
    _assert_plain(cold)
    assert cold.same() < TOLERANCE
    assert not cold.report.as_dict()["eager"]


def test_nothing_is_captured_while_a_cancelled_call_is_still_lowered(threads: int) -> None:
    """Without workers both would be at it in one process, where tracing and lowering share torch's own state."""
    cancelled, captured = threading.Event(), threading.Event()

    def cancel() -> None:
        if cancelled.is_set():
            raise Interrupt("cancelled")

    # undone before the graphs are lowered again, or what stands for lowering here would be put back after that
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch:
        lowered, capture = lower.lower, lowering._captured
        slow = SlowLowering(patch, lowered)
        cold = cold_subject(make("torch_dit"), cancel=cancel)
        threading.Thread(target=lambda: (slow.began.wait(60), cancelled.set()), daemon=True).start()
        with pytest.raises(Interrupt):
            cold.run()
        cancelled.clear()
        patch.setattr(lowering, "_captured", lambda job: (captured.set(), capture(job))[1])
        beside = threading.Thread(target=cold.run, daemon=True)
        beside.start()
        assert not captured.wait(1.0), "it was captured while the other was lowered"
        slow.release.set()
        beside.join(60)
        assert captured.is_set() and not beside.is_alive()
        assert cold.same() < TOLERANCE
        found = cold.report.as_dict()
        assert not found["eager"] and found["artefacts_loaded"] == 1, "what was left was lowered again"


# ---- what changes between two runs ----------------------------------------------------------------------------


@with_options
def test_options_added_later_act_as_in_eager(host: str) -> None:
    with graphs_as_they_are():
        cold = graph_subject(host)
        before, wanted = cold.run(), cold.eager()
        for label, edit in cold.tiny.kind.edits.items():
            options: dict[str, Any] = {}
            edit(options)
            edited = cold.eager(options=options)
            assert distance(edited, wanted) > MOVES, f"{label} does not matter to the network"
            for _ in range(2):
                assert distance(cold.run(options=options), edited) < TOLERANCE, label
            mark = cold.report.mark()
            assert equal_bits(cold.run(), before), f"{label} is still felt after it was removed"
            assert not new_since(cold, mark)


@with_options
def test_options_of_the_first_call_bind_no_later_one(host: str) -> None:
    with graphs_as_they_are():
        cold = cold_subject(make(host))
        options: dict[str, Any] = {}
        cold.tiny.kind.edits["override"](options)
        assert distance(cold.eager(options=options), cold.eager()) > MOVES
        assert cold.same(options=options) < TOLERANCE
        assert cold.same() < TOLERANCE
        mark = cold.report.mark()
        assert cold.same(options=options) < TOLERANCE and cold.same(batch=1) < TOLERANCE
        assert not new_since(cold, mark)


@pytest.mark.parametrize("name", names(where=lambda kind: kind.control is not None))
def test_a_controlnet_acts_as_in_eager(tiny: Subject) -> None:
    before = tiny.run()
    assert distance(tiny.eager(control=True), tiny.eager()) > MOVES
    given: list[dict[str, Any]] = []
    for module in (tiny.module, tiny.compiled):
        args, kwargs = tiny.tiny.make_inputs(batch=3, seed=1, control=True)
        with torch.inference_mode():
            result = tensors_of(module(*args, **kwargs))
        given.append({"result": result, "left": {name: len(items) for name, items in kwargs["control"].items()}})
    assert distance(given[1]["result"], given[0]["result"]) < TOLERANCE
    assert given[1]["left"] == given[0]["left"], "networks take items out of the lists, once"
    with graphs_as_they_are():
        assert cold_subject(tiny.tiny).same(control=True) < TOLERANCE, "while it is planned as well"
    assert equal_bits(tiny.run(), before)


def _weights(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for sub in module.modules():
        for name, weight in list(sub._parameters.items()):
            if weight is not None:
                yield sub, name, weight


def _replaced(sub: nn.Module, name: str, value: torch.Tensor) -> None:
    setattr(sub, name, nn.Parameter(value, requires_grad=False))


def _replaced_in_inference_mode(sub: nn.Module, name: str, value: torch.Tensor) -> None:
    with torch.inference_mode():  # as ComfyUI's patcher applies a LoRA
        _replaced(sub, name, value.clone())


def _updated_in_place(sub: nn.Module, name: str, value: torch.Tensor) -> None:
    with torch.no_grad():
        sub._parameters[name].copy_(value)  # type: ignore[union-attr]


def _data_swapped(sub: nn.Module, name: str, value: torch.Tensor) -> None:
    sub._parameters[name].data = value  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change", [_replaced, _replaced_in_inference_mode, _updated_in_place, _data_swapped], ids=lambda c: c.__name__
)
@every
def test_changed_weights_are_honoured_and_cost_nothing(tiny: Subject, change: Callable[..., None]) -> None:
    before, wanted = tiny.run(), tiny.eager()
    originals = [(sub, name, weight, weight.detach().clone()) for sub, name, weight in _weights(tiny.module)]
    mark = tiny.report.mark()
    generator = torch.Generator().manual_seed(5)
    try:
        for sub, name, _, value in originals:
            change(sub, name, value * (1 + 0.3 * torch.randn(value.shape, generator=generator)))
        changed = tiny.eager()
        assert distance(changed, wanted) > MOVES
        assert distance(tiny.run(), changed) < TOLERANCE
    finally:
        for sub, name, weight, value in originals:
            if sub._parameters[name] is weight:
                change(sub, name, value)
            else:
                sub._parameters[name] = weight
    assert equal_bits(tiny.run(), before)
    assert not new_since(tiny, mark)


@every
def test_changed_attribute_of_a_block_is_honoured(host: str) -> None:
    with graphs_as_they_are():
        tiny = graph_subject(host)
        before, wanted = tiny.run(), tiny.eager()
        for sub, name in _numbers(tiny):
            value = getattr(sub, name)
            setattr(sub, name, value + 0.7)
            try:
                changed = tiny.eager()
                if distance(changed, wanted) > MOVES:
                    assert distance(tiny.run(), changed) < TOLERANCE, f"{name} of a {type(sub).__name__}"
                    break
            finally:
                setattr(sub, name, value)
        else:
            pytest.fail("no number that a block reads matters to the network")
        assert equal_bits(tiny.run(), before)


def _numbers(tiny: Subject) -> Iterator[tuple[nn.Module, str]]:
    """The plain floats in the blocks of regions that are there more than once; what forward reads comes first."""
    kinds = [region.kind for region in tiny.engine.regions]
    blocks = [r.module for r in tiny.engine.regions if kinds.count(r.kind) > 1] or [tiny.module]
    found = [(sub, name) for block in blocks for sub in block.modules() for name in ("gain", "eps", "scale")]
    yield from ((sub, name) for sub, name in found if type(vars(sub).get(name)) is float)


def _in_bfloat16(module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[torch.Tensor]:
    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if floating else value

    args, kwargs = call
    with torch.inference_mode():
        return tensors_of(module(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()}))


@every
@pytest.mark.usefixtures("attention_without_amx")
def test_changed_dtype_is_honoured(host: str) -> None:
    with graphs_as_they_are():
        cold = graph_subject(host)
        exact = cold.eager()
        assert distance(cold.run(), exact) < TOLERANCE
        cold.tiny.to(torch.bfloat16)
        rounded = _in_bfloat16(cold.module, cold.tiny.make_inputs())
        with sdpa_kernel(SDPBackend.MATH):
            otherwise = _in_bfloat16(cold.module, cold.tiny.make_inputs())
        found = _in_bfloat16(cold.compiled, cold.tiny.make_inputs())
        assert {t.dtype for t in found} == {t.dtype for t in rounded}
        # the distance rule: two eager runs that differ in the attention kernel alone are the floor
        assert distance(found, rounded) <= 2 * distance(otherwise, rounded)
        assert distance(_floats(found), exact) <= 1.1 * distance(_floats(rounded), exact)
        assert distance(_floats(rounded), exact) > TOLERANCE
        cold.tiny.to(torch.float32)  # the weights stay rounded
        mark = cold.report.mark()
        assert cold.same() < TOLERANCE < distance(cold.eager(), exact)
        assert not new_since(cold, mark) and not cold.report.as_dict()["eager"]


def _floats(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.float() for tensor in tensors]
