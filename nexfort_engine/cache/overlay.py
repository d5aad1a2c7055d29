# SPDX-License-Identifier: Apache-2.0
"""All that can be read: the user's own entries, and under them those of a read-only base cache.

An entry of the base counts only where the user's own cache has none of its id. Nothing is changed here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import index, trust
from .catalog import NOT_READ, Shelf
from .entry import Entry

log = logging.getLogger("nexfort")

SHORTEST = 4  # characters of an id that may stand for it


class Library:
    """The user's own shelf and the one below it, if `base` names one that can be trusted."""

    def __init__(self, own: Shelf, base: Path | None) -> None:
        self.own = own
        self.base = base
        self.below: Shelf | None = None
        self._problem: str | None = None
        if base == own.root:
            self._problem = f"{base} is the user's own cache; expected another directory as the base cache"
        elif base is not None:
            try:
                self.below = Shelf(base, trust.base(), base=True)
            except ValueError as error:
                self._problem = str(error)
        if self._problem is not None:
            log.warning("the base cache is not read: %s", self._problem)

    @property
    def problem(self) -> str | None:
        """Why nothing of the base cache is read; None if it is, or if there is none."""
        if self.below is None:
            return self._problem
        if not os.path.isdir(self.below.entries):
            return f"{self.base}, which was given as the base cache, holds no entries; expected a cache directory"
        return self.below.distrust()

    def candidates(self, primary: str) -> list[Entry]:
        """The sound entries of one key: the user's own, newest first, then those of the base."""
        found = self.own.candidates(primary)
        ids = {entry.id for entry in found}
        more = self.below.candidates(primary) if self.below is not None else []
        return found + [entry for entry in more if entry.id not in ids]

    def rows(self, rebuild: Callable[[], list[index.Row]]) -> list[dict[str, Any]]:
        """The table of all entries, oldest first, then those of the base; `rebuild` makes an index that is not true."""
        found = _rows(self.own, rebuild)
        if self.below is not None:
            ids = {row["id"] for row in found}
            found += [row for row in _rows(self.below, self.below.made_rows) if row["id"] not in ids]
        return found

    def find(self, text: str) -> Entry:
        """The entry with this id, or the only one whose id begins so; LookupError."""
        places = [
            (shelf, *place) for shelf in self._shelves() for place in shelf.on_disk() if place[1].startswith(text)
        ]
        names = {name for _, _, name in places}
        if text not in names:
            if len(text) < SHORTEST:
                raise LookupError(f"found {text!r} as an id, expected at least its first {SHORTEST} characters")
            if not names:
                raise LookupError(f"no entry's id begins with {text!r}; `cache list` shows those that are there")
            if len(names) > 1:
                raise LookupError(f"{text!r} begins several ids: {', '.join(sorted(names))}; give more characters")
            text = names.pop()
        known = [found for shelf, primary, name in places if name == text and (found := shelf.describe(primary, name))]
        if not known:
            raise LookupError(f"the entry {text} was removed just now")
        return next((entry for entry, problem in known if problem is None), known[0][0])

    def verify_all(self) -> list[tuple[Entry, str | None]]:
        """Every entry with the reason why it must not be loaded, or None; reads everything."""
        places = [(shelf, *place) for shelf in self._shelves() for place in shelf.on_disk()]
        known = [found for shelf, primary, name in places if (found := shelf.describe(primary, name)) is not None]
        return [(entry, problem or entry.verify()) for entry, problem in known]

    def _shelves(self) -> list[Shelf]:
        return [self.own] if self.below is None or not self.below.usable() else [self.own, self.below]


def _rows(shelf: Shelf, rebuild: Callable[[], list[index.Row]]) -> list[dict[str, Any]]:
    if not shelf.usable():
        return []
    rows = shelf.index_rows()
    if rows is not None and index.agrees(rows, shelf.on_disk()):
        table = [shelf.row(row) for row in rows]
        if all(row["problem"] != NOT_READ for row in table):
            return table
    return [shelf.row(row) for row in rebuild()]
