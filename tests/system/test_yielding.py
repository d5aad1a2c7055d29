# SPDX-License-Identifier: Apache-2.0
"""A thread that makes artefacts lets those that run steps go first, and goes on where they wait or had their share."""

from __future__ import annotations

import gc
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.fx.graph import Graph

from nexfort_engine.system import yielding


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of another test is watched."""
    monkeypatch.setattr(yielding, "_steps", {})
    monkeypatch.setattr(yielding, "_looks", yielding._Looks())


@contextmanager
def stepping(work: Callable[[threading.Event], Any]) -> Iterator[None]:
    """A thread that runs steps, which are this work, until the block ends."""
    ended, begun = threading.Event(), threading.Event()

    def run() -> None:
        yielding.runs_a_step()
        begun.set()
        work(ended)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(10)
    try:
        yield
    finally:
        ended.set()
        thread.join(10)


def computes(ended: threading.Event) -> None:
    def one() -> None:
        sum(range(20))

    calls = "\n".join(500 * ["one()"])  # as many places as a network has operators
    step = types.FunctionType(compile(calls, __file__, "exec"), {"one": one})
    while not ended.is_set():
        step()


def seconds(looks: int) -> float:
    """How long so many looks take, each after a burst."""
    taken = 0.0
    for _ in range(looks):
        time.sleep(yielding.BURST)
        began = time.perf_counter()
        yielding.give_way()
        taken += time.perf_counter() - began
    return taken


def test_it_waits_for_a_thread_that_computes_but_not_for_ever() -> None:
    with yielding.beside_steps(), stepping(computes):
        taken = seconds(4)
    assert 4 * yielding.QUIET < taken < 5


def test_it_goes_on_where_the_thread_waits() -> None:
    with yielding.beside_steps(), stepping(lambda ended: ended.wait(30)):
        time.sleep(0.05)
        seconds(2)  # which see that it does not move
        assert seconds(20) < 20 * yielding.QUIET


def test_it_waits_for_nobody_where_no_steps_run_or_steps_wait_for_it() -> None:
    with yielding.beside_steps():
        assert seconds(20) < 20 * yielding.QUIET
    with stepping(computes):
        assert seconds(20) < 1.0, "it is not beside steps"


def test_a_thread_that_ran_no_step_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "_WATCHED", 0.0)
    with yielding.beside_steps(), stepping(computes):
        time.sleep(0.01)
        yielding.give_way()
        assert not yielding._steps


def test_settings_and_torch_are_put_back() -> None:
    before = sys.getswitchinterval(), Graph.create_node
    with pytest.raises(ZeroDivisionError), yielding.beside_steps():
        assert sys.getswitchinterval() == pytest.approx(yielding.INTERVAL)
        assert Graph.create_node is not before[1]
        Graph().create_node("placeholder", "x")
        raise ZeroDivisionError
    assert (sys.getswitchinterval(), Graph.create_node) == before


def test_what_is_shorter_already_stays() -> None:
    before = sys.getswitchinterval()
    with yielding.switching_within(1e-4):
        with yielding.switching_within(1e-2):
            assert sys.getswitchinterval() == pytest.approx(1e-4, abs=3e-6)  # Python keeps whole microseconds
        assert sys.getswitchinterval() == pytest.approx(1e-4, abs=3e-6)
    assert sys.getswitchinterval() == before


def test_a_trace_stops_at_each_of_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(yielding._looks, "give_way", lambda: looked.append(1))
    with yielding.beside_steps():
        Graph().create_node("placeholder", "x")
    Graph().create_node("placeholder", "x")
    assert looked == [1]


def test_looking_holds_on_to_nothing_of_the_threads_that_run_steps() -> None:
    """No garbage is collected while a block is traced: what a look left behind would stay, with tensors of steps."""

    class Held:
        """What a function of a step holds."""

    refs: list[weakref.ref[Held]] = []

    def one() -> None:
        held = Held()
        refs.append(weakref.ref(held))
        time.sleep(0.001)

    def work(ended: threading.Event) -> None:
        while not ended.is_set():
            one()

    gc.collect()
    gc.disable()
    try:
        with stepping(work):
            for _ in range(100):
                yielding._places(time.monotonic())
                time.sleep(0.001)
        assert len(refs) > 10 and not [ref for ref in refs if ref() is not None]
    finally:
        gc.enable()
