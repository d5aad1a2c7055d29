# SPDX-License-Identifier: Apache-2.0
"""The cards that scripts compile kernels for, by their compute capability. No test lives here."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any

ALL = (80, 86, 89, 90, 100, 120)
FEW = (90,)  # the one that is measured


def cards(since: int = ALL[0]) -> list[int]:
    """The few since a card, or all that are there since it where a script is called with "all"."""
    return [card for card in (ALL if "all" in sys.argv[1:] else FEW) if card >= since]


def combined(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """All combinations where a script is called with "all", otherwise each value at least once."""
    values = [list(some) for some in choices]
    if "all" in sys.argv[1:]:
        return list(itertools.product(*values))
    return [tuple(some[at % len(some)] for some in values) for at in range(max(map(len, values)))]
