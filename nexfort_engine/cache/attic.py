# SPDX-License-Identifier: Apache-2.0
"""Taking entries away: what cannot be used is moved to `broken/`, what must go is deleted out of sight.

It decides neither which entries are broken nor which are evicted, and never deletes a foreign file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from pathlib import Path

from .disk import listing, make_private, modified, remove_tree
from .entry import is_key, now_text

log = logging.getLogger("nexfort")

STALE_STAGING = 24 * 3600.0  # a staging directory this old belongs to a process that died
KEEP_BROKEN = 16


class Attic:
    """The directories `broken/` and `staging/` of one store."""

    def __init__(self, broken: Path, staging: Path) -> None:
        self.broken = broken
        self.staging = staging

    def move(self, path: Path, reason: str) -> None:
        """Moves `path` to `broken/` with the reason beside it; OSError where nothing can be moved."""
        make_private(self.broken)
        ours = is_key(path.name) and path.is_dir() and not path.is_symlink()
        name = f"{'entry' if ours else 'foreign'}-{path.name[:40]}-{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):  # another process was first
            os.rename(path, self.broken / name)
            (self.broken / f"{name}.reason.txt").write_text(f"{now_text()} {reason}\n", encoding="utf-8")
        for old in sorted(self._entries(), key=modified, reverse=True)[KEEP_BROKEN:]:
            self._forget(old)

    def discard(self, path: Path) -> bool:
        """Deletes a directory: first out of sight in one step, so that no reader finds half of it."""
        trash = self.staging / f"trash-{secrets.token_hex(8)}"
        try:
            os.rename(path, trash)
        except OSError as error:  # in use on Windows, or already gone
            log.debug("%s is not removed: %s", path, error)
            return False
        remove_tree(trash)
        return True

    def sweep(self, keep: set[Path]) -> None:
        """Deletes entries that were set aside (no foreign files) and what dead processes left in staging."""
        for path in self._entries():
            self._forget(path)
        for path in listing(self.staging):
            if time.time() - modified(path) > STALE_STAGING and path not in keep:
                remove_tree(path)

    def _entries(self) -> list[Path]:
        return [path for path in listing(self.broken) if path.name.startswith("entry-") and path.is_dir()]

    def _forget(self, path: Path) -> None:
        if self.discard(path):
            path.with_name(f"{path.name}.reason.txt").unlink(missing_ok=True)
