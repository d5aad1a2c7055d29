# SPDX-License-Identifier: Apache-2.0
"""Progress: what the user reads, who hears it, and that hearing it never breaks a compile."""

from __future__ import annotations

import builtins
import io
import logging
import threading

import pytest

from nexfort_engine.reporting.progress import Event, TerminalSink, Tracker, sink, use_sink


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


EVEN = [[float(second) for second in range(1, 15)]]  # a compile that was done with a block each second


def test_the_text_is_the_promised_one():
    clock = _Clock()
    tracker = Tracker(14, clock=clock, earlier=EVEN)
    assert tracker.text() == "Nexfort: 0 of 14 blocks"
    for _ in range(5):
        assert "left" not in tracker.text(), "no time is told before a third is done"
        clock.now += 1.1
        tracker.step("blocks", 1.1)
    assert tracker.text() == "Nexfort: 5 of 14 blocks, about 10 s left"
    assert tracker.ends == pytest.approx([1.1, 2.2, 3.3, 4.4, 5.5])


def test_without_an_earlier_compile_no_time_is_told():
    clock = _Clock()
    tracker = Tracker(2, clock=clock)
    clock.now += 10
    tracker.step("blocks", 10.0)
    assert tracker.text() == "Nexfort: 1 of 2 blocks" and tracker.event().seconds_left is None
    tracker.step("blocks", 0.1)
    assert tracker.event().seconds_left == 0.0


def test_the_estimate_counts_down_between_steps():
    clock = _Clock()
    tracker = Tracker(2, clock=clock, earlier=[[10.0, 20.0]])
    clock.now += 10
    tracker.step("blocks", 40.0)  # of work, on several workers
    assert tracker.event().seconds_left == pytest.approx(10.0)
    clock.now += 4
    assert tracker.event().seconds_left == pytest.approx(6.0)
    clock.now += 100
    assert tracker.event().seconds_left == 0.0
    assert tracker.text() == "Nexfort: 1 of 2 blocks, about 1 s left"


def test_long_waits_are_told_in_minutes():
    clock = _Clock()
    tracker = Tracker(3, clock=clock, earlier=[[100.0, 200.0, 300.0]])
    clock.now += 100
    tracker.step("blocks", 100)
    assert tracker.text() == "Nexfort: 1 of 3 blocks, about 3 min left"


def test_the_end_has_no_estimate_and_more_steps_than_announced_are_fine():
    tracker = Tracker(1)
    tracker.step("a", 0.1)
    assert tracker.text() == "Nexfort: 1 of 1 blocks"
    tracker.step("b", 0.1)
    assert tracker.text() == "Nexfort: 2 of 2 blocks"
    tracker.add(2)
    assert tracker.text() == "Nexfort: 2 of 4 blocks"
    with pytest.raises(ValueError, match="total is -1"):
        Tracker(-1)


def test_the_sink_hears_every_state_in_order():
    heard: list[Event] = []
    with use_sink(heard.append), Tracker(2, phase="loading") as tracker:
        tracker.step("a", 0.1)
        tracker.tick()
        tracker.step("b", 0.1)
    assert [(e.done, e.total, e.phase) for e in heard] == [(n, 2, "loading") for n in (0, 1, 1, 2)]
    assert heard[0].seconds_left is None and heard[-1].seconds_left == 0.0
    assert sink.get() is None


def test_nothing_to_do_says_nothing(caplog):
    heard: list[Event] = []
    with caplog.at_level(logging.INFO), use_sink(heard.append), Tracker(0):
        pass
    assert not heard and not caplog.records


def test_sinks_nest_and_are_restored_after_an_error():
    def outer(event: Event) -> None: ...

    with use_sink(outer):
        with pytest.raises(RuntimeError), use_sink(None):
            assert sink.get() is None
            raise RuntimeError
        assert sink.get() is outer
    assert sink.get() is None


def test_steps_of_worker_threads_reach_the_sink_of_the_maker_only():
    heard: list[Event] = []
    with use_sink(heard.append), Tracker(40) as tracker:
        threads = [threading.Thread(target=lambda: [tracker.step("x", 0.0) for _ in range(10)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert tracker.event().done == 40 and len(heard) == 41
    assert [e.done for e in heard] == sorted(e.done for e in heard)

    seen_elsewhere = []
    with use_sink(heard.append):
        thread = threading.Thread(target=lambda: seen_elsewhere.append(sink.get()))
        thread.start()
        thread.join()
    assert seen_elsewhere == [None]


def test_a_sink_may_ask_the_tracker():
    texts: list[str] = []
    with use_sink(lambda event: texts.append(tracker.text())):
        tracker = Tracker(1)
        tracker.step("a", 0.1)
    assert texts == ["Nexfort: 1 of 1 blocks"]


def test_a_broken_sink_is_dropped_with_its_reason_and_the_work_goes_on(caplog):
    def broken(event: Event) -> None:
        raise OSError("terminal gone")

    with caplog.at_level(logging.WARNING), use_sink(broken), Tracker(2) as tracker:
        tracker.step("a", 0.1)
        tracker.step("b", 0.1)
    assert tracker.event().done == 2
    assert [r.getMessage() for r in caplog.records] == [
        "Nexfort: progress display failed (OSError: terminal gone); going on without it"
    ]


def test_a_cancel_from_the_sink_passes_through():
    class Cancelled(BaseException):
        pass

    def cancel(event: Event) -> None:
        if event.done:
            raise Cancelled

    with pytest.raises(Cancelled), use_sink(cancel), Tracker(2) as tracker:
        tracker.step("a", 0.1)
        raise AssertionError("not reached")


def test_one_log_line_at_the_start_and_one_at_the_end(caplog):
    clock = _Clock()
    with caplog.at_level(logging.INFO), Tracker(2, clock=clock) as tracker:
        clock.now += 1.5
        tracker.step("a", 1.0)
        tracker.step("b", 2.0)
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(KeyError),
        Tracker(2, phase="loading", clock=clock) as tracker,
    ):
        raise KeyError
    assert [r.getMessage() for r in caplog.records] == [
        "Nexfort: compiling 2 blocks",
        "Nexfort: compiling done, 2 of 2 blocks in 1.5 s (3.0 s of work)",
        "Nexfort: loading 2 blocks",
        "Nexfort: loading stopped by KeyError, 0 of 2 blocks in 0.0 s (0.0 s of work)",
    ]


def test_terminal_sink_prints_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    with TerminalSink(stream) as show, use_sink(show), Tracker(1) as tracker:
        tracker.tick()
        tracker.step("a", 0.1)
    assert stream.getvalue().splitlines() == ["Nexfort: 0 of 1 blocks", "Nexfort: 1 of 1 blocks"]


def test_terminal_sink_draws_a_bar_on_a_terminal():
    pytest.importorskip("tqdm")
    stream = _Terminal()
    with TerminalSink(stream) as show, use_sink(show), Tracker(2) as tracker:
        tracker.step("a", 0.1)
        assert "Nexfort: 1 of 2 blocks" in stream.getvalue() and "\r" in stream.getvalue()
        tracker.step("b", 0.1)


def test_terminal_sink_does_without_tqdm(monkeypatch):
    real = builtins.__import__

    def without_tqdm(name, *args, **kwargs):
        if name == "tqdm":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tqdm)
    stream = _Terminal()
    TerminalSink(stream)(Event(1, 2, None, "Nexfort: 1 of 2 blocks", "compiling"))
    assert stream.getvalue() == "Nexfort: 1 of 2 blocks\n"
