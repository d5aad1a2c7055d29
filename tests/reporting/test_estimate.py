# SPDX-License-Identifier: Apache-2.0
"""How long a compile still takes, tried on compiles that were recorded: nothing here is timed on this machine.

recorded_compiles.json holds what tools/record_compiles.py wrote: the moments at which each block was done, of tiny
networks of several families, each compiled several times, on two cores that had other work too. Nothing was stored,
but most of them found parts in Inductor's own cache. The exponents of the formula were chosen by the same compiles.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from nexfort_engine.reporting.estimate import seconds_left
from nexfort_engine.reporting.progress import Tracker

RECORDED: dict[str, list[list[float]]] = json.loads(
    (Path(__file__).parent / "recorded_compiles.json").read_text(encoding="utf-8")
)
ON_AVERAGE = 1.5
EVERY = 0.5  # seconds between two looks


def factors(ends: list[float], earlier: list[list[float]]) -> Iterator[float]:
    """How many times too long or too short each time is that is told while a compile goes on, in whole seconds."""
    now = 0.0
    tracker = Tracker(len(ends), clock=lambda: now, earlier=earlier)
    waiting = list(ends)
    while waiting:
        now = min(now + EVERY, waiting[0])
        while waiting and waiting[0] <= now:
            waiting.pop(0)
            tracker.step("block", 0.0)
        left = tracker.event().seconds_left
        assert (left is None) == (3 * (len(ends) - len(waiting)) < len(ends)), "no time before a third is done"
        if left is not None and waiting:
            told, true = max(left, 1.0), max(ends[-1] - now, 1.0)
            yield max(told / true, true / told)


def others(name: str, number: int) -> list[list[float]]:
    return [ends for at, ends in enumerate(RECORDED[name]) if at != number]


CASES: list[Any] = [(name, number) for name, compiles in RECORDED.items() for number in range(len(compiles))]


def test_there_are_enough_recordings() -> None:
    assert len({name.split()[0] for name in RECORDED}) >= 6 and len({name.split()[1] for name in RECORDED}) >= 2
    assert all(len(compiles) >= 2 for compiles in RECORDED.values()) and len(CASES) >= 20


def test_by_the_other_compiles_of_a_family_it_is_within_a_factor_of_one_and_a_half_on_average() -> None:
    found = [mean(factors(RECORDED[name][number], others(name, number))) for name, number in CASES]
    assert mean(found) < ON_AVERAGE, sorted(zip(found, CASES, strict=True))[-5:]


def test_by_one_other_compile_it_is_near_that() -> None:
    pairs = [(RECORDED[name][number], one) for name, number in CASES for one in others(name, number)]
    assert mean(mean(factors(ends, [one])) for ends, one in pairs) < 1.1 * ON_AVERAGE


def test_a_busier_machine_stretches_what_is_left() -> None:
    calm = [4.0, 6.0, 8.0, 10.0]
    assert seconds_left([calm], calm[:2], 4) == pytest.approx(4.0)
    assert 6.0 < (seconds_left([calm], [8.0, 12.0], 4) or 0) <= 8.0


@pytest.mark.parametrize("given", [([], [5.0], 3), ([[1.0, 2.0]], [], 2), ([[1.0, 2.0]], [1.0, 2.0], 2)])
def test_nothing_to_go_by_gives_no_time(given: tuple[Any, ...]) -> None:
    assert seconds_left(*given) is None
