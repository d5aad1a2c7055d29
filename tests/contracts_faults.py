# SPDX-License-Identifier: Apache-2.0
"""The promises about faults: an error, a region that fails, a step that is cancelled, over tiny backbones.

What contracts have in common is said in contracts.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backbones import make
from subjects import (
    TOLERANCE,
    Subject,
    assert_nothing_left,
    assert_plain,
    cold_subject,
    distance,
    equal_bits,
    every,
    graphs_as_they_are,
    new_since,
)

from nexfort_engine.compilation import jobs
from nexfort_engine.lowering import inductor

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")


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
    assert_plain(tiny)
    assert_nothing_left(tiny)
    used = [binding for region in tiny.engine.regions for binding in region.bindings]
    code, used[-1].code = used[-1].code, _fail_with(Interrupt("cancelled"))
    with pytest.raises(Interrupt):
        tiny.run()
    used[-1].code = code
    assert_plain(tiny)
    assert_nothing_left(tiny)
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
        monkeypatch.setattr(inductor, "lower", self._lower)

    def _lower(self, *args: Any) -> None:
        self.began.set()
        self.release.wait(60)
        if self._then is not None:
            return self._then(*args)
        raise inductor.LoweringFailed("it was only a test")


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
    assert_plain(cold)
    assert_nothing_left(cold)


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
    assert_plain(cold)
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
        lowered, capture = inductor.lower, jobs._captured
        slow = SlowLowering(patch, lowered)
        cold = cold_subject(make("torch_dit"), cancel=cancel)
        threading.Thread(target=lambda: (slow.began.wait(60), cancelled.set()), daemon=True).start()
        with pytest.raises(Interrupt):
            cold.run()
        cancelled.clear()
        patch.setattr(jobs, "_captured", lambda job: (captured.set(), capture(job))[1])
        beside = threading.Thread(target=cold.run, daemon=True)
        beside.start()
        assert not captured.wait(1.0), "it was captured while the other was lowered"
        slow.release.set()
        beside.join(60)
        assert captured.is_set() and not beside.is_alive()
        assert cold.same() < TOLERANCE
        found = cold.report.as_dict()
        assert not found["eager"] and found["artefacts_loaded"] == 1, "what was left was lowered again"
