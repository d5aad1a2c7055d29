# SPDX-License-Identifier: Apache-2.0
"""Artefacts on disk: staged privately, committed in one rename, found by primary key, bounded in size.

    root/entries/<primary>/<id>/{manifest.json, payload/, last_used}     root/staging/   root/broken/
    root/index.json

Reading and committing need no lock: an entry appears whole or not at all. What is torn or foreign is moved to
`broken/` and never an error. A directory that cannot be written costs persistence only: entries then live in
a temporary directory of this process. Nothing here loads or executes a payload; callers do, after
`Entry.verify()`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import index
from .attic import Attic
from .disk import (
    identity,
    listing,
    make_private,
    move_directory,
    remove_tree,
    sync_directory,
    write_new,
)
from .entry import LAST_USED as LAST_USED_FILE
from .entry import (
    MANIFEST,
    PAYLOAD,
    PINNED,
    SCHEMA,
    Entry,
    OtherSchemaError,
    TornError,
    entry_id,
    hash_tree,
    is_key,
    made_by,
    now_text,
    read_entry,
)
from .lock import LockTimeout, bounded_lock
from .place import default_limit, default_root, parse_size

__all__ = ["Entry", "Removed", "Store", "StoreError", "default_limit", "default_root", "parse_size"]

log = logging.getLogger("nexfort")

RETRY_AFTER = 60.0  # seconds until a directory that could not be written is tried again
LOCK_WAIT = 2.0  # the index is a convenience: nobody waits long for it


class StoreError(RuntimeError):
    """An artefact could not be staged or committed, not even in a temporary directory."""


@dataclass(frozen=True)
class Removed:
    """What pruning or clearing took away."""

    entries: int
    bytes: int


class Store:
    """The artefacts under one root directory, for any number of threads and processes at once.

    Constructing one touches nothing on disk. `problem` says why the last attempt to write failed.
    """

    def __init__(self, root: Path | str, base: Path | str | None = None) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(root)))
        self.problem: str | None = None
        self.base = None if base is None else Store(base)
        self.base_problem: str | None = None
        self._probed: float | None = None
        self._used: set[str] = set()
        self._skip: set[tuple[str, tuple[int, int] | None]] = set()
        self._kept: set[Path] = set()
        self._entries = self.root / "entries"
        self._staging = self.root / "staging"
        self._attic = Attic(self.root / "broken", self._staging)

    # -- reading -----------------------------------------------------------------------------------------

    def candidates(self, primary: str) -> list[Entry]:
        """The entries for one primary key, newest first, by manifest alone; broken ones are set aside."""
        if not is_key(primary) or self._distrust() is not None:
            return []
        read = map(self._read, listing(self._entries / primary))
        found = [entry for entry in read if entry is not None]
        own = sorted(found, key=lambda entry: (entry.created, entry.id), reverse=True)
        return own + self._below(own, primary)

    def find(self, text: str) -> Entry:
        """The entry with this id, or the only one whose id begins so (4 characters at least); LookupError."""
        own = self.entries()
        found = [one for one in own + self._below(own) if one.id.startswith(text)]
        exact = [one for one in found if one.id == text]
        if exact:
            return exact[0]
        if len(text) < 4:
            raise LookupError(f"found {text!r}, expected an id or at least its first 4 characters; `list` shows them")
        if not found:
            raise LookupError(f"no entry's id begins with {text!r}; `list` shows those that are there")
        if len(found) > 1:
            names = ", ".join(sorted(one.id for one in found))
            raise LookupError(f"{text!r} is the beginning of several ids: {names}; give more of the one you mean")
        return found[0]

    def verify_all(self) -> list[tuple[Entry, str | None]]:
        """Every entry with the reason why it must not be loaded, or None; reads everything, changes nothing."""
        own = self.entries()
        return [(one, one.verify()) for one in own + self._below(own)]

    def _below(self, own: list[Entry], primary: str | None = None) -> list[Entry]:
        """Entries of the base cache that are not among `own`."""
        if self.base is None:
            return []
        found = self.base.entries() if primary is None else self.base.candidates(primary)
        ids = {one.id for one in own}
        return [replace(one, base=True) for one in found if one.id not in ids]

    def entries(self) -> list[Entry]:
        """Every sound entry, newest first; broken ones are set aside."""
        if self._distrust() is not None:
            return []
        primaries = [path.name for path in listing(self._entries) if is_key(path.name)]
        found = [entry for primary in primaries for entry in self.candidates(primary)]
        return sorted(found, key=lambda entry: (entry.created, entry.id), reverse=True)

    def rows(self) -> list[dict[str, Any]]:
        """The readable table of all entries, oldest first; from the index as long as it is true."""
        if self._distrust() is not None:
            return []
        rows = index.read(self.root)
        if rows is None or not index.agrees(rows, self._on_disk()):
            rows = self._rebuild_index()
        found = [self._row(row) for row in rows]
        if self.base is not None:
            ids = {row["id"] for row in found}
            found += [{**row, "base": True} for row in self.base.rows() if row["id"] not in ids]
        return found

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        entry = Entry(row["id"], row["primary"], self._entries / row["primary"] / row["id"], {})
        more = {"pinned": entry.pinned, "shapes": entry.shapes, "base": False, "problem": None}
        return {**row, "last_used": self._last_used(row), **more}

    def touch(self, entry: Entry) -> None:
        """Records that an artefact was loaded from `entry` now. Never raises: only eviction depends on it."""
        self._used.add(entry.id)
        if not entry.persistent or entry.base:
            return
        file = entry.path / LAST_USED_FILE
        try:
            file.touch(mode=0o600)
        except OSError as error:
            log.debug("the time of last use of %s is not recorded: %s", entry.id, error)

    def note_shape(self, entry: Entry, text: str) -> None:
        """Remembers the sizes of a call that `entry` served, such as "2x4096x1536, 2x77x2048". Never raises."""
        if not entry.persistent or entry.base or text in entry.shapes:
            return
        try:
            content = "\n".join([*entry.shapes, text][-16:])
            (entry.path / LAST_USED_FILE).write_text(content, encoding="utf-8")
        except OSError as error:
            log.debug("a shape of %s is not recorded: %s", entry.id, error)

    # -- writing -----------------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether entries can be committed; if not, `problem` says why, and it is tried again in a minute."""
        fresh = self._probed is not None and time.monotonic() - self._probed < RETRY_AFTER
        if self.problem is not None and fresh:
            return False
        if self._probed is None or self.problem is not None:
            self._probe()
        return self.problem is None

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """A private directory for one artefact: write it into its `payload` folder, then commit it.

        It is removed at the end unless it was committed. Where the store cannot be written it lies in the
        system's temporary directory; StoreError if that fails too.
        """
        folder = self._new_stage()
        try:
            yield folder
        finally:
            if folder not in self._kept:
                remove_tree(folder)

    def commit(self, primary: str, staged: Path, manifest: Mapping[str, Any]) -> Entry:
        """Makes the staged directory an entry in one step; an equal entry that is there already is kept.

        `manifest` is JSON-able and identifies the artefact together with `primary`, but for its key "info",
        where anything readable may stand. Where the store cannot be written, the entry is not persistent: it
        lives in the staged directory until the process ends, and `problem` says why.
        """
        return self._put(self._complete(primary, Path(staged), manifest))

    def _put(self, entry: Entry) -> Entry:
        if not self.writable or entry.path.parent != self._staging:
            return self._keep(entry)
        try:
            entry = self._publish(entry)
        except OSError as error:
            self._failed(error)
            return self._keep(entry)
        self._used.add(entry.id)
        self._after_commit(entry)
        return entry

    def adopt(self, manifest: Mapping[str, Any], staged: Path) -> Entry:
        """Like commit, for an entry that was made elsewhere: its manifest is kept as it is.

        ValueError if the manifest is not sound or the staged payload is not exactly what it lists.
        """
        whole = json.loads(json.dumps(dict(manifest)))
        staged = Path(staged)
        if entry_id(whole.get("primary", ""), whole) != whole.get("id"):
            raise ValueError("the manifest was altered: its id is not the hash of what it says")
        try:
            files = hash_tree(staged / PAYLOAD)
        except (OSError, TornError) as error:
            raise ValueError(f"the staged artefact cannot be read back: {error}") from error
        if files != whole.get("files"):
            raise ValueError("the staged files are not those that the manifest lists")
        entry = Entry(whole["id"], whole["primary"], staged, whole, persistent=False, seen=identity(staged))
        return self._put(entry)

    def pin(self, entry_id: str, pinned: bool = True) -> Entry:
        """Marks an entry to stay when the cache is pruned, or takes the mark away; LookupError if there is none."""
        entry = self.find(entry_id)
        if entry.base:
            raise PermissionError(errno.EACCES, f"{entry.id} lies in the read-only base cache and is never removed")
        with self._lock():
            if pinned and not entry.pinned:
                write_new(entry.path / PINNED, b"")
            elif not pinned:
                (entry.path / PINNED).unlink(missing_ok=True)
        return entry

    def remove(self, ids: Iterable[str]) -> Removed:
        """Removes exactly these entries, pinned or not; LookupError for an unknown one before anything goes."""
        chosen = [self.find(one) for one in ids]
        if any(entry.base for entry in chosen):
            raise PermissionError(errno.EACCES, "an entry of the read-only base cache cannot be removed")
        with self._lock():
            gone = [entry for entry in chosen if self._discard(entry.path)]
            ids = {entry.id for entry in gone}
            index.write(self.root, [index.row_of(entry) for entry in self.entries()])
        return Removed(len(gone), sum(entry.size for entry in gone))

    def set_aside(self, entry: Entry, reason: str) -> None:
        """Moves what cannot be used to `broken/`, with the reason beside it; logged once; never raises."""
        if entry.base:
            log.warning("the base cache's entry %s is not used: %s", entry.id, reason)
        elif entry.persistent:
            self._set_aside(entry.path, entry.seen, reason)
        else:
            log.warning("the artefact %s, kept for this process only, is not used: %s", entry.id, reason)

    def prune(self, max_bytes: int | None = None) -> Removed:
        """Removes the least recently used entries until `max_bytes` (default: the limit) hold the rest.

        Entries that this process uses stay. Entries that were set aside and leftovers of dead processes go
        first. LockTimeout if another process prunes; OSError if the store cannot be written.
        """
        if not self.root.is_dir():
            return Removed(0, 0)
        limit = default_limit() if max_bytes is None else max_bytes
        with self._lock():
            self._attic.sweep(self._kept)
            entries = sorted(self.entries(), key=lambda entry: entry.last_used)
            total = sum(entry.size for entry in entries)
            gone = []
            for entry in entries:
                if total > limit and not entry.pinned and entry.id not in self._used and self._discard(entry.path):
                    gone.append(entry)
                    total -= entry.size
            index.write(self.root, [index.row_of(entry) for entry in entries if entry not in gone])
        return Removed(len(gone), sum(entry.size for entry in gone))

    def clear(self, pinned: bool = False) -> Removed:
        """Removes every entry but pinned ones (`pinned`: those too), entries set aside and leftovers; nothing else."""
        if not self.root.is_dir():
            return Removed(0, 0)
        with self._lock():
            entries = self.entries()
            self._attic.sweep(self._kept)
            gone = [entry for entry in entries if (pinned or not entry.pinned) and self._discard(entry.path)]
            index.write(self.root, [index.row_of(entry) for entry in entries if entry not in gone])
        return Removed(len(gone), sum(entry.size for entry in gone))

    # -- places ------------------------------------------------------------------------------------------

    def _distrust(self) -> str | None:
        """Why nothing may be read from here: somebody else could have put it there."""
        for folder in (self.root, self._entries, self._staging, self._attic.broken):
            try:
                # The root itself may be a link: many people keep their caches on another disk.
                info = folder.stat() if folder is self.root else folder.lstat()
            except OSError:
                continue  # nothing there: nothing to distrust
            if stat.S_ISLNK(info.st_mode):
                return f"{folder} is a symbolic link, expected a directory"
            if hasattr(os, "geteuid") and os.geteuid() != 0 and info.st_uid not in (0, os.geteuid()):
                return f"{folder} belongs to user {info.st_uid}, not to the user of this process"
        return None

    def _probe(self) -> None:
        self._probed = time.monotonic()
        self.problem = None
        try:
            if (reason := self._distrust()) is not None:
                raise PermissionError(reason)
            make_private(self.root)
            for folder in (self._entries, self._staging, self._attic.broken):
                make_private(folder)
            probe = self._staging / f"probe-{secrets.token_hex(8)}"
            try:
                write_new(probe, b"\0" * 4096)
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self._probed = time.monotonic()
        known = self.problem is not None
        self.problem = (
            f"the cache directory {self.root} cannot be written ({error.strerror or error}); compiled code "
            "is kept for this process only. Make room or give access there, or set NEXFORT_CACHE_DIR"
        )
        if not known:
            log.warning("%s", self.problem)

    # -- committing --------------------------------------------------------------------------------------

    def _new_stage(self) -> Path:
        if self.writable:
            folder = self._staging / f"{os.getpid()}-{secrets.token_hex(8)}"
            try:
                folder.mkdir(mode=0o700)
                (folder / PAYLOAD).mkdir(mode=0o700)
                return folder
            except OSError as error:
                self._failed(error)
        try:
            folder = Path(tempfile.mkdtemp(prefix="nexfort-"))
            (folder / PAYLOAD).mkdir(mode=0o700)
        except OSError as error:
            raise StoreError(
                f"no place for compiled code: {self.problem}; and the temporary directory "
                f"{tempfile.gettempdir()} cannot be written either ({error})"
            ) from error
        return folder

    def _complete(self, primary: str, staged: Path, manifest: Mapping[str, Any]) -> Entry:
        if not is_key(primary):
            raise ValueError(f"found {primary!r} as the primary key, expected 16 to 64 hex digits")
        try:
            files = hash_tree(staged / PAYLOAD)
        except (OSError, TornError) as error:
            raise StoreError(f"the staged artefact cannot be read back: {error}") from error
        if not files:
            raise ValueError(f"nothing to commit: write the artefact into {PAYLOAD}/ of the staged directory")
        whole = dict(manifest) | {"schema": SCHEMA, "primary": primary, "files": files}
        whole |= {"created": now_text(), "made_by": made_by()}
        # Through JSON and back, so that the committing process sees exactly what every later one reads.
        whole = json.loads(json.dumps(whole))
        whole["id"] = entry_id(primary, whole)
        return Entry(whole["id"], primary, staged, whole, persistent=False, seen=identity(staged))

    def _publish(self, entry: Entry) -> Entry:
        text = json.dumps(entry.manifest, sort_keys=True, indent=1)
        write_new(entry.path / MANIFEST, text.encode())
        target = self._entries / entry.primary / entry.id
        for _ in range(3):
            if target.parent.is_symlink() or target.parent.is_file():
                self._set_aside(target.parent, identity(target.parent), "expected a directory of entries")
            make_private(target.parent)
            if (existing := self._read(target)) is not None and existing.verify(quick=True) is None:
                return existing
            if existing is not None:
                self.set_aside(existing, existing.verify(quick=True) or "it was replaced")
            try:
                move_directory(entry.path, target, self._staging)
            except FileNotFoundError:
                if not entry.path.is_dir():
                    raise
                continue  # another process cleared the store and took the parent
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    continue  # another process was first: look at what it left
                raise
            sync_directory(target.parent)
            return Entry(entry.id, entry.primary, target, entry.manifest, seen=identity(target))
        raise FileExistsError(errno.EEXIST, f"{target} is in the way and cannot be moved")

    def _keep(self, entry: Entry) -> Entry:
        """Lets a staged directory live to the end of the process, as an entry that nobody else sees."""
        if entry.path not in self._kept:
            self._kept.add(entry.path)
            atexit.register(_remove_own, entry.path, os.getpid())
        return entry

    def _after_commit(self, entry: Entry) -> None:
        """Index and size limit; both can wait for the next commit, so a busy lock is only noted."""
        try:
            with self._lock(LOCK_WAIT):
                rows = index.read(self.root)
                if rows is None:
                    rows = [index.row_of(one) for one in self.entries()]
                elif all(row["id"] != entry.id or row["primary"] != entry.primary for row in rows):
                    rows.append(index.row_of(entry))
                index.write(self.root, rows)
            if sum(row["size"] for row in rows) > default_limit():
                self.prune()
        except (LockTimeout, OSError) as error:
            log.debug("the cache index is not brought up to date now: %s", error)

    # -- index -------------------------------------------------------------------------------------------

    def _on_disk(self) -> list[tuple[str, str]]:
        primaries = [path for path in listing(self._entries) if is_key(path.name)]
        return [(one.name, path.name) for one in primaries for path in listing(one) if is_key(path.name)]

    def _rebuild_index(self) -> list[dict[str, Any]]:
        rows = [index.row_of(entry) for entry in reversed(self.entries())]
        try:
            if self.root.is_dir():
                with self._lock(LOCK_WAIT):
                    index.write(self.root, rows)
        except (LockTimeout, OSError) as error:
            log.debug("the cache index is not written: %s", error)
        return rows

    def _last_used(self, row: Mapping[str, Any]) -> float | None:
        try:
            return (self._entries / row["primary"] / row["id"] / LAST_USED_FILE).stat().st_mtime
        except OSError:  # never loaded since it was made
            return None

    # -- taking away -------------------------------------------------------------------------------------

    def _read(self, path: Path) -> Entry | None:
        """The entry at `path`; None if there is none, and what lies there instead is set aside."""
        seen = identity(path)
        if seen is None or (str(path), seen) in self._skip:
            return None
        try:
            return read_entry(path)
        except FileNotFoundError:
            return None  # evicted just now
        except OtherSchemaError as error:
            log.debug("%s is left alone: %s", path, error)
        except TornError as error:
            self._set_aside(path, seen, str(error))
        except OSError as error:
            log.info("the cache entry %s is skipped: %s", path.name, error)
        return None

    def _set_aside(self, path: Path, seen: tuple[int, int] | None, reason: str) -> None:
        if (str(path), seen) in self._skip:
            return
        if identity(path) != seen:
            log.debug("%s was replaced by another process in the meantime; it stays", path)
            return
        log.warning("the cache entry %s is set aside: %s", path.name, reason)
        try:
            self._attic.move(path, reason)
        except OSError as error:
            self._skip.add((str(path), seen))
            log.info("the cache entry %s stays where it is and is skipped: %s", path.name, error)

    def _discard(self, path: Path) -> bool:
        if not self._attic.discard(path):
            return False
        with contextlib.suppress(OSError):  # other entries of this key remain
            path.parent.rmdir()
        return True

    def _lock(self, timeout: float = 10.0) -> contextlib.AbstractContextManager[None]:
        if not self.writable:
            raise PermissionError(errno.EACCES, self.problem)
        return bounded_lock(self.root / "lock", timeout)


def _remove_own(folder: Path, process: int) -> None:
    """Removes a temporary directory at exit; a forked child runs this too, and must not take its parent's."""
    if os.getpid() == process:
        remove_tree(folder)
