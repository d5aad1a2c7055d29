# SPDX-License-Identifier: Apache-2.0
"""How long steps took, on disk: the last times of each kind of step, compiled and uncompiled, of the last 30 days.

One readable JSON file in a folder of its own beside the artefacts. A file that is damaged, or that somebody else could
have written, is not read, and neither is a row in it that is none; whoever asks is told so in one sentence, and the
next picture makes the file anew. Losing it costs measuring again. What makes two steps of one kind is the business of
whoever makes the keys.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..reporting.speed import HOW
from .sidecar import UnreadableError, recall_own, tell_once, update

log = logging.getLogger("nexfort")

FOLDER, FILE = "speed", "steps.json"
MOST = 256  # kinds
DAYS = 30
RECENT = 20  # pictures
_DAY = 86400.0
_FORMAT = 1
_COUNTS = ("steps", "pictures", "saved")
_TIMES = ("compiled", "eager")
_TEXTS = ("model", "mode", "device", "source")


def blank(**known: Any) -> dict[str, Any]:
    """The row of a kind of step of which nothing was measured. known: its model, mode, device and sizes.

    compiled, eager: seconds a step, with the moment of each. saved: seconds that compiled steps took less. made:
    seconds that compiling took. recent: moment and seconds a step of the last pictures.
    """
    row: dict[str, Any] = {
        "model": "", "mode": "", "device": "", "sizes": [], "compiled": None, "compiled_at": 0.0, "eager": None,
        "eager_at": 0.0, "source": "", "steps": 0, "pictures": 0, "saved": 0.0, "made": 0.0, "recent": [],
    }  # fmt: skip
    return {**row, **known}


def read(root: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """The rows that are kept below the root of a store, by their keys, and "" or why some or all are not there."""
    rows: dict[str, dict[str, Any]] = {}
    try:
        found = recall_own(root / FOLDER, FILE)
        rows, whole = ({}, True) if found is None else _rows(found)
        if not whole:
            raise UnreadableError("it does not hold what it should")
        return rows, ""
    except UnreadableError as reason:
        which = "some earlier" if rows else "earlier"
        lost = f"{which} times of steps are lost: {FILE} {reason.in_short} and is made anew; to compare again, {HOW}"
        tell_once(f"{lost} ({root / FOLDER / FILE}: {reason})")
        return rows, lost
    except OSError as error:
        log.debug("Nexfort: %s cannot be read: %s", root / FOLDER, error)
    return {}, ""


def write(root: Path, changed: Mapping[str, Mapping[str, Any]], more: Mapping[str, Mapping[str, float]]) -> None:
    """Keep rows; what other processes kept of other kinds stays.

    more: by how much the counts of a row grew since they were kept last, for other processes count too.
    """

    def merged(found: Any) -> dict[str, Any]:
        rows, _ = _rows(found)
        for key, row in changed.items():
            rows[key] = _merged(rows.get(key), row, more.get(key, {}))
        newest = sorted(rows.items(), key=lambda item: _moment(item[1]))[-MOST:]
        return {"format": _FORMAT, "rows": dict(newest)}

    try:
        update(root / FOLDER, FILE, merged)
    except OSError as error:
        log.debug("Nexfort: how long steps took is not kept: %s", error)


def _merged(theirs: dict[str, Any] | None, ours: Mapping[str, Any], more: Mapping[str, float]) -> dict[str, Any]:
    row = {**blank(), **{name: ours[name] for name in blank()}}
    if theirs is None:
        return row
    for name in _TIMES:  # the last of each
        if theirs[name] is not None and theirs[f"{name}_at"] > row[f"{name}_at"]:
            row |= {name: theirs[name], f"{name}_at": theirs[f"{name}_at"]}
            row |= {"source": theirs["source"]} if name == "eager" else {}
    row |= {name: theirs[name] + more.get(name, 0) for name in _COUNTS}
    row["made"] = row["made"] or theirs["made"]
    pictures = {(moment, seconds) for moment, seconds in (*theirs["recent"], *row["recent"])}
    row["recent"] = [list(one) for one in sorted(pictures)[-RECENT:]]
    return row


def _rows(found: Any) -> tuple[dict[str, dict[str, Any]], bool]:
    """The rows of a file's content, without what is too old, and whether that is all that it should be."""
    if not isinstance(found, dict) or found.get("format") != _FORMAT or not isinstance(found.get("rows"), dict):
        return {}, False
    sound = {key: without_old(row) for key, row in found["rows"].items() if _is_row(row)}
    fresh = {key: row for key, row in sound.items() if row["compiled"] is not None or row["eager"] is not None}
    return fresh, len(sound) == len(found["rows"])


def without_old(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the times that are older than 30 days."""
    oldest, kept = time.time() - DAYS * _DAY, dict(row)
    for name in _TIMES:
        if kept[f"{name}_at"] < oldest:
            kept[name] = None
    return kept


def _moment(row: Mapping[str, Any]) -> float:
    return float(max(row["compiled_at"], row["eager_at"]))


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or row.keys() != blank().keys():
        return False
    numbers = [row[name] for name in (*_COUNTS, "made", "compiled_at", "eager_at")]
    numbers += [row[name] for name in _TIMES if row[name] is not None]
    recent = row["recent"]
    if not isinstance(recent, list) or not all(isinstance(one, list) and len(one) == 2 for one in recent):
        return False
    numbers += [number for one in recent for number in one]
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in numbers):
        return False
    if any(row[name] is not None and row[name] <= 0 for name in _TIMES) or len(recent) > RECENT:
        return False
    sizes = row["sizes"]
    if not isinstance(sizes, list) or not all(isinstance(size, list) for size in sizes):
        return False
    return all(isinstance(n, int) for size in sizes for n in size) and all(isinstance(row[n], str) for n in _TEXTS)
