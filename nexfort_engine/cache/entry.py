# SPDX-License-Identifier: Apache-2.0
"""One entry of the store: its manifest, and the checks it has to pass before anything of it is loaded.

An entry is a directory `<primary>/<id>/` with `manifest.json` and `payload/`. The manifest lists size and
SHA-256 of every payload file. Beside them `last_used` and `pinned` may lie, which are no part of what was made.
Nothing here writes or loads.
"""

from __future__ import annotations

import functools
import hashlib
import json
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

from . import payload, trust, usage
from .fs import NotPlainError, read_plain
from .key import package_version
from .payload import TornError
from .trust import DistrustError, Trust

SCHEMA = 1
ID_LENGTH = 24
MANIFEST = "manifest.json"
PAYLOAD = "payload"
MANIFEST_LIMIT = 16 << 20
# What the store adds, and what a caller may tell about an artefact without making it another one ("info").
NOT_IDENTITY = frozenset({"schema", "id", "primary", "created", "made_by", "files", "info"})
_HEX = re.compile(r"[0-9a-f]{16,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


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
    # SHA-256 of the manifest as it was read, and what the index says it should be, if it speaks of this entry.
    digest: str = field(default="", compare=False, repr=False)
    listed: str | None = field(default=None, compare=False, repr=False)
    trust: Trust = field(default_factory=trust.own, compare=False, repr=False)

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
        used = usage.use(self.path / usage.LAST_USED, self.trust)[0]
        return self.created if used is None else used

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
        return usage.is_pinned(self.path)

    @property
    def shapes(self) -> list[str]:
        """The sizes of calls that it was seen to serve, at most 16, newest last."""
        return usage.use(self.path / usage.LAST_USED, self.trust)[1]

    def verify(self, quick: bool = False) -> str | None:
        """Why the payload must not be loaded, or None. `quick` looks at owners, modes and sizes and reads no file."""
        try:
            self.check_place()
            payload.check(self.payload, self.manifest["files"], self.trust, quick)
        except (TornError, DistrustError) as error:
            return str(error)
        except OSError as error:
            return f"the payload cannot be read: {error}"
        return None

    def check_place(self) -> None:
        """DistrustError if somebody else could have written here; TornError if the index knows another manifest."""
        check_folders(self.path, self.trust, alone=not self.persistent)
        if self.persistent:
            self.trust.check(self.path / MANIFEST, (self.path / MANIFEST).lstat())
        if self.listed is not None and self.listed != self.digest:
            raise TornError(f"its {MANIFEST} was altered: its SHA-256 is not the one in the index")


def check_folders(path: Path, trusted: Trust, alone: bool = False) -> os.stat_result:
    """Owner and mode of an entry's directory and, unless it stands `alone`, of the one of its key."""
    if not alone:
        trusted.check(path.parent, path.parent.lstat())
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise TornError("it is not a directory (symbolic links are not followed)")
    trusted.check(path, info)
    return info


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


def manifest_text(manifest: Mapping[str, Any]) -> bytes:
    """The one form in which a manifest is written."""
    return json.dumps(manifest, sort_keys=True, indent=1).encode()


def read_entry(path: Path, trusted: Trust | None = None, base: bool = False) -> Entry:
    """The entry in the directory `path`, by its manifest alone.

    TornError if it is not a sound one, DistrustError if somebody else could have written it.
    """
    trusted = trust.own() if trusted is None else trusted
    info = check_folders(path, trusted)
    try:
        inner = (path / PAYLOAD).lstat()
    except FileNotFoundError:
        raise TornError(f"it has no {PAYLOAD} directory") from None
    if not stat.S_ISDIR(inner.st_mode):
        raise TornError(f"its {PAYLOAD} is not a directory")
    trusted.check(path / PAYLOAD, inner)
    text = _read_manifest(path / MANIFEST, trusted)
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TornError(f"its {MANIFEST} is not JSON: {error}") from None
    check_manifest(manifest, path.parent.name, path.name)
    digest = hashlib.sha256(text).hexdigest()
    seen = (info.st_dev, info.st_ino)
    return Entry(path.name, path.parent.name, path, manifest, base=base, seen=seen, digest=digest, trust=trusted)


def _read_manifest(path: Path, trusted: Trust) -> bytes:
    try:
        return read_plain(path, MANIFEST_LIMIT, functools.partial(trusted.check, path))
    except FileNotFoundError:
        raise TornError(f"it has no {MANIFEST}") from None
    except NotPlainError as error:
        raise TornError(f"its {error.strerror}") from None


def check_manifest(manifest: Any, primary: str, name: str) -> None:
    """TornError unless this is the manifest of the entry `name` under the key `primary`; OtherSchemaError."""
    if not isinstance(manifest, dict):
        raise TornError(f"its {MANIFEST} holds a {type(manifest).__name__}, expected an object")
    schema = manifest.get("schema")
    if isinstance(schema, int) and not isinstance(schema, bool) and schema != SCHEMA:
        raise OtherSchemaError(f"its {MANIFEST} has schema {schema}, this engine reads {SCHEMA}")
    if schema != SCHEMA:
        raise TornError(f"its {MANIFEST} has no schema number")
    if manifest.get("id") != name or manifest.get("primary") != primary:
        raise TornError(f"its {MANIFEST} belongs to another entry")
    try:
        identity = entry_id(primary, manifest)
        parse_time(manifest["created"])
    except (KeyError, TypeError, ValueError, OverflowError, OSError, RecursionError) as error:
        raise TornError(f"its {MANIFEST} is damaged: {error!r}") from None
    if identity != name:
        raise TornError(f"its {MANIFEST} was altered: it hashes to {identity}")
    made_by = manifest.get("made_by")
    if not isinstance(made_by, dict) or not isinstance(manifest.get("files"), dict):
        raise TornError(f"its {MANIFEST} lacks the list of files or who made them")
    for file, facts in manifest["files"].items():
        if not (isinstance(facts, list) and len(facts) == 2 and _is_file_facts(*facts)):
            raise TornError(f"its {MANIFEST} lists {file!r} without a size and a SHA-256")


def _is_file_facts(size: object, digest: object) -> bool:
    plain_int = isinstance(size, int) and not isinstance(size, bool) and size >= 0
    return plain_int and isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None
