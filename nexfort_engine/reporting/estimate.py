# SPDX-License-Identifier: Apache-2.0
"""How long a compile still takes, by how earlier ones of the same work went on.

Blocks are not alike: the first ones wait for workers to start, and the largest are begun first. So the pace of the
blocks that are done says little, and what earlier compiles still had before them when they were as far says much. A
machine that is busier than it was then takes longer for the rest too, by most of what it took longer so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Ends = Sequence[float]  # seconds from the beginning to the end of each block, in order
_LEAST = 1e-3  # seconds
# Exponents for what is still to come: of how much slower it is than the earlier compile, from the beginning and from
# the first block on. The beginning waits for processes, the rest for the compiler; neither pace stays for good.
_WHOLE, _SINCE = 0.5, 0.4


def seconds_left(earlier: Sequence[Ends], ends: Ends, total: int) -> float | None:
    """Seconds from the last of the blocks that are done; None without an earlier compile.

    earlier: compiles of the same work. ends: of the blocks that are done, out of `total`. Formula: the geometric mean
    over the earlier ones of what was left, times pace ** _WHOLE * pace since the first block ** _SINCE.
    tests/reporting/recorded_compiles.json has compiles that it is tried on.
    """
    done = len(ends)
    if not earlier or not 0 < done < total or ends[-1] <= 0:
        return None
    logs = []
    for old in earlier:
        first, was = _moment(old, 1 / total), _moment(old, done / total)
        pace = since = ends[-1] / was
        if was > first and ends[-1] > ends[0]:
            since = (ends[-1] - ends[0]) / (was - first)
        logs.append(math.log(max(old[-1] - was, _LEAST) * pace**_WHOLE * since**_SINCE))
    return math.exp(sum(logs) / len(logs))


def _moment(ends: Ends, part: float) -> float:
    """When a compile had this part of its blocks done."""
    place = part * len(ends)
    whole = min(math.floor(place), len(ends) - 1)
    before = ends[whole - 1] if whole else 0.0
    return max(before + (place - whole) * (ends[whole] - before), _LEAST)
