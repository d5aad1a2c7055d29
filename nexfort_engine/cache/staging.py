# SPDX-License-Identifier: Apache-2.0
"""Directories of one process: where artefacts are made before they are committed, and where they are loaded from.

Each is locked as long as its process lives (owner.py), and goes with it. What a killed process leaves goes when the
next one begins to use the store, and when the store is pruned or cleared.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from . import owner, trust
from .fs import identity, listing, remove_tree

log = logging.getLogger("nexfort")

TRASH = "trash-"
ELSEWHERE = "nexfort-"  # begins the names of directories in the system's temporary directory
PATIENCE = 30.0  # seconds in which a process that ends finishes what it is storing


class Staging:
    """The directory `staging/` of a store, and this process's part of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: set[Path] = set()
        self._locks: dict[Path, int | None] = {}
        self._made: dict[Path, tuple[int, int] | None] = {}
        self._storing = 0
        self._none_stored = threading.Condition()
        self._ends_with: int | None = None  # the process at whose end all of it goes

    def new(self, *inner: str) -> Path:
        """A private directory, empty but for the directories `inner`; OSError where none can be made."""
        return self._with(*owner.new_folder(self.folder), inner)

    def elsewhere(self, *inner: str) -> Path:
        """The same in the system's temporary directory; OSError."""
        return self._with(*owner.new_folder(Path(tempfile.gettempdir()), ELSEWHERE), inner)

    def _with(self, folder: Path, handle: int | None, inner: tuple[str, ...]) -> Path:
        self._locks[folder], self._made[folder] = handle, identity(folder)
        try:
            for name in inner:
                (folder / name).mkdir(mode=0o700)
        except OSError:
            self.end(folder)
            raise
        if self._ends_with != os.getpid():
            self._ends_with = os.getpid()
            atexit.register(self._end_all, os.getpid())
        return folder

    def end(self, folder: Path) -> None:
        """Removes a directory that is not kept, and what holds it."""
        if folder not in self.kept:
            remove_tree(folder)
            self.release(folder)

    def lost(self, folder: Path) -> bool:
        """Whether somebody took the directory away. A compiler may have made another in its place, open to others."""
        return folder in self._made and identity(folder) != self._made[folder]

    def make_private(self) -> None:
        """Closes the directory of all to others again, if only this user could write there."""
        with contextlib.suppress(OSError):
            info = self.folder.lstat()
            if stat.S_ISDIR(info.st_mode) and trust.own().problem(self.folder, info, trust.WRITABLE_BY_OTHERS) is None:
                self.folder.chmod(0o700)

    def release(self, folder: Path) -> None:
        """Lets go of a directory that was moved into the store."""
        self._made.pop(folder, None)
        handle = self._locks.pop(folder, None)
        if handle is not None:
            os.close(handle)

    def keep(self, folder: Path) -> None:
        """Lets a directory live to the end of this process."""
        self.kept.add(folder)

    @contextlib.contextmanager
    def storing(self) -> Iterator[None]:
        """What is done inside is finished before the process ends, unless it is killed."""
        with self._none_stored:
            self._storing += 1
        try:
            yield
        finally:
            with self._none_stored:
                self._storing -= 1
                self._none_stored.notify_all()

    def _end_all(self, process: int) -> None:
        if os.getpid() != process:  # a forked child runs this too, and must not take its parent's
            return
        with self._none_stored:
            if not self._none_stored.wait_for(lambda: not self._storing, PATIENCE):
                log.warning("Nexfort: the process ends before an artefact is stored in %s", self.folder.parent)
        for folder in list(self._locks):
            remove_tree(folder)

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
            if path.name.startswith(TRASH):
                remove_tree(path)
            else:
                owner.remove_left(path)

    def size(self) -> int:
        """Bytes of all that lies here, of whichever process."""
        return sum(_bytes(path) for path in listing(self.folder))


def sweep_elsewhere() -> None:
    """Deletes what dead processes of this user left in the system's temporary directory."""
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError as error:
        log.debug("there is no temporary directory to look through: %s", error)
        return
    user = os.geteuid() if hasattr(os, "geteuid") else None
    for path in listing(temporary, ELSEWHERE):  # in which thousands of others may lie
        if owner.is_name_of_own(path.name, ELSEWHERE):
            with contextlib.suppress(OSError):  # it went just now
                info = path.lstat()
                if stat.S_ISDIR(info.st_mode) and user in (None, info.st_uid):
                    owner.remove_left(path)


def _bytes(path: Path) -> int:
    """Of a file, or of all files in a directory; what goes while it is looked at counts nothing."""
    found = 0
    if os.path.isdir(path) and not os.path.islink(path):
        for folder, _, files in os.walk(path):
            found += sum(map(_bytes, (Path(folder, file) for file in files)))
        return found
    with contextlib.suppress(OSError):
        found = path.lstat().st_size
    return found
