# SPDX-License-Identifier: Apache-2.0
"""Who owns what a process makes for itself: directories and files that are locked as long as the process lives.

The system lets go of a lock when its process ends, however it ends. So what a dead process left is known at once, and
what a living one needs is known too. Where a file system has no locks, the name says so, and the number of the process
in the name and the clock decide.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import time
from pathlib import Path

from .disk import flock, modified, open_plain, remove_tree

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
            if handle is None:
                return folder.rename(f"{folder}{_UNLOCKED}"), None
            if _is_at(folder, handle):
                return folder, handle
            os.close(handle)
        except (BlockingIOError, FileNotFoundError):  # somebody who sweeps saw it before it was locked
            continue
        except OSError:
            remove_tree(folder)
            raise
    raise FileNotFoundError(f"others remove what is made in {parent}")


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
    """A handle that holds a directory; None where there are no locks. OSError: there is no handle to be had."""
    lock = flock()
    if lock is None:
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        lock.flock(handle, lock.LOCK_SH | lock.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        log.debug("%s is not locked: %s", path, error)
        return None
    return handle


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


def _is_at(folder: Path, handle: int) -> bool:
    """Whether the directory that is open is the one that lies there."""
    found, held = folder.lstat(), os.fstat(handle)
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


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
