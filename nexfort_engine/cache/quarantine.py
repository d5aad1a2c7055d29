# SPDX-License-Identifier: Apache-2.0
"""Taking entries away: what cannot be used is moved to `broken/`, what must go is deleted out of sight.

It decides neither which entries are broken nor which are evicted, and never deletes a foreign file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path

from .entry import is_key, now_text
from .fs import listing, make_private, modified, write_new
from .staging import Staging

log = logging.getLogger("nexfort")

KEEP_BROKEN = 16


class Attic:
    """The directory `broken/` of a store."""

    def __init__(self, broken: Path, staging: Staging) -> None:
        self.broken = broken
        self._staging = staging

    def move(self, path: Path, reason: str) -> None:
        """Moves `path` to `broken/` with the reason beside it; OSError where nothing can be moved."""
        make_private(self.broken)
        ours = is_key(path.name) and os.path.isdir(path) and not os.path.islink(path)
        name = f"{'entry' if ours else 'foreign'}-{path.name[:40]}-{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):  # another process was first
            os.rename(path, self.broken / name)
            text = f"{now_text()} {reason}\n".encode("utf-8", "backslashreplace")
            try:
                write_new(self.broken / f"{name}.reason.txt", text, durable=False)
            except OSError as error:  # it was moved all the same
                log.debug("the reason is not kept beside %s: %s", name, error)
        for old in sorted(self._entries(), key=modified, reverse=True)[KEEP_BROKEN:]:
            self._forget(old)

    def discard(self, path: Path) -> bool:
        """Deletes an entry, and the directory of its key with the last one; False if it cannot be moved."""
        if not self._staging.trash(path):
            return False
        with contextlib.suppress(OSError):  # other entries of this key remain
            path.parent.rmdir()
        return True

    def sweep(self) -> None:
        """Deletes entries that were set aside, and no foreign files."""
        for path in self._entries():
            self._forget(path)
        for path in listing(self.broken):  # the process died between the two
            if path.name.startswith("entry-") and path.name.endswith(".reason.txt"):
                path.unlink(missing_ok=True)

    def _entries(self) -> list[Path]:
        return [path for path in listing(self.broken) if path.name.startswith("entry-") and os.path.isdir(path)]

    def _forget(self, path: Path) -> None:
        if self._staging.trash(path):
            path.with_name(f"{path.name}.reason.txt").unlink(missing_ok=True)
