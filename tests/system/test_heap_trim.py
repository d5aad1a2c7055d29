# SPDX-License-Identifier: Apache-2.0
"""Memory of the C library's heap goes back to the system after steps of new sizes, and not after others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from net_pairs import Net, Pair
from subjects import graphs_as_they_are

from nexfort_engine.system import heap_trim

# Blocks of a heap, of which some stay: what is free between them is no whole that the C library gives back by itself.
PIECES = """
import ctypes, json
from nexfort_engine.system import heap_trim as heap
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
begin, size = resident(), 100_000
blocks = [c.malloc(size) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, size)
full = resident()
for number, block in enumerate(blocks):
    if number % 10:
        c.free(block)
free = resident()
heap.give_back(True)
print(json.dumps({"full": full - begin, "free": free - begin, "given_back": resident() - begin}))
"""


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the C library was told to keep, for each time that it was asked; the clock stands still until it is set."""
    asked: list[int] = []
    monkeypatch.setattr(heap_trim, "_trim", lambda: asked.append)
    monkeypatch.setattr(heap_trim, "_due", 0.0)
    monkeypatch.setattr(heap_trim, "_wanted", 0)
    monkeypatch.setattr(heap_trim, "_SECONDS", 0.0)
    return asked


@pytest.mark.skipif(heap_trim._trim() is None, reason="the C library is not glibc")
def test_free_pieces_between_others_are_given_back() -> None:
    found = subprocess.run([sys.executable, "-c", PIECES], capture_output=True, text=True, check=True)
    told = json.loads(found.stdout)
    assert told["free"] > 0.8 * told["full"] > 0, "the library keeps them by itself"
    assert told["given_back"] < 0.4 * told["full"]


def test_it_is_done_after_the_first_steps_of_new_sizes_only(times: list[int], tmp_path: Path) -> None:
    with graphs_as_they_are():
        pair = Pair(Net(), tmp_path)
        counts = []
        for length in (3, 3, 3, 5, 3, 5, 3, 7):
            with torch.no_grad():
                pair.compiled(torch.ones(2, length, 8))
            counts.append(len(times))
    assert counts == [1, 2, 2, 3, 4, 4, 4, 5]


def test_it_takes_a_small_part_of_the_time_and_is_done_later(times: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def trim(keep: int) -> None:
        times.append(keep)
        now[0] += 0.2

    for clock in ("monotonic", "thread_time"):
        monkeypatch.setattr(heap_trim.time, clock, lambda: now[0])
    monkeypatch.setattr(heap_trim, "_SECONDS", 1.0)
    monkeypatch.setattr(heap_trim, "_trim", lambda: trim)
    for _ in range(100):  # steps of 0.1 s
        heap_trim.give_back(True)
        now[0] += 0.1
    done = len(times)
    assert 2 <= done <= 5
    for _ in range(100):
        heap_trim.give_back(False)
        now[0] += 0.1
    assert len(times) == done + 2, "for the last step of a new size"


def test_another_c_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_trim, "_trim", lambda: None)
    heap_trim.give_back(True)
