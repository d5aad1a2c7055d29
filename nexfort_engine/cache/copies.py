# SPDX-License-Identifier: Apache-2.0
"""Where this process loads artefacts from: copies of its own, whose every byte was checked while it was copied.

What loading writes goes into the copy. So an entry stays as it was stored, can be loaded by any number of processes
at once, and may lie on a disk that cannot be written; and nothing that an earlier load left is ever loaded.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from . import payload, trust
from .disk import remove_tree
from .entry import Entry
from .payload import TornError
from .staging import Staging
from .trust import DistrustError

log = logging.getLogger("nexfort")


class Copies:
    """The copies of this process, in one directory that goes with it."""

    def __init__(self, folder: Callable[[], Path], staging: Staging) -> None:
        self._new_folder = folder
        self._staging = staging
        self._folder: Path | None = None
        self._of: dict[tuple[Path, tuple[int, int] | None], Path] = {}

    def of(self, entry: Entry) -> Path:
        """The copy of an entry's payload; TornError, DistrustError, OSError if it must not or cannot be loaded."""
        entry.check_place()
        place = (entry.path, entry.seen)
        known = self._of.get(place)
        if known is not None and _is_sound(known, entry):
            return known
        try:
            copy = self._copy(entry, self._new_folder)
        except OSError as error:
            log.info("%s is copied to the temporary directory instead: %s", entry.id, error)
            self._folder = None
            copy = self._copy(entry, self._staging.elsewhere)
        self._of[place] = copy
        return copy

    def _copy(self, entry: Entry, new_folder: Callable[[], Path]) -> Path:
        if self._folder is None or not self._folder.is_dir():
            self._folder = new_folder()
            self._staging.keep(self._folder)
        copy = self._folder / f"{entry.id}-{secrets.token_hex(4)}"
        try:
            payload.copy(entry.payload, entry.manifest["files"], entry.trust, copy)
        except (TornError, DistrustError, OSError):
            remove_tree(copy)
            raise
        return copy


def _is_sound(copy: Path, entry: Entry) -> bool:
    try:
        payload.check(copy, entry.manifest["files"], trust.own())
    except (TornError, DistrustError, OSError) as error:
        log.debug("%s is copied again: %s", entry.id, error)
        return False
    return True
