# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks on disk, the newest last, in a readable JSON file beside the times of steps. Bounded.

A file that is damaged, or that somebody else could have written, is not read, and neither is a result in it that is
none; whoever asks is told so in one sentence, and the next result makes the file anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .sidecar import UnreadableError, recall_own, tell_once, update
from .speed_record import FOLDER

log = logging.getLogger("nexfort")

FILE = "benchmarks.json"
MOST = 20  # results
MOST_RUNS = 16
_FORMAT = 1
_LONGEST = 128  # characters of a text
_LARGEST = 1e7  # milliseconds of a step
TEXTS = ("workflow", "mode", "size", "device")


def read(root: Path) -> tuple[list[dict[str, Any]], str]:
    """The results that are kept below the root of a store, and "" or one sentence on why some or all are not there."""
    rows: list[dict[str, Any]] = []
    try:
        found = recall_own(root / FOLDER, FILE)
        rows, whole = ([], True) if found is None else _rows(found)
        if not whole:
            raise UnreadableError("it does not hold what it should")
        return rows, ""
    except UnreadableError as reason:
        which = "Some earlier" if rows else "Earlier"
        lost = f"{which} benchmarks cannot be read: {FILE} {reason.in_short}. The next benchmark makes it anew."
        tell_once(f"{lost} ({root / FOLDER / FILE}: {reason})")
        return rows, lost
    except OSError as error:
        log.debug("Nexfort: %s cannot be read: %s", root / FOLDER, error)
    return [], ""


def add(root: Path, row: Mapping[str, Any]) -> bool:
    """Keep one more result, `is_result` of which holds; whether it could be kept."""

    def changed(found: Any) -> dict[str, Any]:
        known, _ = _rows(found)
        return {"format": _FORMAT, "rows": [*known, dict(row)][-MOST:]}

    try:
        update(root / FOLDER, FILE, changed)
    except OSError as error:
        log.debug("Nexfort: a benchmark is not kept: %s", error)
        return False
    return True


def _rows(found: Any) -> tuple[list[dict[str, Any]], bool]:
    """The results in a file's content, and whether that is all that it should be."""
    if not isinstance(found, dict) or found.get("format") != _FORMAT or not isinstance(found.get("rows"), list):
        return [], False
    sound = [row for row in found["rows"] if is_result(row)]
    return sound[-MOST:], len(sound) == len(found["rows"])


def is_result(row: Any) -> bool:
    """Whether it is a result: texts, "at", "steps" of a run, and "runs" as [compiled?, milliseconds a step] each."""
    if not isinstance(row, dict) or row.keys() != {*TEXTS, "at", "steps", "runs"}:
        return False
    if not all(isinstance(row[name], str) and len(row[name]) <= _LONGEST for name in TEXTS):
        return False
    runs = row["runs"]
    if not isinstance(runs, list) or not 0 < len(runs) <= MOST_RUNS:
        return False
    if not all(isinstance(one, list) and len(one) == 2 and isinstance(one[0], bool) for one in runs):
        return False
    if not all(_is_number(one[1]) and 0 < one[1] < _LARGEST for one in runs):
        return False
    return {one[0] for one in runs} == {True, False} and _is_number(row["at"]) and _is_count(row["steps"])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 100_000
