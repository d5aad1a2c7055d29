# SPDX-License-Identifier: Apache-2.0
"""The few file operations the store is made of, each safe against other processes doing the same at once.

It knows no entries and no manifests.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

log = logging.getLogger("nexfort")

_BINARY = getattr(os, "O_BINARY", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


class NotPlainError(OSError):
    """Something lies where a regular file was expected: a link, a pipe, a directory, a file that is far too large."""


def listing(folder: Path, begin: str = "") -> list[Path]:
    """What lies in a directory, but hidden files; nothing if it is missing, a file, or a symbolic link.

    begin: with which the names begin.
    """
    try:
        if os.path.islink(folder):
            return []
        names = sorted(name for name in os.listdir(folder) if name.startswith(begin) and name[0] != ".")
        return [folder / name for name in names]
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            log.info("the cache directory %s cannot be read: %s", folder, error)
        return []


def identity(path: Path) -> tuple[int, int] | None:
    """Which file or directory lies there (device, inode); None if there is none."""
    try:
        info = path.lstat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


def modified(path: Path) -> float:
    """When it was last written, in seconds; now if it cannot be asked, so that nobody takes it for old."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return time.time()


def make_private(folder: Path) -> None:
    """Creates a directory only this user can enter; parents follow the user's own umask."""
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, f"found a file at {error.filename}, expected a directory") from error


def open_plain(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """A handle to a regular file: never through a symbolic link, never of a pipe that would block.

    What lies there is looked at before it is opened, because opening a device can do something, and again after.
    """
    try:
        _check_regular(path, os.lstat(path))
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    try:
        handle = os.open(path, flags | _NOFOLLOW | _NONBLOCK | _BINARY, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK):
            raise
        raise _is_a_link(path) from None
    try:
        _check_regular(path, os.fstat(handle))
    except NotPlainError:
        os.close(handle)
        raise
    return handle


def _check_regular(path: Path | str, info: os.stat_result) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise _is_a_link(path)
    if not stat.S_ISREG(info.st_mode):
        raise NotPlainError(errno.EINVAL, f"{os.path.basename(path)} is not a regular file")


def _is_a_link(path: Path | str) -> NotPlainError:
    return NotPlainError(errno.ELOOP, f"{os.path.basename(path)} is a symbolic link, expected a file")


def read_plain(path: Path | str, most: int, check: Callable[[os.stat_result], None] | None = None) -> bytes:
    """The content of a regular file of at most so many bytes. `check` looks at owner and mode before it is read."""
    with os.fdopen(open_plain(path), "rb") as file:
        info = os.fstat(file.fileno())
        if check is not None:
            check(info)
        content = file.read(most + 1) if info.st_size <= most else b""
    if info.st_size > most or len(content) > most:
        raise NotPlainError(errno.EFBIG, f"{os.path.basename(path)} is larger than {most} bytes")
    return content


def open_new(path: Path) -> int:
    """A handle to write a file that must not exist yet and that only this user can read; FileExistsError otherwise."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _NOFOLLOW | _BINARY, 0o600)


def write_new(path: Path, content: bytes, durable: bool = True) -> None:
    """Writes a file that must not exist yet; FileExistsError otherwise."""
    handle = open_new(path)
    try:
        write_all(handle, content)
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, content: bytes) -> None:
    """os.write until everything is written: on a disk that becomes full it writes a part first."""
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def sync_directory(folder: Path) -> None:
    """Makes a rename durable where directories can be synced (not on Windows, not on every network share).

    The rename itself has succeeded by then, so a failure here is noted and no more.
    """
    if os.name != "posix":
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        log.debug("%s is not synced: %s", folder, error)


def move_directory(source: Path, target: Path, staging: Path) -> None:
    """Renames a directory; on Windows a copy of it, where a library in it is loaded."""
    try:
        os.rename(source, target)
    except PermissionError:
        if os.name != "nt" or target.exists():
            raise
        # Windows does not move a directory while a library in it is loaded; a copy of it can be moved.
        copy = staging / f"{os.getpid()}-{secrets.token_hex(8)}"
        shutil.copytree(source, copy, symlinks=True)
        os.rename(copy, target)


def remove_tree(path: Path) -> None:
    """Removes a directory or a file as far as possible; what cannot be removed is left to a later sweep."""

    def forgive(function: Callable[..., Any], path: str, info: Any) -> None:
        log.debug("%s is not removed: %s", path, info[1] if isinstance(info, tuple) else info)

    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
    except OSError as error:
        log.debug("%s is not removed: %s", path, error)
        return
    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=forgive)
    else:
        shutil.rmtree(path, onerror=forgive)


def flock() -> ModuleType | None:
    """The module with flock; None on Windows."""
    with contextlib.suppress(ImportError):
        import fcntl

        return fcntl
    return None
