# SPDX-License-Identifier: Apache-2.0
"""The files of one artefact: listed with size and SHA-256, made private, checked, and copied while they are checked.

Files that are not listed (locks, byte code) are no part of an artefact and are never copied to where it is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .fs import NotPlainError, open_plain, remove_tree, write_all
from .trust import Trust

BLOCK = 1 << 20
# Written while an artefact is made; they may change at any time and are not part of it.
_UNLISTED_SUFFIXES = (".lock", ".pyc", ".tmp")


class TornError(Exception):
    """An entry cannot be used; the text says what was found and what was expected."""


def seal(payload: Path) -> dict[str, list[Any]]:
    """{relative path: [size, SHA-256]} of an artefact, all of it private to the user from now on, with its directory.

    A compiler writes with the process's umask, which may let a group in. Byte code is removed, locks are left out.
    """
    found: dict[str, list[Any]] = {}
    _make_mode(payload.parent, 0o700)
    for folder, folders, files in os.walk(payload, onerror=_raise):
        for name in [name for name in folders if name == "__pycache__"]:
            remove_tree(Path(folder, name))
            folders.remove(name)
        for name in (*folders, *files):
            if Path(folder, name).is_symlink():
                raise TornError(f"{name} is a symbolic link; an artefact consists of plain files")
        _make_mode(folder, 0o700)
        for name in files:
            path = Path(folder, name)
            _make_mode(path, 0o600)
            if not name.endswith(_UNLISTED_SUFFIXES):
                found[path.relative_to(payload).as_posix()] = _read_hash(path)
    return found


def check(payload: Path, files: Mapping[str, list[Any]], trust: Trust, quick: bool = False) -> None:
    """Every listed file is there with its size and, unless `quick`, its SHA-256; TornError, DistrustError otherwise.

    Owners and modes of all of them are looked at before the first byte is read.
    """
    paths = {name: _place(payload, name) for name in files}
    _check_tree(payload, files, trust)
    for name, path in paths.items():
        _check_facts(path, name, files[name][0], trust)
    if not quick:
        for name, path in paths.items():
            _check_hash(name, files[name], _told(name, functools.partial(_read_hash, path)))


def copy(payload: Path, files: Mapping[str, list[Any]], trust: Trust, target: Path) -> None:
    """Copies the listed files, checked as above while they are read, so that what is loaded is what was checked."""
    check(payload, files, trust, quick=True)
    target.mkdir(mode=0o700)
    for inner in _folders(files):  # one by one: with parents=True only the last would get the mode
        _place(target, inner).mkdir(mode=0o700)
    for name, facts in files.items():
        place = _place(target, name)
        _check_hash(name, facts, _told(name, functools.partial(_copy_hash, _place(payload, name), place)))


def _folders(files: Mapping[str, list[Any]]) -> list[str]:
    """The directories that listed files lie in, the outer ones first."""
    found = set()
    for name in files:
        while name := name.rpartition("/")[0]:
            found.add(name)
    return sorted(found)


def _make_mode(path: str | Path, mode: int) -> None:
    if os.name == "posix" and stat.S_IMODE(os.lstat(path).st_mode) != mode:
        os.chmod(path, mode)


def _blocks(path: Path) -> Iterator[bytes]:
    handle = open_plain(path)
    try:
        while block := os.read(handle, BLOCK):
            yield block
    finally:
        os.close(handle)


def _read_hash(path: Path) -> list[Any]:
    digest, size = hashlib.sha256(), 0
    for block in _blocks(path):
        digest.update(block)
        size += len(block)
    return [size, digest.hexdigest()]


def _copy_hash(path: Path, target: Path) -> list[Any]:
    digest, size = hashlib.sha256(), 0
    handle = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o600)
    try:
        for block in _blocks(path):
            digest.update(block)
            size += len(block)
            write_all(handle, block)
    finally:
        os.close(handle)
    return [size, digest.hexdigest()]


def _place(payload: Path, name: str) -> Path:
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\\" in part or ":" in part or "\0" in part for part in parts):
        raise TornError(f"the manifest lists {name!r}, which is not a path inside the payload")
    return payload.joinpath(*parts)


def _told(name: str, read: Callable[[], Any]) -> Any:
    """The result of `read`, whose failures say of which file they are."""
    try:
        return read()
    except (FileNotFoundError, NotADirectoryError):
        raise TornError(f"the payload file {name} is missing") from None
    except NotPlainError as error:
        raise TornError(f"the payload file {name} is not a regular file: {error.strerror}") from None
    except ValueError as error:  # a name that no file can have
        raise TornError(f"the manifest lists {name!r}, which no file can be called: {error}") from None


def _check_facts(path: Path, name: str, size: int, trust: Trust) -> None:
    info = _told(name, path.lstat)
    if not stat.S_ISREG(info.st_mode):
        raise TornError(f"the payload file {name} is not a regular file")
    trust.check(path, info)
    if info.st_size != size:
        raise TornError(f"the payload file {name} has {info.st_size} bytes, the manifest says {size}")


def _check_hash(name: str, expected: list[Any], found: list[Any]) -> None:
    if found != expected:
        raise TornError(f"the payload file {name} is not what was stored: its SHA-256 differs")


def _check_tree(payload: Path, files: Mapping[str, list[Any]], trust: Trust) -> None:
    """No symbolic link anywhere in the payload, and no directory of it in which somebody else could put a file."""
    info = os.lstat(payload)
    if stat.S_ISLNK(info.st_mode):
        raise TornError("the payload is a symbolic link")
    if not stat.S_ISDIR(info.st_mode):
        raise TornError("the payload is not a directory")
    trust.check(payload, info)
    for folder, folders, names in os.walk(payload, onerror=_raise):
        for name in (*folders, *names):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                raise TornError(f"the payload holds a symbolic link: {os.path.relpath(path, payload)}")
    for inner in _folders(files):
        path = os.path.join(payload, *inner.split("/"))
        trust.check(path, _told(inner, functools.partial(os.lstat, path)))


def _raise(error: OSError) -> None:
    raise error
