# SPDX-License-Identifier: Apache-2.0
"""How much faster, in words: a row on a kind of step (cache/speed_record.py) as the report and the log tell it.

It measures nothing. The front end has the same sentences in the user's language (web/speed.js).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

ALIKE = 0.03  # nearer to 1 than this a ratio says neither faster nor slower
NOT_MEASURED = "not measured yet"
SOURCES = {"first": "before it was compiled"}  # those whose name does not say it
HOW = "run it once with the node bypassed, or verify a step"


def ratio(row: Mapping[str, Any]) -> float | None:
    """How many times as fast compiled steps are; None where either time is missing."""
    if not row["compiled"] or not row["eager"]:
        return None
    return float(row["eager"] / row["compiled"])


def is_slower(row: Mapping[str, Any]) -> bool:
    """Whether compiled steps were seen to be slower."""
    found = ratio(row)
    return found is not None and found < 1 - ALIKE


def current(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row on the kind of step that ran last, of a report's data."""
    rows: Sequence[Mapping[str, Any]] = report.get("speed") or ()
    return rows[-1] if rows else None


def times(found: float) -> str:
    """A ratio: "1.7x", and with two digits behind the point below 1.2, where one would hide most of it."""
    return f"{found:.2f}x" if 0.8 < found < 1.2 else f"{found:.1f}x"


def headline(row: Mapping[str, Any]) -> str:
    """For people: "1.75x faster: 2.70 s a step, was 4.70 s (verified, 12:31) - saved 4 min in 31 pictures"."""
    found = ratio(row)
    if found is None:
        ours = f": {seconds(row['compiled'])} a step; to compare, {HOW}" if row["compiled"] else ""
        return NOT_MEASURED + ours
    source = f"{SOURCES.get(row['source'], row['source'])}, {_clock(row['eager_at'])}"
    was = f"{seconds(row['compiled'])} a step, was {seconds(row['eager'])} ({source})"
    if is_slower(row):
        return f"slower here: {times(found)}: {was}; {row.get('reason') or 'the reason is not known'}"
    parts = [f"{found:.2f}x faster: {was}" if found > 1 + ALIKE else f"about as fast, {times(found)}: {was}"]
    if row["saved"] >= 1 and row["pictures"]:
        pictures = f"{row['pictures']} picture{'s' if row['pictures'] != 1 else ''}"
        parts.append(f"saved {_span(row['saved'])} in {pictures}")
    if row["made"] >= 1:
        parts.append(f"compiled once in {_span(row['made'])}")
    return " - ".join(parts)


def run_line(steps: int, row: Mapping[str, Any] | None, taken: float | None, made: tuple[int, int], plain: bool) -> str:
    """The last line of a picture: "Nexfort: 8 steps of 0.41 s, 1.7x; 0 compiled, 14 loaded".

    taken: seconds a step, None where too few were timed. made: artefacts compiled and loaded. plain: the steps ran
    uncompiled.
    """
    said = f"Nexfort: {steps} step{'s' if steps != 1 else ''}"
    said += f" of {seconds(taken)}" if taken is not None else ""
    found = ratio(row) if row is not None else None
    if plain:
        said += ", uncompiled"
    else:
        said += f", {times(found)}" if found is not None else f", {NOT_MEASURED}"
    return f"{said}; {made[0]} compiled, {made[1]} loaded"


def seconds(value: float) -> str:
    """Seconds of one step, with three digits: "2.70 s", "0.41 s", "8.3 ms"."""
    if value < 0.1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _span(value: float) -> str:
    if value < 99.5:
        return f"{max(1, round(value))} s"
    return f"{round(value / 60)} min" if value < 99.5 * 60 else f"{value / 3600:.1f} h"


def _clock(moment: float) -> str:
    """The time of a moment of today, the date of an earlier one."""
    then, now = time.localtime(moment), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%Y-%m-%d", then)
