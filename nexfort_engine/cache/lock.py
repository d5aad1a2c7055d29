# SPDX-License-Identifier: Apache-2.0
"""One bounded lock for the store's rare exclusive work: the index, pruning, clearing.

Reading and committing entries need no lock, so a file system without locks costs only these. It does not
protect entries against deletion while they are read; readers verify instead.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

TIMEOUT = 10.0
# A lock file of the plain kind that is older than this belongs to a process that died: nothing here holds it
# so long.
STALE = 600.0


class LockTimeout(TimeoutError):
    """The lock was held by somebody else for longer than the caller wanted to wait."""


@contextlib.contextmanager
def bounded_lock(path: Path, timeout: float = TIMEOUT) -> Iterator[None]:
    """Holds `path` as a lock; LockTimeout after `timeout` seconds, OSError where nothing can be written."""
    with contextlib.ExitStack() as stack:
        if not _filelock(path, timeout, stack):
            stack.enter_context(_exclusive_file(path.with_name(path.name + ".x"), timeout))
        yield


def _filelock(path: Path, timeout: float, stack: contextlib.ExitStack) -> bool:
    """Locks through the filelock package; False if it is missing or the file system knows no locks."""
    try:
        import filelock
    except ImportError:
        return False
    lock = filelock.FileLock(str(path), timeout=timeout, mode=0o600)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise LockTimeout(f"{path} was held by another process for more than {timeout:g} s") from error
    except NotImplementedError:
        return False
    stack.callback(lock.release)
    return True


@contextlib.contextmanager
def _exclusive_file(path: Path, timeout: float) -> Iterator[None]:
    """A lock that is held while its file exists."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            break
        except FileExistsError:
            _break_stale(path)
        if time.monotonic() >= deadline:
            raise LockTimeout(f"{path} was held by another process for more than {timeout:g} s")
        time.sleep(0.02)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _break_stale(path: Path) -> None:
    """Removes the file of a dead holder. Renaming first lets only one of several waiters do it."""
    try:
        if time.time() - path.stat().st_mtime < STALE:
            return
        moved = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        path.rename(moved)
        moved.unlink()
    except FileNotFoundError:
        return  # released, or broken by another waiter, in the meantime
