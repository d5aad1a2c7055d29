# SPDX-License-Identifier: Apache-2.0
"""Artefacts made beside the steps: what runs meanwhile is eager to the bit, and then compiled code takes over."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backbones import make
from large_rows import few
from subjects import Subject, ask_instead, distance, equal_bits, graphs_as_they_are

import nexfort_engine
from nexfort_engine.cache.store import Store
from nexfort_engine.compilation import background
from nexfort_engine.compilation.background import NOTE, PHASE
from nexfort_engine.compilation.builder import Builder
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.lowering import inductor, worker_pool
from nexfort_engine.reporting import progress
from nexfort_engine.runtime import artifact

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
OPTIONS = {"options": {"compile.background": True}}
BLOCKS = {"blocks.0", "blocks.1", "final"}


class Gate:
    """Lowering stands still until it is opened; `began` says that it got there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.began, self.opened = threading.Event(), threading.Event()
        own = inductor.lower

        def slow(*args: Any) -> None:
            if threading.current_thread() is not threading.main_thread():  # where newer torch is tried out first
                self.began.set()
                assert self.opened.wait(60)
            own(*args)

        patch.setattr(inductor, "lower", slow)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Inside the test graphs run as they are, nothing is stored yet, and lowering waits."""
    tmp_path.chmod(0o700)
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch:  # in this order, so that each puts back its own
        patch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
        made = Gate(patch)
        yield made
        made.opened.set()


def subject(options: Any = OPTIONS) -> Subject:
    tiny = make("torch_dit")
    return Subject(tiny, nexfort_engine.compile(tiny.module, options=options))


def ran(tiny: Subject, patch: pytest.MonkeyPatch) -> int:
    """How many artefacts run in one call."""
    seen = []
    own = artifact.Binding.run
    with patch.context() as inner:
        inner.setattr(artifact.Binding, "run", lambda self, *rest: (seen.append(self), own(self, *rest))[1])
        tiny.run()
    return len(seen)


def finish(tiny: Subject, gate: Gate) -> None:
    gate.opened.set()
    background = tiny.engine.builder.background
    assert background is not None and background.join(60)


def test_steps_run_eager_until_all_is_there(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = subject()
    assert equal_bits(tiny.run(), tiny.eager_before), "the first step waits for nothing"
    assert gate.began.wait(60)
    for _ in range(2):
        assert ran(tiny, monkeypatch) == 0
        assert equal_bits(tiny.run(seed=1), tiny.eager(seed=1))
    told = tiny.report.as_dict()
    assert told["notes"].count(NOTE) == 1 and not told["eager"], "it is not for good"
    finish(tiny, gate)
    assert distance(tiny.run(), tiny.eager_before) < 1e-4
    told = tiny.report.as_dict()
    assert told["artefacts_compiled"] > 2 and not told["eager"] and not told["variants"]
    assert ran(tiny, monkeypatch) == len(told["regions"]) > told["artefacts_compiled"]
    mark = tiny.report.mark()
    for call in ({"batch": 1}, {"batch": 3, "size": (8, 4), "length": 5}):
        assert tiny.same(**call) < 1e-4
    assert not tiny.report.since(mark)["artefacts"], "what the background made serves every size"


@pytest.mark.parametrize("then", ["nothing", "another", "the same"])
def test_it_begins_when_the_host_has_done_its_work_or_soon(
    then: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_REST", 0.5 if then == "the same" else 600)
    asked, begun, own = threading.Event(), threading.Event(), Builder._make_planned
    monkeypatch.setattr(Builder, "_make_planned", lambda *given: (begun.set(), own(*given))[1])
    tiny, work = subject(), [1]
    ask_instead(monkeypatch, tiny.engine, works_on=lambda: (asked.set(), work[0] if work else None)[1])
    tiny.run()
    assert asked.wait(60) and not begun.wait(0.2)
    if then != "the same":
        work[:] = [2] if then == "another" else []
    assert begun.wait(60)
    finish(tiny, gate)


def test_a_process_that_ends_has_it_stop_between_two_artefacts(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_ending", threading.Event())
    monkeypatch.setattr(worker_pool, "count_for", lambda *_: 0)
    tiny = subject()
    tiny.run()
    assert gate.began.wait(60)
    thread = next(thread for thread in threading.enumerate() if thread.name == "nexfort-background")
    opener = threading.Timer(0.2, gate.opened.set)
    opener.start()
    background._end_all(os.getpid())
    assert not thread.is_alive()
    made = tiny.report.as_dict()["artefacts_compiled"]
    assert made < 3, "what was begun is finished, and nothing more is begun"
    background._ending.clear()
    assert equal_bits(tiny.run(), tiny.eager_before)
    finish(tiny, gate)
    assert tiny.same() < 1e-4 and tiny.report.as_dict()["artefacts_compiled"] > 2


def test_a_step_is_eager_to_its_end(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """What becomes ready in the middle of a step waits for the next one."""
    tiny = subject()
    tiny.run()
    assert gate.began.wait(60)
    blocks = [region for region in tiny.engine.regions if region.path.startswith("blocks.")]
    own = blocks[0].run_own_forward

    def run_own_forward(*args: Any) -> Any:
        finish(tiny, gate)
        return own(*args)

    monkeypatch.setattr(blocks[0], "run_own_forward", run_own_forward)
    assert ran(tiny, monkeypatch) == 0
    monkeypatch.undo()
    assert equal_bits(tiny.eager(), tiny.eager_before)


def test_what_is_stored_is_loaded_at_once(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.opened.set()
    subject(None).run()  # the usual way; which way it is does not shape an artefact
    tiny = subject()
    assert ran(tiny, monkeypatch) > 2
    told = tiny.report.as_dict()
    assert told["artefacts_loaded"] > 2 and not told["artefacts_compiled"] and NOTE not in told["notes"]


def test_two_models_do_not_wait_for_each_other(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    first = subject()
    first.run()
    assert gate.began.wait(60)
    second = Subject(made := make("torch_dit", depth=3), nexfort_engine.compile(made.module, options=OPTIONS))
    assert equal_bits(second.run(), second.eager_before), "it would wait for the gate"
    finish(first, gate)
    second.run()
    finish(second, gate)
    assert ran(first, monkeypatch) and ran(second, monkeypatch)


def test_the_host_s_cancel_is_left_to_the_steps(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, asked = subject(), set()
    ask_instead(monkeypatch, tiny.engine, cancel=lambda: asked.add(threading.current_thread().name))
    tiny.run()
    finish(tiny, gate)
    tiny.run()
    assert asked == {threading.current_thread().name}


def test_where_the_background_fails_once_it_makes_what_is_missing(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.opened.set()
    tiny = subject()
    with monkeypatch.context() as patch:
        patch.setattr(Builder, "_lower", lambda *_: 1 / 0)
        assert equal_bits(tiny.run(), tiny.eager_before)
        finish(tiny, gate)
    assert "ZeroDivisionError" in tiny.report.as_dict()["notes"][-1]
    assert equal_bits(tiny.run(), tiny.eager_before), "it is the background that tries again, and not the step"
    finish(tiny, gate)
    assert ran(tiny, monkeypatch) > 2 and tiny.report.as_dict()["artefacts_compiled"] > 2


def test_where_the_background_fails_again_steps_are_eager_with_the_reason(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.opened.set()
    tiny, made = subject(), []
    monkeypatch.setattr(Builder, "_lower", lambda *_: (made.append(threading.current_thread().name), 1 / 0))
    for _ in range(4):
        assert equal_bits(tiny.run(), tiny.eager_before)
        finish(tiny, gate)
    assert made == ["nexfort-background"] * 2
    eager = tiny.report.as_dict()["eager"]
    assert {row["region"] for row in eager} >= BLOCKS
    assert all("background failed: ZeroDivisionError" in row["reason"] for row in eager)


@pytest.mark.parametrize("fails", few(["compiler", "disk", "workers", "memory"], ("compiler", "memory")))
def test_a_failure_while_it_makes_one_leaves_steps_eager_with_the_reason(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    gate.opened.set()
    tiny = subject()
    if fails == "compiler":
        monkeypatch.setattr(inductor, "lower", lambda *_: 1 / 0)
        told = "ZeroDivisionError"
    elif fails == "disk":
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(Store, "commit", lambda *_, **__: raised(full))
        told = os.strerror(errno.ENOSPC)
    elif fails == "memory":
        monkeypatch.setattr(Builder, "_capture", lambda *_: raised(torch.OutOfMemoryError("no memory")))
        told = "no memory"
    else:
        monkeypatch.setattr(worker_pool, "count_for", lambda *_: 2)
        monkeypatch.setattr(worker_pool, "taken", lambda *_: raised(worker_pool.NoWorkers("none is to be had")))
        told = "none is to be had"
    for _ in range(6):
        assert equal_bits(tiny.run(), tiny.eager_before) or fails == "workers"
        finish(tiny, gate)
    found = tiny.report.as_dict()
    if fails == "workers":
        assert found["artefacts_compiled"] > 2 and ran(tiny, monkeypatch) > 2
        assert any(told in note for note in found["notes"])
    else:
        assert found["eager"] and all(told in row["reason"] for row in found["eager"])
        assert {row["region"] for row in found["eager"]} >= BLOCKS


def test_the_report_says_while_it_compiles(gate: Gate) -> None:
    tiny = subject()
    assert not tiny.report.is_making
    tiny.run()
    assert gate.began.wait(60)
    assert tiny.report.as_dict()["compiling_beside"] and "compiling in the background" in str(tiny.report)
    finish(tiny, gate)
    assert not tiny.report.as_dict()["compiling_beside"] and "compiling in" not in str(tiny.report)


def test_progress_says_that_nobody_waits(gate: Gate) -> None:
    tiny, heard = subject(), list[progress.Event]()
    with progress.use_sink(heard.append):
        tiny.run()
    finish(tiny, gate)
    assert heard and all(event.phase == PHASE and "in the background" in event.text for event in heard)
    assert heard[-1].done == heard[-1].total


def raised(error: BaseException) -> Any:
    raise error


def test_a_verified_step_waits_for_what_there_is_to_verify(gate: Gate) -> None:
    tiny = subject()
    tiny.engine.verify_next()
    tiny.run()
    assert not tiny.report.verifications
    finish(tiny, gate)
    tiny.run()
    assert tiny.report.as_dict()["verifications"][0]["regions"]


def test_what_the_plan_does_not_see_is_made_once(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that the planned ones do not cover, because the plan leaves options of others out."""
    gate.opened.set()
    tiny = subject()
    own, planned = tiny.engine.builder.planner.calls, []

    def calls(session: Any) -> Any:
        planned.append(1)
        return [wanted for wanted in own(session) if not wanted.region.path.startswith("blocks.")]

    monkeypatch.setattr(tiny.engine.builder.planner, "calls", calls)
    for _ in range(8):
        tiny.run()
        finish(tiny, gate)
    assert ran(tiny, monkeypatch) == len(tiny.report.as_dict()["regions"]) and len(planned) < 6
    assert not tiny.report.as_dict()["eager"]


def test_a_capture_that_fails_for_what_may_pass_is_tried_again(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.opened.set()
    tiny = subject()
    with monkeypatch.context() as patch:
        patch.setattr(Builder, "_capture", lambda *_: 1 / 0)
        tiny.run()
        finish(tiny, gate)
    assert not tiny.report.as_dict()["eager"]
    tiny.run()
    finish(tiny, gate)
    assert ran(tiny, monkeypatch) > 2 and not tiny.report.as_dict()["eager"]


def test_without_dynamic_it_has_no_effect_and_says_so() -> None:
    config = CompileConfig.parse({**OPTIONS, "dynamic": False})
    assert not config.background and "one by one" in config.inactive()[0]["reason"]
    searching = CompileConfig.parse({**OPTIONS, "mode": "max-autotune"})
    assert not searching.background and "measures kernels" in searching.inactive()[0]["reason"]
    assert CompileConfig.parse(OPTIONS).lowering_key() == CompileConfig.parse(None).lowering_key()
