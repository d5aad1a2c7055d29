# SPDX-License-Identifier: Apache-2.0
"""When each block of a compile was done, on disk: the last compiles of each family, kinds of blocks, mode and device.

One readable JSON file beside the times of steps (speed_record.py). What reporting/estimate.py tells of a compile that
runs comes from it. Losing it costs that. A file that is damaged, or that somebody else could have written, is not read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .sidecar import UnreadableError, recall_own, tell_once, update
from .speed_record import FOLDER

log = logging.getLogger("nexfort")

FILE = "compiles.json"
MOST = 64  # names
EACH = 3  # compiles of each
MOST_BLOCKS = 256  # of one compile; a larger one is not kept
_FORMAT = 1
_LONGEST = 300


def name_of(family: str, mode: str, device: str, kinds: Iterable[str]) -> str:
    """Under which compiles of the same work are found."""
    return f"{family} {mode} {device}: {', '.join(sorted(set(kinds)))}"[:_LONGEST]


def read(root: Path) -> dict[str, list[list[float]]]:
    """By name the seconds from the beginning to the end of each block, of the last compiles; the newest name last."""
    try:
        return _compiles(recall_own(root / FOLDER, FILE))
    except (UnreadableError, OSError) as reason:
        tell_once(f"{root / FOLDER / FILE} is not read and is made again: {reason}")
        return {}


def note(root: Path, name: str, ends: Sequence[float]) -> None:
    """One compile came to its end; its blocks were done at these moments."""
    if not _are_ends(list(ends)):
        return

    def changed(found: Any) -> dict[str, Any]:
        known = _compiles(found)
        known[name] = [*known.pop(name, []), [round(end, 3) for end in ends]][-EACH:]
        return {"format": _FORMAT, "compiles": dict(list(known.items())[-MOST:])}

    try:
        update(root / FOLDER, FILE, changed)
    except OSError as error:
        log.debug("Nexfort: how long compiling took is not kept: %s", error)


def _compiles(found: Any) -> dict[str, list[list[float]]]:
    """What a file's content holds; nothing of it that is not as it should be."""
    rows = found.get("compiles") if isinstance(found, dict) and found.get("format") == _FORMAT else None
    if not isinstance(rows, dict):
        return {}
    kept = {name: [ends for ends in some if _are_ends(ends)] for name, some in rows.items() if isinstance(some, list)}
    return {name: some[-EACH:] for name, some in list(kept.items())[-MOST:] if some}


def _are_ends(ends: Any) -> bool:
    """Whether it can be the moments of one compile, in order."""
    if not isinstance(ends, list) or not 1 < len(ends) <= MOST_BLOCKS:
        return False
    if not all(isinstance(end, (int, float)) and not isinstance(end, bool) and math.isfinite(end) for end in ends):
        return False
    return ends[0] > 0 and ends == sorted(ends)
