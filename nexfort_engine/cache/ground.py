# SPDX-License-Identifier: Apache-2.0
"""The root directory as a place to write: whether it takes anything, why not, and the lock for exclusive work.

It knows no entries. That it cannot be written is a state and no error: it is tried again after a while.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .disk import listing, make_private, modified, write_new
from .lock import STALE, TIMEOUT, bounded_lock
from .staging import Staging
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
        if self.writable:
            try:
                return self._staging.new(*inner)
            except OSError as error:
                self.failed(error)
        try:
            return self._staging.elsewhere(*inner)
        except OSError as error:
            raise StoreError(
                f"no place for compiled code: {self.problem}; and the temporary directory "
                f"{tempfile.gettempdir()} cannot be written either ({error})"
            ) from error

    def failed(self, error: OSError) -> None:
        """Notes that writing failed; the log says so once."""
        self._probed = time.monotonic()
        known = self.problem is not None
        self.problem = (
            f"the cache directory {self.root} cannot be written ({error.strerror or error}); compiled code "
            "is kept for this process only. Make room or give access there, or set NEXFORT_CACHE_DIR"
        )
        if not known:
            log.warning("%s", self.problem)

    def sweep(self) -> None:
        """Deletes what a process left that died while it took the lock."""
        for path in listing(self.root):
            if path.name.startswith("lock.x.") and time.time() - modified(path) > STALE:
                path.unlink(missing_ok=True)

    def _probe(self) -> None:
        self._probed = time.monotonic()
        self.problem = None
        try:
            make_private(self.root)
            # before anything is written, and again: a file system without modes shows only afterwards
            for _ in range(2):
                if (reason := self._distrust()) is not None:
                    raise PermissionError(errno.EACCES, reason)
                for folder in self._folders:
                    make_private(folder)
            probe = self._staging.folder / f"probe-{secrets.token_hex(8)}"
            try:
                write_new(probe, b"\0" * 4096)
                self._trust.check(probe, probe.lstat())
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            self.failed(error)
        except DistrustError as error:
            self.failed(PermissionError(errno.EACCES, f"this file system keeps no owners and modes: {error}"))
