# SPDX-License-Identifier: Apache-2.0
"""One bounded lock for the store's rare exclusive work: the index, pinning, pruning, clearing.

Reading and committing entries need no lock, so a file system without locks costs only these: there a plain file
stands for the lock. It does not protect entries against deletion while they are read; readers verify instead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from .fs import identity, open_plain, write_new

TIMEOUT = 10.0
# A lock file of the plain kind that is older than this belongs to a process that died: nothing here holds it
# so long. One whose process is seen to live is given longer, because the clock may have jumped.
STALE = 600.0
STALE_ALIVE = 24 * 3600.0
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


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
    if not _knows_locks(path):
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


def _knows_locks(path: Path) -> bool:
    """Whether the file system can lock: versions of filelock differ in what they do where it cannot."""
    try:
        import fcntl
    except ImportError:  # Windows: filelock brings its own
        return True
    handle = open_plain(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    finally:
        os.close(handle)
    return True


@contextlib.contextmanager
def _exclusive_file(path: Path, timeout: float) -> Iterator[None]:
    """A lock that is held while its file exists."""
    deadline = time.monotonic() + timeout
    while not _create(path):
        if not _break_stale(path):
            if time.monotonic() >= deadline:
                raise LockTimeout(f"{path} was held by another process for more than {timeout:g} s")
            time.sleep(0.02)
    ours = identity(path)
    try:
        yield
    finally:
        if identity(path) == ours:  # else it was taken for a dead one's, and somebody else holds it now
            path.unlink(missing_ok=True)


def _create(path: Path) -> bool:
    """Creates the file with its holder's name in it, both in one step; False if it is there already."""
    named = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write_new(named, _holder().encode(), durable=False)
        os.link(named, path)
    except FileExistsError:
        return False
    except (AttributeError, NotImplementedError, PermissionError):  # no hard links here
        return _create_plainly(path)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL):
            raise
        return _create_plainly(path)
    finally:
        named.unlink(missing_ok=True)
    return True


def _create_plainly(path: Path) -> bool:
    try:
        write_new(path, _holder().encode(), durable=False)
    except FileExistsError:
        return False
    return True


def _holder() -> str:
    """This process among all that may use the directory: machine, name space of processes, number."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        space = "-"
    return f"{socket.gethostname()} {space} {os.getpid()}"


def _break_stale(path: Path) -> bool:
    """Removes the file of a dead holder. Renaming first lets only one of several waiters do it."""
    try:
        judged = identity(path)
        if not _is_stale(path):
            return False
        moved = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        path.rename(moved)
        if identity(moved) != judged:  # another waiter was first, and this one is alive: it gets its file back
            with contextlib.suppress(FileExistsError):
                os.link(moved, path)
        moved.unlink()
    except FileNotFoundError:
        return True  # released, or broken by another waiter, in the meantime
    return True


def _is_stale(path: Path) -> bool:
    handle = open_plain(path)
    try:
        age = time.time() - os.fstat(handle).st_mtime
        place, _, number = os.read(handle, 500).decode("utf-8", "replace").rpartition(" ")
    finally:
        os.close(handle)
    here = place == _holder().rpartition(" ")[0]
    if not here or os.name != "posix" or not number.isdigit():
        return age >= STALE
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it lives and is another user's
        return age >= STALE_ALIVE
    return age >= STALE_ALIVE
