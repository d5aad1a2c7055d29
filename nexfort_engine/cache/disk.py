# SPDX-License-Identifier: Apache-2.0
"""The few file operations the store is made of, each safe against other processes doing the same at once.

It knows no entries and no manifests.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("nexfort")


def listing(folder: Path) -> list[Path]:
    """What lies in a directory, but hidden files; nothing if it is missing, a file, or a symbolic link."""
    try:
        if folder.is_symlink():
            return []
        return [folder / name for name in sorted(os.listdir(folder)) if not name.startswith(".")]
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            log.info("the cache directory %s cannot be read: %s", folder, error)
        return []


def identity(path: Path) -> tuple[int, int] | None:
    try:
        info = path.lstat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


def modified(path: Path) -> float:
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


def write_new(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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
    try:
        os.rename(source, target)
    except PermissionError:
        if os.name != "nt" or target.exists():
            raise
        # Windows does not move a directory while a library in it is loaded; a copy of it can be moved.
        copy = staging / f"{os.getpid()}-{secrets.token_hex(8)}"
        shutil.copytree(source, copy, symlinks=True)
        os.rename(copy, target)


def remove_tree(folder: Path) -> None:
    """Removes a directory as far as possible; what cannot be removed is left to a later sweep."""

    def forgive(function: Callable[..., Any], path: str, info: Any) -> None:
        log.debug("%s is not removed: %s", path, info[1] if isinstance(info, tuple) else info)

    if sys.version_info >= (3, 12):
        shutil.rmtree(folder, onexc=forgive)
    else:
        shutil.rmtree(folder, onerror=forgive)
