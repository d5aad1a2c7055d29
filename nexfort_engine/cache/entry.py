# SPDX-License-Identifier: Apache-2.0
"""One entry of the store: its manifest, and the checks it has to pass before anything of it is loaded.

An entry is a directory `<primary>/<id>/` with `manifest.json` and `payload/`. The manifest lists size and
SHA-256 of every payload file. Files that are not listed (locks, byte code, what the compiler links again
while loading) are ignored. Nothing here writes or loads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .disk import remove_tree
from .key import package_version

log = logging.getLogger("nexfort")

SCHEMA = 1
ID_LENGTH = 24
MANIFEST = "manifest.json"
PAYLOAD = "payload"
LAST_USED = "last_used"
PINNED = "pinned"
MOST_SHAPES = 16
MANIFEST_LIMIT = 16 << 20
# What the store adds, and what a caller may tell about an artefact without making it another one ("info").
NOT_IDENTITY = frozenset({"schema", "id", "primary", "created", "made_by", "files", "info"})
# Written while an artefact is loaded or used; they may change at any time and are not part of it.
_UNLISTED_SUFFIXES = (".lock", ".pyc", ".tmp")
_HEX = re.compile(r"[0-9a-f]{16,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class TornError(Exception):
    """An entry cannot be used; the text says what was found and what was expected."""


class OtherSchemaError(Exception):
    """An entry of another version of the store: sound as far as we know, but not ours to read or to move."""


def is_key(name: str) -> bool:
    """Whether a directory name can be a primary key or an entry id."""
    return _HEX.fullmatch(name) is not None


def entry_id(primary: str, manifest: Mapping[str, Any]) -> str:
    """The id of an entry: the hash of its primary key and of all in the manifest that identifies it."""
    identity = {name: value for name, value in manifest.items() if name not in NOT_IDENTITY}
    text = json.dumps([SCHEMA, primary, identity], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


@dataclass(frozen=True)
class Entry:
    """One artefact on disk in `path`. `persistent` is False for one that lives only in this process."""

    id: str
    primary: str
    path: Path
    manifest: dict[str, Any] = field(compare=False, repr=False)
    persistent: bool = True
    # Whether it lies in the read-only base cache, where nothing is ever changed.
    base: bool = False
    # Which directory was read (device, inode): another process may have put a good entry in its place since.
    seen: tuple[int, int] | None = field(default=None, compare=False, repr=False)

    @property
    def payload(self) -> Path:
        """The directory with the artefact's files."""
        return self.path / PAYLOAD

    @property
    def size(self) -> int:
        """Bytes of the listed payload files."""
        return sum(size for size, _ in self.manifest["files"].values())

    @property
    def created(self) -> float:
        """When the entry was committed, in seconds since the epoch."""
        return parse_time(self.manifest["created"])

    @property
    def last_used(self) -> float:
        """When an artefact was last loaded from here (seconds since the epoch); if never, `created`."""
        try:
            return (self.path / LAST_USED).stat().st_mtime
        except OSError:  # never used, or evicted in the meantime
            return self.created

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said about the artefact: region, kind, model, family, machine, fingerprint."""
        found = self.manifest.get("info")
        return found if isinstance(found, dict) else {}

    @property
    def machine(self) -> dict[str, Any]:
        """The machine it was made for, in readable form; empty if nobody said."""
        found = self.info.get("machine")
        return found if isinstance(found, dict) else {}

    @property
    def fingerprint(self) -> str:
        """The hash of all that a machine must have in common with the one it was made on; "" if nobody said."""
        found = self.info.get("fingerprint")
        return found if isinstance(found, str) else ""

    @property
    def pinned(self) -> bool:
        """Whether it stays when the cache is pruned."""
        return os.path.lexists(self.path / PINNED)

    @property
    def shapes(self) -> list[str]:
        """The sizes of calls that it was seen to serve, newest last."""
        try:
            text = (self.path / LAST_USED).read_text(encoding="utf-8", errors="replace")
        except OSError:  # never used
            return []
        return list(dict.fromkeys(reversed(text.split("\n"))))[::-1][-MOST_SHAPES:] if text.strip() else []

    def verify(self, quick: bool = False) -> str | None:
        """Why the payload must not be loaded, or None. `quick` compares sizes only and reads no file."""
        try:
            _check_tree(self.payload)
            for name, (size, digest) in self.manifest["files"].items():
                _check_file(self.payload, name, size, None if quick else digest)
        except TornError as error:
            return str(error)
        except OSError as error:
            return f"the payload cannot be read: {error}"
        return None


def made_by() -> dict[str, str]:
    """Who makes an entry, in readable form."""
    return {
        "nexfort": package_version("nexfort"),
        "torch": package_version("torch"),
        "triton": package_version("triton"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "host": socket.gethostname(),
    }


def now_text() -> str:
    """The present as readable UTC text, fine enough to order entries."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def parse_time(text: str) -> float:
    """Seconds since the epoch of `now_text`'s form; ValueError otherwise."""
    return datetime.fromisoformat(text).timestamp()


def read_entry(path: Path) -> Entry:
    """The entry in the directory `path`, by its manifest alone; TornError if it is not a sound one."""
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise TornError("it is not a directory (symbolic links are not followed)")
    try:
        payload = (path / PAYLOAD).lstat()
    except FileNotFoundError:
        raise TornError(f"it has no {PAYLOAD} directory") from None
    if not stat.S_ISDIR(payload.st_mode):
        raise TornError(f"its {PAYLOAD} is not a directory")
    manifest = _read_manifest(path / MANIFEST)
    _check_manifest(manifest, path)
    return Entry(path.name, path.parent.name, path, manifest, seen=(info.st_dev, info.st_ino))


def _read_manifest(path: Path) -> Any:
    try:
        with open_plain(path) as file:
            text = file.read(MANIFEST_LIMIT + 1)
    except FileNotFoundError:
        raise TornError(f"it has no {MANIFEST}") from None
    if len(text) > MANIFEST_LIMIT:
        raise TornError(f"its {MANIFEST} is larger than {MANIFEST_LIMIT} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TornError(f"its {MANIFEST} is not JSON: {error}") from None


def _check_manifest(manifest: Any, path: Path) -> None:
    if not isinstance(manifest, dict):
        raise TornError(f"its {MANIFEST} holds a {type(manifest).__name__}, expected an object")
    schema = manifest.get("schema")
    if isinstance(schema, int) and not isinstance(schema, bool) and schema != SCHEMA:
        raise OtherSchemaError(f"its {MANIFEST} has schema {schema}, this engine reads {SCHEMA}")
    if schema != SCHEMA:
        raise TornError(f"its {MANIFEST} has no schema number")
    if manifest.get("id") != path.name or manifest.get("primary") != path.parent.name:
        raise TornError(f"its {MANIFEST} belongs to another entry")
    try:
        identity = entry_id(path.parent.name, manifest)
        parse_time(manifest["created"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TornError(f"its {MANIFEST} is damaged: {error!r}") from None
    if identity != path.name:
        raise TornError(f"its {MANIFEST} was altered: it hashes to {identity}")
    made_by = manifest.get("made_by")
    if not isinstance(made_by, dict) or not isinstance(manifest.get("files"), dict):
        raise TornError(f"its {MANIFEST} lacks the list of files or who made them")
    for name, facts in manifest["files"].items():
        if not (isinstance(facts, list) and len(facts) == 2 and _is_file_facts(*facts)):
            raise TornError(f"its {MANIFEST} lists {name!r} without a size and a SHA-256")


def _is_file_facts(size: object, digest: object) -> bool:
    plain_int = isinstance(size, int) and not isinstance(size, bool) and size >= 0
    return plain_int and isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None


def open_plain(path: Path) -> Any:
    """Opens a regular file for reading; never through a symbolic link, never a pipe that would block."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if path.is_symlink():
        raise TornError(f"{path.name} is a symbolic link, expected a file")
    handle = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise TornError(f"{path.name} is not a regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def hash_file(path: Path) -> list[Any]:
    """[size, SHA-256] of a regular file."""
    digest = hashlib.sha256()
    size = 0
    with open_plain(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return [size, digest.hexdigest()]


def hash_tree(payload: Path) -> dict[str, list[Any]]:
    """{relative path: [size, SHA-256]} of an artefact; byte code is removed, locks are left out."""
    found: dict[str, list[Any]] = {}
    for folder, folders, files in os.walk(payload):
        for name in [name for name in folders if name == "__pycache__"]:
            remove_tree(Path(folder, name))
            folders.remove(name)
        for name in (*folders, *files):
            if Path(folder, name).is_symlink():
                raise TornError(f"{name} is a symbolic link; an artefact consists of plain files")
        for name in files:
            if not name.endswith(_UNLISTED_SUFFIXES):
                path = Path(folder, name)
                found[path.relative_to(payload).as_posix()] = hash_file(path)
    return found


def _check_file(payload: Path, name: str, size: int, digest: str | None) -> None:
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\\" in part or ":" in part or "\0" in part for part in parts):
        raise TornError(f"the manifest lists {name!r}, which is not a path inside the payload")
    path = payload.joinpath(*parts)
    try:
        info = path.lstat()
        found = None if digest is None else hash_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise TornError(f"the payload file {name} is missing") from None
    if not stat.S_ISREG(info.st_mode):
        raise TornError(f"the payload file {name} is not a regular file")
    if info.st_size != size:
        raise TornError(f"the payload file {name} has {info.st_size} bytes, the manifest says {size}")
    if found is not None and found != [size, digest]:
        raise TornError(f"the payload file {name} is not what was stored: its SHA-256 differs")


def _check_tree(payload: Path) -> None:
    """No symbolic link anywhere in the payload: whatever loads from it would follow one out of the store."""
    if payload.is_symlink():
        raise TornError("the payload is a symbolic link")
    for folder, folders, files in os.walk(payload, onerror=_raise):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink():
                raise TornError(f"the payload holds a symbolic link: {path.relative_to(payload).as_posix()}")


def _raise(error: OSError) -> None:
    raise error
