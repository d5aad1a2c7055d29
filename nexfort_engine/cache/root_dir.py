# SPDX-License-Identifier: Apache-2.0
"""The root directory as a place to write: whether it takes anything, why not, and the lock for exclusive work.

It knows no entries. That it cannot be written is a state and no error: it is tried again after a while.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from . import owner
from .fs import listing, make_private, modified, remove_tree, write_new
from .lock import STALE, TIMEOUT, bounded_lock
from .staging import Staging, sweep_elsewhere
from .trust import DistrustError, Trust

log = logging.getLogger("nexfort")

RETRY_AFTER = 60.0  # seconds until a directory that could not be written is tried again


class StoreError(RuntimeError):
    """An artefact could not be staged, committed or made ready to load, not even in a temporary directory."""


class Ground:
    """The root of a store and the directories in it. `distrust` says why somebody else could have written there."""

    def __init__(
        self, root: Path, folders: tuple[Path, ...], staging: Staging, trust: Trust, distrust: Callable[[], str | None]
    ) -> None:
        self.root = root
        self.problem: str | None = None
        self._folders = folders
        self._staging = staging
        self._trust = trust
        self._distrust = distrust
        self._probed: float | None = None
        self._begun = False
        self._sweeping = threading.Lock()

    @property
    def writable(self) -> bool:
        """Whether something can be written; if not, `problem` says why, and it is tried again in a minute."""
        fresh = self._probed is not None and time.monotonic() - self._probed < RETRY_AFTER
        if self.problem is not None and fresh:
            return False
        if self._probed is None or self.problem is not None:
            self._probe()
        return self.problem is None

    def lock(self, timeout: float = TIMEOUT) -> contextlib.AbstractContextManager[None]:
        """The lock for exclusive work; PermissionError where nothing can be written, LockTimeout on entering."""
        if not self.writable:
            raise PermissionError(errno.EACCES, self.problem)
        return bounded_lock(self.root / "lock", timeout)

    def folder(self, *inner: str) -> Path:
        """A directory of this process with the directories `inner`; elsewhere, where the store takes none."""
        for _ in range(2):  # what vanished is made again, once
            if self.writable:
                try:
                    return self._staging.new(*inner)
                except OSError as error:
                    self.failed(error)
        try:
            return self._staging.elsewhere(*inner)
        except OSError as error:
            raise StoreError(
                f"no place for compiled code: {self.problem}; and no temporary directory can be written ({error})"
            ) from error

    def failed(self, error: OSError) -> None:
        """Notes that writing failed; the log says so once. What somebody took away is made again instead."""
        if isinstance(error, FileNotFoundError) and self.problem is None:
            log.debug("something in %s vanished: %s", self.root, error)
            self._probe()
        else:
            self._note(error)

    def _note(self, error: OSError) -> None:
        self._probed = time.monotonic()
        known = self.problem is not None
        self.problem = (
            f"the cache directory {self.root} cannot be written ({error.strerror or error}); compiled code "
            "is kept for this process only. Make room or give access there, or set NEXFORT_CACHE_DIR"
        )
        if not known:
            log.warning("%s", self.problem)

    def made_again(self) -> None:
        """Directories were taken away and came back, made by others than this store: looks at them again."""
        self._staging.make_private()
        self._probe()

    def begin(self) -> None:
        """Removes what dead processes left, once, when this one begins to use the store, and beside what it does."""
        if self._begun:
            return
        self._begun = True
        try:
            threading.Thread(target=self.sweep, name="nexfort-sweep", daemon=True).start()
        except RuntimeError as error:  # no thread to be had: pruning does it too
            log.debug("what dead processes left in %s is not removed now: %s", self.root, error)

    def sweep(self) -> None:
        """Removes what dead processes left; nothing from a directory in which somebody else could have put it.

        Where another thread is at it, this one waits: what that one looks at seems to be held.
        """
        alone = self._sweeping.acquire(timeout=TIMEOUT)
        try:
            self._sweep()
        finally:
            if alone:
                self._sweeping.release()

    def _sweep(self) -> None:
        sweep_elsewhere()
        if self._distrust() is not None:
            return
        self._staging.sweep()
        for path in listing(self.root):
            if path.name.startswith("lock.x.") and time.time() - modified(path) > STALE:
                remove_tree(path)
            elif owner.is_name_of_own(path.name, "new-"):
                owner.remove_left(path)

    def _probe(self) -> None:
        self._probed = time.monotonic()
        self.problem = None
        try:
            try:
                self._try()
            except FileNotFoundError:  # somebody took a directory away between its making and its use
                self._try()
        except OSError as error:
            self._note(error)
        except DistrustError as error:
            self._note(PermissionError(errno.EACCES, f"this file system keeps no owners and modes: {error}"))

    def _try(self) -> None:
        """Makes the directories that are missing, and writes a file."""
        make_private(self.root)
        # before anything is written, and again: a file system without modes shows only afterwards
        for _ in range(2):
            if (reason := self._distrust()) is not None:
                raise PermissionError(errno.EACCES, reason)
            for folder in self._folders:
                make_private(folder)
        folder = self._staging.new()
        try:
            write_new(folder / "probe", b"\0" * 4096)
            for path in (folder, folder / "probe"):
                self._trust.check(path, path.lstat())
        finally:
            self._staging.end(folder)
