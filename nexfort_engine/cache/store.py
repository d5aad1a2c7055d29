# SPDX-License-Identifier: Apache-2.0
"""Artefacts on disk: staged privately, committed in one rename, found by primary key, bounded in size.

    root/entries/<primary>/<id>/{manifest.json, payload/, last_used, pinned}     root/staging/   root/broken/
    root/index.json

Reading and committing need no lock: an entry appears whole or not at all. What is torn or foreign is moved to
`broken/` and never an error. A directory that cannot be written costs persistence only: entries then live in
a temporary directory of this process. Nothing here loads or executes a payload; callers load from the directory
that `Store.ready` gives, whose every byte was checked.

Under it a read-only base cache may lie, whose entries serve where the user's own has none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import index, payload, trust, usage
from .catalog import OTHER_SCHEMA, Seen, Shelf
from .entry import (
    MANIFEST,
    PAYLOAD,
    SCHEMA,
    Entry,
    OtherSchemaError,
    TornError,
    check_manifest,
    entry_id,
    is_key,
    made_by,
    now_text,
)
from .fs import NotPlainError, identity, write_new
from .load_copies import Copies
from .lock import LockTimeout
from .overlay import Library
from .paths import default_limit, default_root, parse_size
from .publish import Publisher
from .quarantine import Attic
from .root_dir import Ground, StoreError
from .staging import Staging
from .trust import DistrustError

__all__ = ["Entry", "Removed", "Store", "StoreError", "default_limit", "default_root", "parse_size"]

log = logging.getLogger("nexfort")

LOCK_WAIT = 2.0  # the index is a convenience: nobody waits long for it


@dataclass(frozen=True)
class Removed:
    """What pruning or clearing took away."""

    entries: int
    bytes: int


class Store:
    """The artefacts under one root directory, for any number of threads and processes at once.

    base: a read-only cache under it. Constructing one touches nothing on disk. `problem` says why the last attempt to
    write failed, `base_problem` why nothing of the base is read.
    """

    def __init__(self, root: Path | str, base: Path | str | None = None) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(root)))
        self.base = None if base is None else Path(os.path.abspath(os.path.expanduser(base)))
        self._used: set[str] = set()
        self._staging = Staging(self.root / "staging")
        self._attic = Attic(self.root / "broken", self._staging)
        beside = (self._staging.folder, self._attic.broken)
        self._one_at_a_time = threading.Lock()
        self._own = Shelf(self.root, trust.own(), folders=beside, torn=self._set_aside)
        self._library = Library(self._own, self.base)
        folders = (self._own.entries, *beside)
        self._ground = Ground(self.root, folders, self._staging, self._own.trust, self._own.distrust)
        self._copies = Copies(self._ground.folder, self._staging)
        self._publisher = Publisher(self._own, self._ground, self._staging, self._set_aside)

    # -- reading -----------------------------------------------------------------------------------------

    def candidates(self, primary: str) -> list[Entry]:
        """The entries for one primary key by manifest alone: the user's own, newest first, then those of the base.

        Broken ones are set aside; those that somebody else could have written are left alone, and the log says why.
        """
        self._ground.begin()
        return self._library.candidates(primary)

    def entries(self) -> list[Entry]:
        """Every sound entry of the user's own cache, newest first; broken ones are set aside."""
        return self._own.all()

    def rows(self) -> list[dict[str, Any]]:
        """The readable table of all entries, oldest first, then those of the base; from the index while it is true.

        `problem` is what a look at names, owners and modes tells; `verify_all` reads everything.
        """
        return self._library.rows(self._rebuild_index)

    def find(self, text: str) -> Entry:
        """The entry with this id, or the only one whose id begins so (4 characters at least); LookupError.

        Also one that must not be loaded: `verify` says so, and of one that is damaged only the id is known.
        """
        return self._library.find(text)

    def verify_all(self) -> list[tuple[Entry, str | None]]:
        """Every entry with the reason why it must not be loaded, or None; reads everything and changes nothing."""
        return self._library.verify_all()

    @property
    def base_problem(self) -> str | None:
        """Why nothing of the base cache is read; None if it is, or if there is none."""
        return self._library.problem

    # -- using -------------------------------------------------------------------------------------------

    def ready(self, entry: Entry, *, elsewhere: bool = False) -> Path:
        """A directory of this process with the entry's payload, to load from; StoreError says why there is none.

        It is a copy, checked byte by byte on the way, so that nothing is loaded that was not stored. elsewhere: a new
        one in the system's temporary directory.
        """
        if not entry.persistent:
            return entry.payload
        try:
            with self._staging.storing():  # a process that ends removes its copies when none is being made
                return self._copies.of(entry, elsewhere)
        except (TornError, DistrustError) as error:
            raise StoreError(str(error)) from error
        except OSError as error:
            # a full disk, say: nothing is wrong with the entry, so it stays where it is when it is set aside now
            self.pass_over(entry, str(error))
            raise StoreError(f"it cannot be made ready to load: {error}") from error

    def ahead(self, primaries: Iterable[str]) -> None:
        """Make ready what is there for these keys, for whoever asks soon. Never raises: `ready` says what is wrong."""
        for primary in dict.fromkeys(primaries):
            for entry in self.candidates(primary):
                try:
                    self._copies.ahead(entry)
                except (TornError, DistrustError, StoreError, OSError) as error:
                    log.debug("%s is not made ready ahead: %s", entry.id, error)

    def touch(self, entry: Entry) -> None:
        """Records that an artefact was loaded from `entry` now. Never raises: only eviction depends on it."""
        self._used.add(entry.id)
        if entry.persistent and not entry.base:
            try:
                usage.set_time(entry.path / usage.LAST_USED, usage.tick(self.root))
            except OSError as error:
                self._not_marked(entry, error)

    def note_shape(self, entry: Entry, text: str) -> None:
        """Remembers the sizes of a call that `entry` served, such as "2x4096x1536, 2x77x2048". Never raises."""
        if entry.persistent and not entry.base:
            try:
                usage.note_shape(entry.path, text, usage.tick(self.root), self._staging.folder)
            except ValueError as error:
                log.debug("the sizes %s of %s are not recorded: %s", text, entry.id, error)
            except OSError as error:
                self._not_marked(entry, error)

    def _not_marked(self, entry: Entry, error: OSError) -> None:
        if isinstance(error, (FileNotFoundError, NotADirectoryError, NotPlainError)):
            log.debug("the use of %s is not recorded: %s", entry.id, error)  # it was removed just now, or altered
        else:
            self._ground.failed(error)

    # -- writing -----------------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether entries can be committed; if not, `problem` says why, and it is tried again in a minute."""
        return self._ground.writable

    @property
    def problem(self) -> str | None:
        """Why the last attempt to write failed; None if it did not."""
        return self._ground.problem

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """A private directory for one artefact: write it into its `payload` folder, then commit it.

        It is removed at the end unless it was committed. Where the store cannot be written it lies in the
        system's temporary directory; StoreError if that fails too.
        """
        self._ground.begin()
        folder = self._ground.folder(PAYLOAD)
        try:
            yield folder
        except OSError as error:
            if folder.parent == self._staging.folder:
                self._ground.failed(error)
            raise
        finally:
            lost = self.lost(folder)
            self._staging.end(folder)
            if lost:
                self._ground.made_again()

    def lost(self, staged: Path) -> bool:
        """Whether somebody took a staged directory away that was not committed; another may lie there now."""
        return self._staging.lost(staged)

    def commit(self, primary: str, staged: Path, manifest: Mapping[str, Any], *, lasts: bool = True) -> Entry:
        """Makes the staged directory an entry in one step; an equal entry that is there already is kept.

        `manifest` is JSON-able and identifies the artefact together with `primary`, but for its key "info",
        where anything readable may stand. Where the store cannot be written, the entry is not persistent: it
        lives in the staged directory until the process ends, and `problem` says why. So does one that depends on
        what no other process can compare (`is_step_invariant` is False).
        """
        if not is_key(primary):
            raise ValueError(f"found {primary!r} as the primary key, expected 16 to 64 hex digits")
        with self._staging.storing():
            return self._commit(primary, Path(staged), manifest, lasts)

    def _commit(self, primary: str, staged: Path, manifest: Mapping[str, Any], lasts: bool) -> Entry:
        if self.lost(staged):
            raise StoreError("somebody took the staged artefact away")
        try:
            files = payload.seal(staged / PAYLOAD)
        except (OSError, TornError) as error:
            raise StoreError(f"the staged artefact cannot be read back: {error}") from error
        if not files:
            raise ValueError(f"nothing to commit: write the artefact into {PAYLOAD}/ of the staged directory")
        whole = dict(manifest) | {"schema": SCHEMA, "primary": primary, "files": files}
        whole |= {"created": now_text(), "made_by": made_by()}
        # Through JSON and back, so that the committing process sees exactly what every later one reads.
        whole = json.loads(json.dumps(whole))
        whole["id"] = entry_id(primary, whole)
        return self._put(staged, whole, lasts=lasts)

    def adopt(self, manifest: Mapping[str, Any], staged: Path) -> Entry:
        """Like commit, for an entry that was made elsewhere: its manifest is kept as it is.

        ValueError if the manifest is not a sound one, or the staged payload is not exactly the files that it lists.
        """
        try:
            whole = json.loads(json.dumps(dict(manifest)))
            primary, name = str(whole.get("primary")), str(whole.get("id"))
            if not (is_key(primary) and is_key(name)):
                raise ValueError(f"found the key {primary!r} and the id {name!r}, expected 16 to 64 hex digits each")
            check_manifest(whole, primary, name)
            files = payload.seal(Path(staged) / PAYLOAD)
        except (TypeError, TornError, OtherSchemaError, OSError, RecursionError) as error:
            raise ValueError(f"the entry cannot be taken in: {error}") from error
        if not files or files != whole["files"]:
            odd = sorted(set(files) ^ set(whole["files"])) or [
                one for one in files if files[one] != whole["files"][one]
            ]
            raise ValueError(f"the staged files are not those that the manifest of {name} lists: {odd[:3]} differ")
        with self._staging.storing():
            return self._put(Path(staged), whole)

    # -- taking away -------------------------------------------------------------------------------------

    def pin(self, entry_id: str, pinned: bool = True) -> Entry:
        """Marks an entry to stay when others are removed, or takes the mark away.

        LookupError if there is no such entry, PermissionError for one of the base cache, LockTimeout, OSError.
        """
        with self._ground.lock() if os.path.isdir(self.root) else contextlib.nullcontext():
            entry = self.find(entry_id)
            if entry.base:
                raise PermissionError(errno.EACCES, f"{entry.id} lies in the base cache, of which nothing is changed")
            try:
                if pinned:
                    with contextlib.suppress(FileExistsError):
                        write_new(entry.path / usage.PINNED, b"")
                else:
                    (entry.path / usage.PINNED).unlink(missing_ok=True)
            except (FileNotFoundError, NotADirectoryError):
                raise LookupError(f"the entry {entry.id} was removed just now") from None
        return entry

    def remove(self, ids: Iterable[str]) -> Removed:
        """Removes exactly these entries, pinned or not, in use or not.

        LookupError for an unknown one and PermissionError for one of the base cache, before anything is removed.
        """
        chosen = {entry.path: entry for entry in map(self.find, list(ids))}
        if based := [entry.id for entry in chosen.values() if entry.base]:
            raise PermissionError(errno.EACCES, f"{based[0]} lies in the base cache, of which nothing is changed")
        if not chosen:
            return Removed(0, 0)
        with self._ground.lock():
            return self._take_away(list(chosen.values()))

    def set_aside(self, entry: Entry, reason: str) -> None:
        """Takes what cannot be used out of use: moved to `broken/` with the reason beside it; logged; never raises.

        One that merely has a wrong owner or mode stays where it is and is skipped, as does one of the base cache.
        """
        if not entry.persistent:
            log.warning("the artefact %s, kept for this process only, is not used: %s", entry.id, reason)
            return
        if entry.base or _distrusted(entry):
            self.pass_over(entry, reason)
        else:
            self._set_aside(entry.path, entry.seen, reason)

    def pass_over(self, entry: Entry, reason: str) -> None:
        """Leaves a sound entry alone for the rest of this process, which cannot load it."""
        self._shelf_of(entry).skip.add((str(entry.path), entry.seen))
        log.warning("the cache entry %s is not used: %s", entry.id, reason)

    def prune(self, max_bytes: int | None = None) -> Removed:
        """Removes the least recently used entries until `max_bytes` (default: the limit) hold the rest.

        Entries that this process uses stay, and pinned ones. Entries that were set aside and leftovers of dead
        processes go first. LockTimeout if another process prunes; OSError if the store cannot be written.
        """
        if not os.path.isdir(self.root):
            return Removed(0, 0)
        limit = default_limit() if max_bytes is None else max_bytes
        with self._ground.lock():
            entries = self._sweep()
            total = sum(entry.size for entry in entries) + self._staging.size()
            gone = []
            for entry in sorted(entries, key=lambda entry: (usage.order(entry.path, MANIFEST), entry.created)):
                if total > limit and entry.id not in self._used and not entry.pinned:
                    gone.append(entry)
                    total -= entry.size
            return self._take_away(gone)

    def clear(self, pinned: bool = False) -> Removed:
        """Removes every entry but pinned ones (`pinned`: those too), entries set aside and leftovers; nothing else."""
        if not os.path.isdir(self.root):
            return Removed(0, 0)
        with self._ground.lock():
            return self._take_away([entry for entry in self._sweep() if pinned or not entry.pinned])

    def _sweep(self) -> list[Entry]:
        """Sets aside what is torn, removes leftovers, and gives all entries, also those that are not trusted."""
        found = self._own.all()
        self._attic.sweep()
        self._ground.sweep()
        known = {(entry.primary, entry.id) for entry in found}
        more = [self._own.describe(*place) for place in self._own.on_disk() if place not in known]
        return found + [one[0] for one in more if one is not None and one[0].manifest["schema"] != OTHER_SCHEMA]

    def _take_away(self, entries: list[Entry]) -> Removed:
        """Removes entries, with the lock held: first from the index, so that none of its rows outlives its entry."""
        going = {(entry.primary, entry.id) for entry in entries}
        rows = self._own.index_rows()
        rows = self._own.made_rows() if rows is None else rows
        index.write(self.root, [row for row in rows if (row["primary"], row["id"]) not in going], self._staging.folder)
        gone = [entry for entry in entries if self._attic.discard(entry.path)]
        return Removed(len(gone), sum(entry.size for entry in gone))

    def _shelf_of(self, entry: Entry) -> Shelf:
        below = self._library.below
        return below if entry.base and below is not None else self._own

    def _set_aside(self, path: Path, seen: Seen, reason: str) -> None:
        if (str(path), seen) in self._own.skip:
            return
        with self._one_at_a_time:  # what is made ready ahead finds it too
            if identity(path) != seen:
                log.debug("%s was replaced or taken by another in the meantime", path)
                return
            log.warning("the cache entry %s is set aside: %s", path.name, reason)
            try:
                self._attic.move(path, reason)
            except OSError as error:
                self._own.skip.add((str(path), seen))
                log.info("the cache entry %s stays where it is and is skipped: %s", path.name, error)

    # -- committing --------------------------------------------------------------------------------------

    def _put(self, staged: Path, manifest: dict[str, Any], *, lasts: bool = True) -> Entry:
        entry = self._publisher.put(staged, manifest, lasts=lasts)
        if entry.persistent:
            self._used.add(entry.id)
            self._after_commit(entry)
        return entry

    def _after_commit(self, entry: Entry) -> None:
        """Index and size limit; both can wait for the next commit, so a busy lock is only noted."""
        try:
            with self._ground.lock(LOCK_WAIT):
                rows = self._own.index_rows()
                if rows is None:
                    rows = self._own.made_rows()
                else:
                    place = (entry.primary, entry.id)
                    rows = [row for row in rows if (row["primary"], row["id"]) != place] + [index.row_of(entry)]
                index.write(self.root, rows, self._staging.folder)
            if sum(row["size"] for row in rows) + self._staging.size() > default_limit():
                self.prune()
        except LockTimeout as error:
            log.debug("the cache index is not brought up to date now: %s", error)
        except OSError as error:
            self._ground.failed(error)

    def _rebuild_index(self) -> list[index.Row]:
        rows = self._own.made_rows()
        try:
            if os.path.isdir(self.root):
                with self._ground.lock(LOCK_WAIT):
                    index.write(self.root, rows, self._staging.folder)
        except (LockTimeout, OSError) as error:
            log.debug("the cache index is not written: %s", error)
        return rows


def _distrusted(entry: Entry) -> bool:
    """Whether owners or modes are all that is wrong, so that the user may put it right."""
    try:
        entry.check_place()
        payload.check(entry.payload, entry.manifest["files"], entry.trust, quick=True)
    except DistrustError:
        return True
    except (TornError, OSError):
        return False
    return False
