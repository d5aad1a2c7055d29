# SPDX-License-Identifier: Apache-2.0
"""Directories of one process: where artefacts are made before they are committed, and where they are loaded from.

Each is locked as long as its process lives, where the file system can do that. So what a dead process left is told
from what a living one needs without asking the clock alone, which may be wrong.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import time
from pathlib import Path
from types import ModuleType

from .disk import listing, modified, remove_at_exit, remove_tree

log = logging.getLogger("nexfort")

STALE = 24 * 3600.0  # nothing is staged for so long by a process that lives
TRASH = "trash-"


class Staging:
    """The directory `staging/` of a store, and this process's part of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: set[Path] = set()
        self._locks: dict[Path, int] = {}

    def new(self, *inner: str) -> Path:
        """A private directory, empty but for the directories `inner`; OSError where none can be made."""
        folder = self.folder / f"{os.getpid()}-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        self._hold(folder)
        return self._with(folder, inner)

    def elsewhere(self, *inner: str) -> Path:
        """The same in the system's temporary directory; OSError."""
        return self._with(Path(tempfile.mkdtemp(prefix="nexfort-")), inner)

    def _with(self, folder: Path, inner: tuple[str, ...]) -> Path:
        try:
            for name in inner:
                (folder / name).mkdir(mode=0o700)
        except OSError:
            self.end(folder)
            raise
        return folder

    def end(self, folder: Path) -> None:
        """Removes a directory that is not kept, and what holds it."""
        if folder not in self.kept:
            remove_tree(folder)
            self.release(folder)

    def release(self, folder: Path) -> None:
        """Lets go of a directory that was moved into the store."""
        handle = self._locks.pop(folder, None)
        if handle is not None:
            os.close(handle)

    def keep(self, folder: Path) -> None:
        """Lets a directory live to the end of this process."""
        if folder not in self.kept:
            self.kept.add(folder)
            remove_at_exit(folder)

    def trash(self, path: Path) -> bool:
        """Deletes a directory: first out of sight in one step, so that no reader finds half of it."""
        trash = self.folder / f"{TRASH}{secrets.token_hex(8)}"
        try:
            os.rename(path, trash)
        except OSError as error:  # in use on Windows, or already gone
            log.debug("%s is not removed: %s", path, error)
            return False
        remove_tree(trash)
        return True

    def sweep(self) -> None:
        """Deletes what dead processes left."""
        for path in listing(self.folder):
            if path not in self.kept and path not in self._locks and _is_left(path):
                remove_tree(path)

    def _hold(self, folder: Path) -> None:
        lock = _flock()
        if lock is None:
            return
        handle = None
        try:
            handle = os.open(folder, os.O_RDONLY)
            lock.flock(handle, lock.LOCK_SH | lock.LOCK_NB)
            self._locks[folder] = handle
        except OSError as error:  # a file system without locks: others go by the process and the time
            log.debug("%s is not locked: %s", folder, error)
            if handle is not None:
                os.close(handle)


def _is_left(path: Path) -> bool:
    if path.name.startswith(TRASH):
        return True
    if time.time() - modified(path) <= STALE:
        return False
    held = _is_held(path)
    return not (_may_live(path) if held is None else held)


def _is_held(path: Path) -> bool | None:
    """Whether a living process holds this directory; None where that cannot be told."""
    lock = _flock()
    if lock is None:
        return None
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    try:
        lock.flock(handle, lock.LOCK_EX | lock.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return None
    finally:
        os.close(handle)
    return False


def _may_live(path: Path) -> bool:
    """Whether a process of the number in its name lives on this machine; False where that cannot be asked."""
    number = path.name.partition("-")[0]
    if os.name != "posix" or not (number.isascii() and number.isdigit()) or not 0 < int(number) < 1 << 31:
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives and is another user's
        return True
    return True


def _flock() -> ModuleType | None:
    """The module with flock; None on Windows."""
    with contextlib.suppress(ImportError):
        import fcntl

        return fcntl
    return None
