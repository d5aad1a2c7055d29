# SPDX-License-Identifier: Apache-2.0
"""When a card had nothing to do, of kernels as its profiler tells them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.card import idle

TIMES = st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda time: (float(time[0]), float(sum(time)), "kernel"))


def test_time_in_which_nothing_runs_is_that_of_the_kernel_behind_it() -> None:
    spans = [(4.0, 6.0, "late"), (0.0, 2.0, "first"), (2.0, 3.0, "at once"), (5.0, 9.0, "beside"), (9.5, 10.0, "late")]
    assert idle(spans) == [(1.0, "late"), (0.5, "late")]
    assert idle([]) == [] and idle(spans[:1]) == []
    assert idle([(0.0, 9.0, "long"), (1.0, 2.0, "inside"), (8.0, 9.0, "inside"), (10.0, 11.0, "last")]) == [
        (1.0, "last")
    ]


@given(st.lists(TIMES, min_size=1, max_size=12))
def test_a_card_is_idle_whenever_none_of_them_runs(spans: list[tuple[float, float, str]]) -> None:
    first, last = min(start for start, _, _ in spans), max(end for _, end, _ in spans)
    moments = [moment + 0.5 for moment in range(int(first), int(last))]
    free = [moment for moment in moments if not any(start < moment < end for start, end, _ in spans)]
    assert sum(time for time, _ in idle(spans)) == len(free)
