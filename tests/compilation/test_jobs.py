# SPDX-License-Identifier: Apache-2.0
"""In which order a batch is captured, lowered and handed over, and what a cancel leaves.

Workers that are done at once stand in the places of processes; test_worker_pool.py has those.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nexfort_engine.cache import compile_times
from nexfort_engine.compilation import jobs
from nexfort_engine.compilation.jobs import Job, lower_all
from nexfort_engine.lowering import worker_pool
from nexfort_engine.reporting.progress import Event, use_sink


class Batch:
    """Three artefacts: what happens, in its order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.results: dict[str, str] = {}  # of lowering: "stored", "kept here" or a failure
        self.jobs = [self._job(name) for name in "abc"]

    def _job(self, name: str) -> Job:
        def capture() -> Any:
            self.events.append(f"capture {name}")
            return SimpleNamespace(modules=[]), {}

        store: Any = SimpleNamespace(root=Path())
        done = lambda job: self.events.append(f"done {name}")  # noqa: E731
        return Job(name, capture, store, name, "cpu", done=done, more=lambda *_: [])

    def submit(self, job: Job, *_: Any) -> None:
        result = self.results.get(job.name, "stored")
        if result in ("stored", "kept here"):
            entry: Any = SimpleNamespace(persistent=result == "stored")
            job.entry = entry
        else:
            job.problem = result
        job.finished.set()

    def run(self, cancel: Any = lambda: None) -> list[str]:
        lower_all(self.jobs, lambda _: {}, cancel)
        return self.events


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Batch:
    made = Batch()
    monkeypatch.setattr(worker_pool, "count_for", lambda *_: 1)
    monkeypatch.setattr(worker_pool, "taken", lambda *_: contextlib.nullcontext(object()))
    monkeypatch.setattr(jobs, "_submit", made.submit)
    return made


def test_artefacts_are_loaded_when_all_are_captured(batch: Batch) -> None:
    """The thread that captures has no time for it before; workers wait for what it gives them."""
    assert batch.run() == [*(f"capture {name}" for name in "abc"), *(f"done {name}" for name in "abc")]


@pytest.mark.parametrize("result", ["lowering it failed: why", "kept here"])
def test_what_nobody_would_find_again_is_told_at_once(result: str, batch: Batch) -> None:
    """A failure would be tried again, and what is not on disk made again, if the host cancelled."""
    batch.results["a"] = result
    assert batch.run() == ["capture a", "done a", "capture b", "capture c", "done b", "done c"]


def test_who_watches_is_told_as_soon_as_one_is_ready(batch: Batch) -> None:
    with use_sink(lambda event: _noted(batch, event)):
        batch.run()
    assert batch.events.index("1 of 3") < batch.events.index("capture b")
    assert [event for event in batch.events if event.endswith("of 3")][-1] == "3 of 3"


def _noted(batch: Batch, event: Event) -> None:
    batch.events.append(f"{event.done} of {event.total}")


def test_how_long_a_batch_took_is_remembered_by_its_work_and_told_of_the_next(batch: Batch, tmp_path: Path) -> None:
    store: Any = SimpleNamespace(root=tmp_path)
    told: list[Event] = []

    def slow() -> Any:
        time.sleep(0.01)
        return SimpleNamespace(modules=[]), {}

    for turn in range(2):
        batch.jobs = [replace(job, store=store, finished=threading.Event(), seconds=0.0) for job in batch.jobs]
        named = {job.name: {"family": "Flux", "mode": "O2", "kind": f"Kind{job.name}"} for job in batch.jobs}
        batch.jobs = [replace(job, capture=slow, **named[job.name]) for job in batch.jobs]
        with use_sink(told.append):
            batch.run()
        for _ in range(100):  # it is written beside what the batch is for
            known = compile_times.read(tmp_path)
            if len(known.get("Flux O2 cpu: Kinda, Kindb, Kindc", ())) == turn + 1:
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"it is not remembered: {known}")
    lefts = [event.seconds_left for event in told if 0 < event.done < event.total]
    assert len(lefts) > 2 and lefts[0] is None and lefts[-1] is not None, lefts


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("last", ["capture b", "capture c", "done a"])
def test_a_cancel_is_seen_before_each_capture_and_before_each_is_loaded(last: str, batch: Batch) -> None:
    def cancel() -> None:
        if last in batch.events:
            raise _Stopped

    with pytest.raises(_Stopped):
        batch.run(cancel)
    assert batch.events[-1] == last
