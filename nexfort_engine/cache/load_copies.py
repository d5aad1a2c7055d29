# SPDX-License-Identifier: Apache-2.0
"""Where this process loads artefacts from: copies of its own, whose every byte was checked while it was copied.

What loading writes goes into the copy. So an entry stays as it was stored, can be loaded by any number of processes
at once, and may lie on a disk that cannot be written; and nothing that an earlier load left is ever loaded.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from . import payload, trust
from .entry import Entry
from .fs import remove_tree
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
        self._unused: set[Path] = set()  # copies that nothing was loaded from yet
        self._lock = threading.Lock()

    def ahead(self, entry: Entry) -> None:
        """Make the copy of an entry that will be asked for soon; raises what `of` raises."""
        with self._lock:
            if (entry.path, entry.seen) not in self._of:
                entry.check_place()
                self._unused.add(self._new(entry))

    def of(self, entry: Entry, elsewhere: bool = False) -> Path:
        """The copy of an entry's payload; TornError, DistrustError, OSError if it must not or cannot be loaded.

        elsewhere: a new one in the system's temporary directory.
        """
        with self._lock:
            entry.check_place()
            if elsewhere:
                return self._elsewhere(entry)
            known = self._of.get((entry.path, entry.seen))
            if known is not None and ((known in self._unused and os.path.isdir(known)) or _is_sound(known, entry)):
                self._unused.discard(known)
                return known
            return self._new(entry)

    def _new(self, entry: Entry) -> Path:
        try:
            copy = self._copy(entry, self._new_folder)
        except OSError as error:
            log.info("%s is copied to the temporary directory instead: %s", entry.id, error)
            return self._elsewhere(entry)
        self._of[(entry.path, entry.seen)] = copy
        return copy

    def _elsewhere(self, entry: Entry) -> Path:
        self._folder = None
        copy = self._of[(entry.path, entry.seen)] = self._copy(entry, self._staging.elsewhere)
        return copy

    def _copy(self, entry: Entry, new_folder: Callable[[], Path]) -> Path:
        if self._folder is None or not os.path.isdir(self._folder):
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
