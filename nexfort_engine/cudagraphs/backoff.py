# SPDX-License-Identifier: Apache-2.0
"""Backoff: steps that are not observed, after observations that led to no CUDA graph.

An observed step can take eight times as long as another one (thirteen blocks that run eager, each operator looked at:
109 ms and 14, H200, 2026-11-28). A first step may lack what the second one has, so the second one is observed too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ..runtime.lru_mapping import Recent

FIRST, FACTOR, MOST = 16, 4, 4096  # steps
_MOST_CALLS = 512  # combinations of sizes of which is remembered how often they were observed


class Backoff:
    """Which steps are not observed. Used by one thread at a time."""

    def __init__(self, blocks: Callable[[], Hashable]) -> None:
        """blocks: what is compiled now; where it is something else, an observation may lead to a graph."""
        self._blocks = blocks
        self._rows: Recent[Any, _Row] = Recent(_MOST_CALLS)

    def waits(self, key: Hashable) -> bool:
        """Whether this step is not observed. It counts as one that has passed."""
        row = self._rows.get(key)
        if row is None or not row.left:
            return False
        if row.blocks != self._blocks():
            self.led_to_one(key)
            return False
        row.left -= 1
        return True

    def in_vain(self, key: Hashable) -> None:
        """A step was observed, and there is no graph of it: more steps pass before the next one is."""
        blocks, row = self._blocks(), self._rows.get(key)
        if row is None or row.blocks != blocks:  # what this step lacked the next one may have
            self._rows[key] = _Row(blocks)
        else:
            row.left = row.next
            row.next = min(FACTOR * row.next, MOST)

    def led_to_one(self, key: Hashable) -> None:
        """A step was observed, and the next one can be captured."""
        if key in self._rows:
            self._rows[key] = _Row(None)


class _Row:
    """left: steps that pass unobserved. next: those that pass once it was in vain again."""

    def __init__(self, blocks: Hashable) -> None:
        self.blocks, self.left, self.next = blocks, 0, FIRST
