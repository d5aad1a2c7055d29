# SPDX-License-Identifier: Apache-2.0
"""How much faster an engine's steps are: of the same work alone, of enough steps, and kept on disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import graphs_as_they_are
from torch import nn

from nexfort_engine.api import wrap_methods
from nexfort_engine.cache import speed_record
from nexfort_engine.cache.store import Store
from nexfort_engine.capture.types import LOCK
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.dispatch import slowdown, speed
from nexfort_engine.dispatch.speed import FIRST, FIRST_EAGER, LEAST
from nexfort_engine.engine import Engine
from nexfort_engine.reporting.speed import current, headline, ratio
from nexfort_engine.runtime.engine_state import HostHooks

pytestmark = pytest.mark.usefixtures("threads")
T = torch.Tensor
X = torch.randn(2, 8)
MADE = 1  # the step that makes artefacts


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


class Clock:
    """How long steps take that begin from now on."""

    def __init__(self) -> None:
        self.seconds = 0.1

    def begin(self, device: torch.device) -> Callable[[], Callable[[], float]]:
        seconds = self.seconds
        return lambda: lambda: seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(slowdown, "begin", found.begin)
    monkeypatch.setattr(speed, "begun", lambda name, work, *args: work(*args))
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h: T) -> T:
        return self.linear(h)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, h: T, text: T | None = None) -> T:
        for block in self.blocks:
            h = block(h)
        return h if text is None else h + text.mean()


def compiled(folder: Path, mode: str | None = None, weights: Callable[[], str | None] = str) -> Any:
    net = Net().eval().requires_grad_(False)
    engine = Engine(net, CompileConfig.parse(mode), Store(folder), hooks=HostHooks(weights_name=weights))
    return wrap_methods(net, engine, ("forward",))


@torch.no_grad()
def run(ours: Any, steps: int, *given: T) -> None:
    for _ in range(steps):
        ours(*(given or (X,)))


def bypassed(ours: Any, steps: int, *given: T) -> None:
    with pytest.MonkeyPatch.context() as without:
        without.setenv("NEXFORT_DISABLE", "1")
        run(ours, steps, *given)


def last(ours: Any) -> Any:
    return current(ours.report.as_dict())


def test_a_ratio_needs_a_few_steps_of_each_and_the_first_do_not_count(tmp_path: Path, clock: Clock) -> None:
    ours = compiled(tmp_path)
    clock.seconds = 9.0
    run(ours, MADE + FIRST)
    clock.seconds = 0.2
    run(ours, LEAST - 1)
    assert last(ours)["compiled"] is None
    run(ours, 1)
    assert last(ours)["compiled"] == pytest.approx(0.2) and ratio(last(ours)) is None
    assert headline(last(ours)).startswith("not measured yet: 0.20 s a step")
    clock.seconds = 9.0
    bypassed(ours, FIRST_EAGER)
    clock.seconds = 0.3
    bypassed(ours, LEAST - 1)
    assert ratio(last(ours)) is None
    bypassed(ours, 1)
    assert ratio(last(ours)) == pytest.approx(1.5) and last(ours)["source"] == speed.BYPASSED
    assert "1.50x faster: 0.20 s a step, was 0.30 s" in str(ours.report)


def test_a_verification_is_a_measurement(tmp_path: Path, clock: Clock) -> None:
    ours = compiled(tmp_path)
    run(ours, MADE + FIRST + LEAST)
    ours.verify_next()
    run(ours, 1)
    assert last(ours)["source"] == speed.VERIFIED and ratio(last(ours)) is not None


def test_no_ratio_is_made_of_steps_of_another_size_batch_type_mode_or_set_of_loras(
    tmp_path: Path, clock: Clock
) -> None:
    weights = [""]
    ours = compiled(tmp_path, weights=lambda: weights[0])
    run(ours, MADE + FIRST + LEAST)
    for given in (torch.randn(3, 8), torch.randn(2, 2, 8), X.double()):
        bypassed(ours, FIRST_EAGER + LEAST, given) if given.dtype == X.dtype else None
        run(ours, 1)
        assert ratio(last(ours)) is None
    weights[0] = "a LoRA"
    bypassed(ours, FIRST_EAGER + LEAST)
    weights[0] = ""
    run(ours, 1)
    assert ratio(last(ours)) is None
    other = compiled(tmp_path, "max-autotune")
    bypassed(other, FIRST_EAGER + LEAST)
    other._nexfort_engine.promise.speed.keep()
    again = compiled(tmp_path)
    run(again, MADE + FIRST + LEAST)
    assert ratio(last(again)) is None


def test_the_length_of_a_prompt_is_no_size(tmp_path: Path, clock: Clock) -> None:
    ours = compiled(tmp_path)
    run(ours, MADE + FIRST + LEAST, X, torch.randn(1, 4, 8))
    bypassed(ours, FIRST_EAGER + LEAST, X, torch.randn(1, 9, 8))
    assert ratio(last(ours)) == pytest.approx(1)
    bypassed(ours, FIRST_EAGER + LEAST, X, torch.randn(1, 9, 8, 8))
    assert ratio(last(ours)) is None, "a picture that goes in has a size"


def test_weights_without_a_name_are_not_told_of(tmp_path: Path, clock: Clock) -> None:
    ours = compiled(tmp_path, weights=lambda: None)
    run(ours, MADE + FIRST + LEAST)
    assert last(ours) is None


def test_steps_beside_a_compiler_say_nothing(tmp_path: Path, clock: Clock) -> None:
    ours = compiled(tmp_path)
    run(ours, MADE + FIRST + LEAST)
    begun, ends = threading.Event(), threading.Event()

    def compiles() -> None:
        with LOCK:
            begun.set()
            ends.wait(60)

    thread = threading.Thread(target=compiles)
    thread.start()
    assert begun.wait(60)
    bypassed(ours, FIRST_EAGER + LEAST)
    assert ratio(last(ours)) is None
    plain = ours._nexfort_engine.promise.without

    def compiled_until_its_end(x: torch.Tensor) -> torch.Tensor:
        ends.set()
        thread.join()
        return x

    plain(compiled_until_its_end, (X,), {})  # nothing is compiled any more when it ends
    bypassed(ours, FIRST_EAGER + LEAST - 1)
    assert ratio(last(ours)) is None
    bypassed(ours, FIRST_EAGER + LEAST)
    assert ratio(last(ours)) == pytest.approx(1)


def test_it_is_kept_over_a_restart_and_adds_up(tmp_path: Path, clock: Clock) -> None:
    first = compiled(tmp_path)
    clock.seconds = 0.2
    bypassed(first, FIRST_EAGER + LEAST)
    first._nexfort_engine.promise.speed.begin_picture()
    clock.seconds = 0.1
    run(first, MADE + FIRST + LEAST)
    line = first._nexfort_engine.promise.speed.end_picture()
    assert line == f"Nexfort: {MADE + FIRST + LEAST} steps of 0.10 s, 2.0x; 1 compiled, 0 loaded"
    again = compiled(tmp_path)
    assert last(again) is None
    run(again, MADE + 1)
    found = last(again)
    assert ratio(found) == pytest.approx(2) and (found["steps"], found["pictures"]) == (LEAST, 1)
    assert found["saved"] == pytest.approx(LEAST * 0.1) and found["made"] > 0 and len(found["recent"]) == 1
    again._nexfort_engine.promise.speed.begin_picture()
    run(again, FIRST + LEAST)
    assert again._nexfort_engine.promise.speed.end_picture().endswith("2.0x; 0 compiled, 0 loaded")
    kept = list(speed_record.read(tmp_path)[0].values())
    assert len(kept) == 1 and kept[0]["pictures"] == 2 and kept[0]["steps"] > LEAST


def test_what_a_run_without_nexfort_showed_is_kept_though_its_model_leaves_memory(tmp_path: Path, clock: Clock) -> None:
    first = compiled(tmp_path)
    run(first, MADE + FIRST + LEAST)
    clock.seconds = 0.2
    bypassed(first, FIRST_EAGER + LEAST)  # such a run has no end that is told
    again = compiled(tmp_path)
    clock.seconds = 0.1
    run(again, MADE + FIRST + LEAST)
    assert ratio(last(again)) == pytest.approx(2) and last(again)["source"] == speed.BYPASSED


def test_a_damaged_record_is_told_in_one_sentence_and_nothing_else_is_lost(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def picture(ours: Any) -> None:
        ours._nexfort_engine.promise.speed.begin_picture()
        run(ours, MADE + FIRST + LEAST)
        ours._nexfort_engine.promise.speed.end_picture()

    picture(compiled(tmp_path))
    file = tmp_path / speed_record.FOLDER / speed_record.FILE
    file.write_text(file.read_text()[:-9])
    with caplog.at_level(logging.INFO, "nexfort"):
        both = [compiled(tmp_path), compiled(tmp_path)]
        for ours in both:
            run(ours, MADE + 1)
    for ours in both:
        told = ours.report.as_dict()
        (note,) = told["notes"]
        assert note.startswith(f"earlier times of steps are lost: {file.name} is damaged and is made anew; to compare")
        assert f"note: {note}" in str(ours.report)
        assert (told["artefacts_compiled"], told["artefacts_loaded"], told["eager"]) == (0, 1, [])
    assert len([record for record in caplog.records if note in record.getMessage()]) == 1
    picture(both[0])
    (kept,), lost = speed_record.read(tmp_path)[0].values(), speed_record.read(tmp_path)[1]
    assert kept["pictures"] == 1 and lost == ""


def test_slower_steps_are_told_with_a_likely_reason(tmp_path: Path, clock: Clock) -> None:
    ours = compiled(tmp_path)
    bypassed(ours, FIRST_EAGER + LEAST)
    clock.seconds = 0.2
    run(ours, MADE + FIRST + LEAST)
    assert last(ours)["reason"]
    assert headline(last(ours)).startswith("slower here: 0.5x: 0.20 s a step, was 0.10 s (bypassed, ")


def test_a_picture_without_enough_steps_tells_how_many_it_had(tmp_path: Path, clock: Clock) -> None:
    ours = compiled(tmp_path)
    watch = ours._nexfort_engine.promise.speed
    watch.begin_picture()
    run(ours, 2)
    assert watch.end_picture() == "Nexfort: 2 steps, not measured yet; 1 compiled, 0 loaded"
    watch.begin_picture()
    assert watch.end_picture() is None is watch.end_picture()


def test_a_step_is_not_kept_waiting_by_the_disk(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[str] = []
    monkeypatch.setattr(speed, "begun", lambda name, work, *args: written.append(name) or "no threads")
    monkeypatch.setattr(speed, "KEEP_EVERY", 0.0)
    ours = compiled(tmp_path)
    with caplog.at_level(logging.DEBUG, "nexfort"):
        run(ours, MADE + FIRST + 1)
    assert written and any("no threads" in record.message for record in caplog.records)
    assert speed_record.read(tmp_path) == ({}, "")


def test_words_of_a_headline() -> None:
    now = time.time()
    row = speed_record.blank(compiled=2.7, compiled_at=now, eager=4.7, eager_at=now, source="this workflow")
    row |= {"saved": 240.0, "pictures": 31, "made": 22.0}
    at = time.strftime("%H:%M", time.localtime(now))
    assert headline(row) == (
        f"1.74x faster: 2.70 s a step, was 4.70 s (this workflow, {at}) - saved 4 min in 31 pictures - compiled once "
        "in 22 s"
    )
    assert headline({**row, "eager": 2.7, "saved": 0, "made": 0}).startswith("about as fast, 1.00x: 2.70 s")
    assert headline({**row, "compiled": None}) == "not measured yet"
