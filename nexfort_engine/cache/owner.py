# SPDX-License-Identifier: Apache-2.0
"""Who owns what a process makes for itself: directories and files that are locked as long as the process lives.

The system lets go of a lock when its process ends, however it ends. So what a dead process left is known at once, and
what a living one needs is known too. Where a file system has no locks, the name says so, and the number of the process
in the name and the clock decide.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from .fs import flock, modified, open_new, open_plain, remove_tree, write_all

log = logging.getLogger("nexfort")

STALE = 24 * 3600.0  # seconds that what is not locked stays; nothing is needed for so long by a process that lives
_UNLOCKED = ".unlocked"
_NAME = re.compile(r"(\.?(?:[a-z]+-)?)(\d{1,10})-[0-9a-f]+(\.unlocked)?")
_NUMBER = re.compile(r"(?:\.?[a-z]+-)?(\d{1,10})-")
_TRIES = 5


def name_of_own(prefix: str = "") -> str:
    """A new name that tells which process gave it."""
    return f"{prefix}{os.getpid()}-{secrets.token_hex(8)}"


def is_name_of_own(name: str, prefix: str = "") -> bool:
    """Whether some process gave this name by `name_of_own`, as far as it tells."""
    found = _NAME.fullmatch(name)
    return found is not None and found[1] == prefix


def new_folder(parent: Path, prefix: str = "") -> tuple[Path, int | None]:
    """A private directory of this process and the handle that locks it, to be closed when it is given up.

    OSError where none can be made. The handle is None where the file system has no locks.
    """
    for _ in range(_TRIES):
        folder = parent / name_of_own(prefix)
        folder.mkdir(mode=0o700)
        try:
            handle = _locked(folder)
            return (folder, handle) if handle is not None else (folder.rename(f"{folder}{_UNLOCKED}"), None)
        except (BlockingIOError, FileNotFoundError):  # somebody who sweeps saw it before it was locked
            continue
        except OSError:
            remove_tree(folder)
            raise
    raise FileNotFoundError(f"others remove what is made in {parent}")


def new_file(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new file of this process and the handle to write it, which locks it until it is closed, where there are locks.

    OSError where none can be made.
    """
    for _ in range(_TRIES):
        file = parent / name_of_own(prefix)
        handle = open_new(file)
        try:
            _hold(file, handle)
            return file, handle
        except OSError as error:
            os.close(handle)
            if not isinstance(error, (BlockingIOError, FileNotFoundError)):  # as above
                file.unlink(missing_ok=True)
                raise
    raise FileNotFoundError(f"others remove what is made in {parent}")


@contextlib.contextmanager
def replacing(path: Path, aside: Path, prefix: str) -> Iterator[int]:
    """A handle to a new file in `aside` (same file system), which takes the place of `path` at the end, in one step."""
    made, handle = new_file(aside, prefix)
    try:
        try:
            yield handle
            if os.name == "posix":  # elsewhere an open file cannot be moved, and none is locked
                os.replace(made, path)
        finally:
            os.close(handle)
        if os.name != "posix":
            os.replace(made, path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: bytes, aside: Path) -> None:
    """Gives a file a new content in one step, through a new one in `aside`."""
    with replacing(path, aside, "new-") as handle:
        write_all(handle, content)


def remove_left(path: Path) -> None:
    """Removes a file or directory that a dead process left; one that a living process needs stays."""
    handle, free = _seized(path)
    try:
        name = _NAME.fullmatch(path.name)
        if free is None or (name is not None and name[3]):
            free = _is_old(path) and not _may_live(path)
        elif name is None:  # nobody of this version gave it
            free = free and _is_old(path)
        if free:
            remove_tree(path)
    finally:
        if handle is not None:
            os.close(handle)


def _locked(path: Path) -> int | None:
    """A handle that holds a directory; None where there are no locks. Raises what `_hold` raises, and OSError."""
    if flock() is None:
        return None
    handle, held = os.open(path, os.O_RDONLY), False
    try:
        held = _hold(path, handle)
    finally:
        if not held:
            os.close(handle)
    return handle if held else None


def _hold(path: Path, handle: int) -> bool:
    """Lock what was made just now as long as it is open; False where there are no locks.

    BlockingIOError or FileNotFoundError: somebody who sweeps took it for left before it was locked.
    """
    lock = flock()
    if lock is None:
        return False
    try:
        lock.flock(handle, lock.LOCK_SH | lock.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        log.debug("%s is not locked: %s", path, error)
        return False
    found, held = path.lstat(), os.fstat(handle)
    if (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return True


def _seized(path: Path) -> tuple[int | None, bool | None]:
    """A handle that keeps others from holding it, and whether nobody held it; None where that cannot be told."""
    lock = flock()
    if lock is None:
        return None, None
    try:
        kind = path.lstat().st_mode
        is_folder = stat.S_ISDIR(kind)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) if is_folder else open_plain(path)
    except OSError:
        return None, None
    try:
        lock.flock(handle, lock.LOCK_EX | lock.LOCK_NB)
    except BlockingIOError:
        return handle, False
    except OSError:  # no locks here
        return handle, None
    return handle, True


def _is_old(path: Path) -> bool:
    return time.time() - modified(path) > STALE


def _may_live(path: Path) -> bool:
    """Whether a process of the number in its name lives on this machine; False where that cannot be asked."""
    found = _NUMBER.match(path.name)
    if os.name != "posix" or found is None or not 0 < int(found[1]) < 1 << 31:
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives and is another user's
        return True
    return True
