# SPDX-License-Identifier: Apache-2.0
"""Rows of the store as people read them: the table of the command line and of the Cache Manager node.

It turns plain rows into text and neither reads nor changes a store.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

SHORTEST_ID = 8
UNKNOWN = "?"
LONGEST = 160


def plain(text: object) -> str:
    """One line that steers no terminal: what an entry says of itself may come from a bundle of somebody else."""
    line = "".join(one if one.isprintable() else UNKNOWN for one in str(text))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def plain_facts(facts: Mapping[str, Any]) -> str:
    """Named facts in one line."""
    return ", ".join(f"{plain(name)} {plain(value)}" for name, value in facts.items())


def state(row: Mapping[str, Any]) -> str:
    """What the entry is good for: its problem if it has one, else "base", "pinned" or "ready"."""
    if row.get("problem"):
        return plain(row["problem"])
    if row.get("base"):
        return "base"
    return "pinned" if row.get("pinned") else "ready"


def region(row: Mapping[str, Any]) -> str:
    """Which part of the model the artefact was first made for."""
    info = row["info"]
    return plain(info.get("region") or info.get("kind") or UNKNOWN)


def family(row: Mapping[str, Any]) -> str:
    """The class of the model, as the host calls it."""
    return plain(row["info"].get("family") or UNKNOWN)


def shapes(row: Mapping[str, Any]) -> str:
    """The newest sizes it was called with, and how many others."""
    seen = list(row.get("shapes") or ())
    if not seen:
        return "-"
    newest = plain(seen[-1])
    return newest if len(seen) == 1 else f"{newest} (+{len(seen) - 1})"


def moment(value: str | float | None, none: str = "never") -> str:
    """UTC to the minute, from the store's text or from seconds since the epoch."""
    if value is None:
        return none
    try:
        seconds = datetime.fromisoformat(value).timestamp() if isinstance(value, str) else value
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a clock that was far off
        return "at an unknown time"


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """For each id its beginning, as long as it takes for all of them to differ."""
    whole = list(ids)
    for length in range(SHORTEST_ID, max(map(len, whole), default=0)):
        if len({one[:length] for one in whole}) == len(set(whole)):
            return {one: one[:length] for one in whole}
    return {one: one for one in whole}


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as lines of text in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
