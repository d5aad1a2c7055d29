# SPDX-License-Identifier: Apache-2.0
"""Lists of objects that live, read by one thread while another adds to them."""

from __future__ import annotations

import gc
import sys
import threading

from nexfort_engine.system.live_objects import LiveObjects


class _Thing:
    pass


def test_it_lists_those_that_live() -> None:
    held: LiveObjects[_Thing] = LiveObjects()
    kept = [_Thing(), _Thing()]
    for thing in kept:
        held.add(thing)
    assert set(held.listed()) == set(kept)
    del thing
    kept.pop()
    gc.collect()
    assert held.listed() == kept


def test_it_is_listed_while_another_thread_adds() -> None:
    held, kept, ended = LiveObjects[_Thing](), [_Thing() for _ in range(20_000)], threading.Event()

    def add() -> None:
        for thing in kept:
            held.add(thing)
        ended.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=add)
    try:
        thread.start()
        while not ended.is_set():
            held.listed()
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert len(held.listed()) == len(kept)
