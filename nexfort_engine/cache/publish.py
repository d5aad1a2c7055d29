# SPDX-License-Identifier: Apache-2.0
"""Publisher: a staged artefact becomes an entry in one rename. Where it cannot, it lasts as long as this process."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import usage
from .catalog import Seen, Shelf
from .entry import MANIFEST, Entry, manifest_text
from .fs import identity, make_private, move_directory, sync_directory, write_new
from .root_dir import Ground, StoreError
from .staging import Staging


class Publisher:
    """Puts entries into the user's own cache."""

    def __init__(
        self, own: Shelf, ground: Ground, staging: Staging, set_aside: Callable[[Path, Seen, str], None]
    ) -> None:
        """set_aside: takes away what is in the way, with the reason."""
        self._own, self._ground, self._staging, self._set_aside = own, ground, staging, set_aside

    def put(self, staged: Path, manifest: dict[str, Any], *, lasts: bool) -> Entry:
        """A staged artefact as an entry: in its place if it can be put there, else where it is, for this process.

        lasts: other processes can use it.
        """
        text = manifest_text(manifest)
        digest = hashlib.sha256(text).hexdigest()
        entry = Entry(
            manifest["id"], manifest["primary"], staged, manifest,
            persistent=False, seen=identity(staged), digest=digest, trust=self._own.trust,
        )  # fmt: skip
        if not lasts or not self._ground.writable or staged.parent != self._staging.folder:
            self._staging.keep(staged)
            return entry
        published = self._written(entry, text) or self._written(entry, text)
        if published is None:
            if self._staging.lost(staged):
                raise StoreError("somebody took the staged artefact away")
            self._staging.keep(staged)
            return entry
        return published

    def _written(self, entry: Entry, manifest: bytes) -> Entry | None:
        """The staged entry in its place; None if it could not be put there, which may be worth another try."""
        try:
            if not self._ground.writable:
                return None
            (entry.path / MANIFEST).unlink(missing_ok=True)
            write_new(entry.path / MANIFEST, manifest)
            usage.set_time(entry.path / MANIFEST, usage.tick(self._own.root))  # what was never used counts as used now
            return self._publish(entry)
        except OSError as error:
            self._ground.failed(error)
            return None

    def _publish(self, entry: Entry) -> Entry:
        target = self._own.entries / entry.primary / entry.id
        for _ in range(3):
            if os.path.islink(target.parent) or os.path.isfile(target.parent):
                self._set_aside(target.parent, identity(target.parent), "expected a directory of entries")
            # somebody may have taken away what was made
            for folder in (self._own.root, self._own.entries, target.parent):
                make_private(folder)
            seen = identity(target)
            existing = self._own.read(target)
            problem = "it was not to be used, and was made again" if existing is None else existing.verify(quick=True)
            if existing is not None and problem is None:
                return existing
            if seen is not None and identity(target) == seen:  # also what is skipped: something sound takes its place
                self._own.skip.discard((str(target), seen))
                self._set_aside(target, seen, problem or "")
            try:
                move_directory(entry.path, target, self._staging.folder)
            except FileNotFoundError:
                if not os.path.isdir(entry.path):
                    raise
                continue  # another process cleared the store and took the parent
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    continue  # another process was first: look at what it left
                raise
            self._staging.release(entry.path)
            sync_directory(target.parent)
            return replace(entry, path=target, persistent=True, seen=identity(target))
        raise FileExistsError(errno.EEXIST, f"{target} is in the way and cannot be moved")
