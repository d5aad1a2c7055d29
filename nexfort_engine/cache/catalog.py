# SPDX-License-Identifier: Apache-2.0
"""A directory of entries as a reader sees it: the user's own cache, or the read-only base cache under it.

It reads and checks, and changes nothing: whoever owns the directory says what becomes of an entry that is torn.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import index, usage
from .entry import MANIFEST, PAYLOAD, Entry, OtherSchemaError, is_key, read_entry
from .fs import identity, listing
from .payload import TornError
from .trust import WRITABLE_BY_OTHERS, DistrustError, Trust

log = logging.getLogger("nexfort")

Seen = tuple[int, int] | None
NOT_READ = "its manifest was not read when the index was made; `cache verify` says why"
OTHER_SCHEMA = -1  # the schema of what `describe` can tell about an entry of another version
_NEVER = "1970-01-01T00:00:00+00:00"


class Shelf:
    """The entries under `root`, for readers. `torn` is told of what is damaged or foreign; else it is skipped.

    folders: the other directories of the store, which must be its own too before anything is moved.
    """

    def __init__(
        self,
        root: Path,
        trust: Trust,
        *,
        folders: tuple[Path, ...] = (),
        torn: Callable[[Path, Seen, str], None] | None = None,
        base: bool = False,
    ) -> None:
        self.root = root
        self.entries = root / "entries"
        self._entries_text = str(self.entries)
        self.trust = trust
        self.base = base
        self._folders = (root, self.entries, *folders)
        self.skip: set[tuple[str, Seen]] = set()
        self._torn = torn
        self._told: set[str] = set()
        self._rows: dict[tuple[str, str], index.Row] = {}
        self._rows_of: tuple[int, ...] | None = None
        self._is_sound = False  # the index that was read

    def distrust(self) -> str | None:
        """Why nothing may be read from here: somebody else could have put it there."""
        for folder in self._folders:
            # The root itself may be a link, as many people keep their caches on another disk, and may let others
            # look in: all that matters lies in directories that do not.
            at_root = folder is self.root
            try:
                info = folder.stat() if at_root else folder.lstat()
            except OSError:
                continue  # nothing there: nothing to distrust
            if stat.S_ISLNK(info.st_mode):
                return f"{folder} is a symbolic link, expected a directory"
            if not stat.S_ISDIR(info.st_mode):
                continue  # nothing can be read from it, and who writes says what was expected
            reason = self.trust.problem(folder, info, WRITABLE_BY_OTHERS if at_root else None)
            if reason is not None:
                return reason
        return None

    def usable(self) -> bool:
        """Whether anything may be read; the first time that it must not, the log says why."""
        reason = self.distrust()
        if reason is not None:
            self._tell(reason)
        return reason is None

    # -- entries -----------------------------------------------------------------------------------------

    def candidates(self, primary: str) -> list[Entry]:
        """The sound entries of one key, newest first, by manifest alone."""
        if not is_key(primary) or not self.usable():
            return []
        return self._sound([self.entries / primary])

    def all(self) -> list[Entry]:
        """Every sound entry, newest first."""
        return self._sound(self._primaries()) if self.usable() else []

    def _sound(self, folders: list[Path]) -> list[Entry]:
        found = [self.read(path) for folder in folders for path in listing(folder)]
        return newest_first([entry for entry in found if entry is not None])

    def on_disk(self) -> list[tuple[str, str]]:
        """(primary, id) of every directory that can be an entry."""
        found: list[tuple[str, str]] = []
        for primary in self._primary_names():
            try:
                found += [(primary, n) for n in os.listdir(f"{self._entries_text}{os.sep}{primary}") if is_key(n)]
            except OSError as error:  # removed just now
                log.debug("%s is not listed: %s", primary, error)
        return sorted(found)

    def read(self, path: Path) -> Entry | None:
        """The entry at `path`; None if there is none that can be used."""
        seen = identity(path)
        if seen is None or (str(path), seen) in self.skip:
            return None
        try:
            if not is_key(path.name):
                raise TornError("its name is no entry's id, so it is not from here")
            entry = self._listed(read_entry(path, self.trust, self.base))
            entry.check_place()
            return entry
        except FileNotFoundError:
            return None  # evicted just now
        except OtherSchemaError as error:
            log.debug("%s is left alone: %s", path, error)
        except DistrustError as error:
            self._tell(f"the cache entry {path.name} is not used: {error}")
        except TornError as error:
            if self._torn is not None:
                self._torn(path, seen, str(error))
            else:
                self._tell(f"the cache entry {path.name} is not used: {error}")
        except OSError as error:
            log.info("the cache entry %s is skipped: %s", path.name, error)
        return None

    def describe(self, primary: str, name: str) -> tuple[Entry, str | None] | None:
        """The entry as far as it can be told, with what is the matter; None if it is gone. Changes nothing.

        Of one that cannot be trusted, or whose manifest is damaged, only the id is known.
        """
        path = self.entries / primary / name
        nothing = {"schema": 0, "files": {}, "created": _NEVER, "made_by": {}, "info": {}}
        unknown = Entry(name, primary, path, nothing, base=self.base, seen=identity(path), trust=self.trust)
        try:
            return self._listed(read_entry(path, self.trust, self.base)), self.distrust()
        except FileNotFoundError as error:
            return (unknown, f"it cannot be read: {error}") if os.path.lexists(path) else None
        except OtherSchemaError as error:
            return replace(unknown, manifest={**nothing, "schema": OTHER_SCHEMA}), str(error)
        except (TornError, DistrustError, OSError) as error:
            return unknown, str(error)

    def _listed(self, entry: Entry) -> Entry:
        return replace(entry, listed=index.digest_for(self._row_of(entry.primary, entry.id), entry))

    def _primaries(self) -> list[Path]:
        """The directories of keys."""
        return [self.entries / name for name in sorted(self._primary_names())]

    def _primary_names(self) -> list[str]:
        """What they are called. With ten thousand of them, what is known without asking each must do."""
        try:
            if os.path.islink(self.entries):
                return []
            with os.scandir(self.entries) as found:
                return [one.name for one in found if is_key(one.name) and one.is_dir(follow_symlinks=False)]
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                log.info("the cache directory %s cannot be read: %s", self.entries, error)
            return []

    def _tell(self, text: str) -> None:
        """Logs once what would be the same on every look."""
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)

    # -- index -------------------------------------------------------------------------------------------

    def index_rows(self) -> list[index.Row] | None:
        """What the index says, or None if there is no sound one."""
        return list(self._rows.values()) if self._read_index() else None

    def _read_index(self) -> bool:
        """Whether there is a sound index; it is read again only after it changed."""
        try:
            info = (self.root / index.NAME).lstat()
        except OSError:
            self._rows_of = None
            return False
        version = (info.st_ino, info.st_mtime_ns, info.st_size, info.st_mode, info.st_uid)
        if self._rows_of != version:
            rows = index.read(self.root, self.trust)
            self._rows = {(row["primary"], row["id"]): row for row in rows or ()}
            self._rows_of, self._is_sound = version, rows is not None
        return self._is_sound

    def _row_of(self, primary: str, name: str) -> index.Row | None:
        return self._rows.get((primary, name)) if self._read_index() else None

    def made_rows(self) -> list[index.Row]:
        """The rows of the index made from the entries themselves; what is known of those that are not read stays."""
        found = {(entry.primary, entry.id): index.row_of(entry) for entry in self.all()}
        for place in self.on_disk():
            if place not in found and (known := self.describe(*place)) is not None:
                found[place] = self._row_of(*place) or index.row_of(replace(known[0], seen=None))
        return sorted(found.values(), key=lambda row: (row["created"], row["id"]))

    def row(self, row: index.Row) -> dict[str, Any]:
        """A row of the index with what it does not hold: use, pin, and whether the entry may be read at all."""
        folder = os.sep.join((self._entries_text, row["primary"], row["id"]))
        problem, names = self._look(folder)
        problem = problem or (NOT_READ if row["created"] == _NEVER else None)
        mark = f"{folder}{os.sep}{usage.LAST_USED}"
        used, shapes = usage.use(mark, self.trust) if usage.LAST_USED in names else (None, [])
        found = {name: value for name, value in row.items() if name not in ("digest", "inode")}
        found |= {"last_used": used, "pinned": usage.PINNED in names, "shapes": shapes}
        return found | {"base": self.base, "problem": problem}

    def _look(self, folder: str) -> tuple[str | None, dict[str, bool]]:
        """What owner and mode of an entry's directory and the names in it tell, and these: name -> is it a directory.

        Taken at every entry that is listed, so it is short: what lies in a directory that nobody else can enter is
        looked at when it is loaded or verified.
        """
        try:
            info = os.lstat(folder)
            if not stat.S_ISDIR(info.st_mode):
                return "it is not a directory (symbolic links are not followed)", {}
            with os.scandir(folder) as found:
                names = {one.name: one.is_dir(follow_symlinks=False) for one in found}
        except OSError as error:
            return f"it cannot be read: {error}", {}
        if (reason := self.trust.problem(folder, info)) is not None:
            return reason, names
        for name, is_directory, kind in ((MANIFEST, False, "file"), (PAYLOAD, True, "directory")):
            if name not in names:
                return f"it has no {name}", names
            if names[name] is not is_directory:
                return f"its {name} is not a {kind}", names
        return None, names


def newest_first(entries: list[Entry]) -> list[Entry]:
    """Sorted by when they were made, and by id among equals."""
    return sorted(entries, key=lambda entry: (entry.created, entry.id), reverse=True)
