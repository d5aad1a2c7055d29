# SPDX-License-Identifier: Apache-2.0
"""A step that is slower than eager is told of exactly when it is: by 3 %, by more than the spread, over ten steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from nexfort_engine.dispatch import step_times
from nexfort_engine.dispatch.step_times import LEAST_EAGER, STEPS, Pace, is_slower, kind_of, middle

KIND = kind_of((torch.zeros(2, 4, 8), 1.0), {"context": torch.zeros(2, 77, 16)}, "lora")
times = some.floats(0.001, 10, allow_nan=False)


def known(seconds: float | None) -> Callable[[], float | None]:
    return lambda: seconds


class Watched:
    """A pace that is fed with seconds, and what it told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.pace = Pace(self.told.append, lambda facts: f"because of {facts}")

    def ours(self, *seconds: float, kind: Any = KIND) -> Watched:
        for one in seconds:
            self.pace.ran(known(one), kind, "this")
        return self

    def eager(self, *seconds: float, kind: Any = KIND) -> Watched:
        for one in seconds:
            self.pace.ran_eager(known(one), kind, "a run without Nexfort")
        return self

    def verified(self, seconds: float, kind: Any = KIND) -> Watched:
        self.pace.verified(seconds, kind)
        return self


@given(some.lists(times, min_size=STEPS, max_size=STEPS), times)
def test_it_warns_exactly_when_ten_steps_are_slower_by_three_percent_and_the_spread(
    ours: list[float], eager: float
) -> None:
    found = Watched().verified(eager).ours(*ours)
    ordered = sorted(ours)
    median = statistics.median(ours)
    slower = median > 1.03 * eager and median - eager > ordered[7] - ordered[2]
    assert [row["slower"] for row in found.told] == ([True] if slower else [])


@given(some.lists(times, min_size=1, max_size=STEPS - 1), times)
def test_fewer_steps_say_nothing(ours: list[float], eager: float) -> None:
    assert not Watched().verified(eager).ours(*ours).told


@given(some.lists(times, min_size=1, max_size=30))
def test_the_middle_is_the_median_and_the_spread_that_of_the_middle_half(values: list[float]) -> None:
    median, spread = middle(values)
    assert median == pytest.approx(statistics.median(values))
    assert 0 <= spread <= max(values) - min(values)
    assert sum(1 for value in values if abs(value - median) <= spread) * 2 >= len(values)


@given(some.permutations(range(STEPS + 1)))
def test_it_does_not_matter_what_is_known_first(order: list[int]) -> None:
    found = Watched()
    for one in order:
        found = found.verified(0.100) if one == STEPS else found.ours(0.110 + one / 1e6)
    (row,) = found.told
    assert row["slower"] and row["reason"] == "because of this" and row["source"] == "verification"
    assert row["sizes"] == [[2, 4, 8], [2, 77, 16]] and row["eager_ms"] == pytest.approx(100)
    assert row["compiled_ms"] == pytest.approx(110, rel=1e-3) and row["spread_ms"] < 0.1


@pytest.mark.parametrize(("ours", "eager"), [(0.1029, 0.1), (0.09, 0.1), (0.1, 0.1)])
def test_as_fast_as_eager_is_not_slower(ours: float, eager: float) -> None:
    assert not Watched().verified(eager).ours(*[ours] * 3 * STEPS).told
    assert Watched().verified(eager).ours(*[1.2 * ours] * STEPS).told, "nothing is compared"


@pytest.mark.parametrize("besides", ["another size", "another batch", "another LoRA"])
def test_steps_of_another_kind_do_not_count(besides: str) -> None:
    x, lora = torch.zeros(2, 4, 8), "lora"
    other = {"another size": torch.zeros(2, 4, 9), "another batch": torch.zeros(1, 4, 8)}.get(besides, x)
    one, two = kind_of((x,), {}, lora), kind_of((other,), {}, "none" if besides == "another LoRA" else lora)
    found = Watched().verified(0.1, kind=one).ours(*[0.2] * (STEPS - 1), kind=one).ours(*[0.2] * STEPS, kind=two)
    assert not found.told
    assert found.ours(0.2, kind=one).told


def test_steps_that_ran_eager_by_chance_count_once_there_are_some() -> None:
    found = Watched().ours(*[0.2] * STEPS).eager(*[0.1] * (LEAST_EAGER - 1))
    assert not found.told
    (row,) = found.eager(0.1).told
    assert row["source"] == "a run without Nexfort"


def test_a_verification_counts_more_than_what_was_seen_by_chance() -> None:
    found = Watched().eager(*[0.1] * STEPS).verified(0.2).eager(*[0.1] * STEPS).ours(*[0.2] * STEPS)
    assert not found.told


def test_it_says_when_steps_are_no_longer_slower() -> None:
    found = Watched().verified(0.1).ours(*[0.2] * STEPS, *[0.09] * STEPS)
    assert [row["slower"] for row in found.told] == [True, False] and found.told[-1]["reason"] == ""


def test_steps_of_which_half_are_far_apart_say_nothing() -> None:
    assert not is_slower([0.1, 0.3] * (STEPS // 2), [0.1])
    assert is_slower([0.2] * STEPS, [0.1]) and not is_slower([0.2] * STEPS, [0.1, 0.1, 0.3, 0.3])


def test_a_time_that_is_not_there_yet_is_read_at_a_later_step_and_in_its_turn() -> None:
    found, asked = Watched().verified(0.1), list[str]()
    late: list[float | None] = [None]

    def lap() -> float | None:
        asked.append("first")
        return late[0]

    found.pace.ran(lap, KIND, "late")
    found.ours(*[0.2] * (STEPS - 1))
    assert not found.told and set(asked) == {"first"}
    late[0] = 0.2
    found.pace.read()
    assert len(found.told) == 1


def test_what_never_ends_is_not_waited_for() -> None:
    found = Watched().verified(0.1)
    found.pace.ran(known(None), KIND, "never")
    found.ours(*[0.2] * 50)
    assert found.told and len(found.pace._waiting) <= step_times._MOST_WAITING


def test_it_keeps_little_of_many_sizes() -> None:
    found = Watched()
    for size in range(1, 500):
        found.ours(0.1, kind=kind_of((torch.empty(size),), {}))
    assert len(found.pace._kinds) <= step_times._MOST_KINDS


def test_on_a_cpu_the_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([5.0, 5.25])
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: next(now))
    ends = step_times.begin(torch.device("cpu"))
    assert ends is not None and ends()() == 0.25


class Event:
    """One of CUDA's, which a test lets come to pass."""

    made: list[Event]
    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.there, self.at = False, 0.0
        self.made.append(self)

    def record(self, stream: Any) -> None:
        self.at = self.now

    def query(self) -> bool:
        return self.there

    def elapsed_time(self, other: Event) -> float:
        assert other.there, "who asks for it before waits for the device"
        return 1e3 * (other.at - self.at)


def test_on_a_gpu_events_are_read_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.made, capturing = [], [False]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    ends = step_times.begin(torch.device("cuda", 0))
    assert ends is not None
    monkeypatch.setattr(Event, "now", 0.5)
    lap = ends()
    assert lap() is None
    Event.made[1].there = True
    assert lap() == 0.5
    capturing[0] = True
    assert step_times.begin(torch.device("cuda", 0)) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_has_a_kind(layout: torch.layout) -> None:
    """It has no shape that can be asked for, or one with a symbol."""
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    one, two = (kind_of((torch.nested.nested_tensor(rows, layout=layout),), {}) for _ in range(2))
    assert hash(one) is not None and hash(two) is not None
