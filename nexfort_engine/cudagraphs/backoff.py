# SPDX-License-Identifier: Apache-2.0
"""Backoff: steps that are not observed, after observations that led to no CUDA graph.

An observed step can take eight times as long as another one (thirteen blocks that run eager, each operator looked at:
109 ms and 14, H200, 2026-11-28). A first step may lack what the second one has, so the second one is observed too.
Where what stands in the way may pass by itself, such as weights that are fetched, four are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ..runtime.lru_mapping import Recent

FIRST, FACTOR, MOST = 16, 4, 256  # steps that pass unobserved: at first, with each further time, at most
PASSING = 4  # steps that are observed in a row where what stands in the way may pass
_MOST_CALLS = 512  # combinations of sizes of which is remembered how often they were observed


class Backoff:
    """How many steps of each kind pass before one is observed again. Used by one thread at a time."""

    def __init__(self, state: Callable[[], Any]) -> None:
        """state: what is compiled; where it changed, an observation may lead to a graph."""
        self._state = state
        self._rows: Recent[Any, _Row] = Recent(_MOST_CALLS)

    def waits(self, key: Hashable) -> bool:
        """Whether this step is not observed. It counts as one that has passed."""
        row = self._rows.get(key)
        if row is None or not row.left:
            return False
        if row.state != self._state():
            self._rows[key] = _Row(None)
            return False
        row.left -= 1
        return True

    def in_vain(self, key: Hashable, *, passing: bool = False) -> None:
        """A step was observed, and no graph came of it. passing: for a reason that may pass by itself."""
        state, row = self._state(), self._rows.get(key)
        if row is None or row.state != state:  # what this step lacked the next one may have
            row = self._rows[key] = _Row(state)
        row.times += 1
        if row.times >= (PASSING if passing else 2):
            row.left = row.next
            row.next = row.next if passing else min(FACTOR * row.next, MOST)

    def ended(self, key: Hashable, *, replayed: bool) -> None:
        """What a step was captured with, or would have been, is no longer so. replayed: whether a graph of it was."""
        if not replayed:
            self.in_vain(key, passing=True)
        elif key in self._rows:
            self._rows[key] = _Row(None)


class _Row:
    """times: how often it was in vain. left: steps that pass unobserved. next: those that pass the next time."""

    def __init__(self, state: Any) -> None:
        self.state, self.times, self.left, self.next = state, 0, 0, FIRST
