# SPDX-License-Identifier: Apache-2.0
"""Whose files are read: a cache is code, so what somebody else could have written is refused, with the reason.

Two rules: the user's own cache is private to the user, and a base cache is one that the user cannot change. On
Windows there are no owners and modes in this sense; there the directory's access list is what protects it. This
file looks at owners and modes only, and changes none.
"""

from __future__ import annotations

import functools
import os
import stat
from dataclasses import dataclass
from pathlib import Path

GROUP_OR_OTHERS = 0o077
WRITABLE_BY_OTHERS = 0o022


class DistrustError(Exception):
    """Somebody else could have written this; the text says what was found, what was expected, what to do."""


@dataclass(frozen=True)
class Trust:
    """Who may own what is read (None: not asked), and which mode bits it must not have.

    unwritable: the user of this process must not be able to write it either.
    """

    owners: frozenset[int] | None
    loose: int
    unwritable: bool = False

    def problem(self, path: Path | str, info: os.stat_result, loose: int | None = None) -> str | None:
        """Why `path`, whose lstat is `info`, is not to be read, or None. `loose`: other mode bits than usual."""
        if self.owners is None:
            return None
        if info.st_uid not in self.owners:
            expected = " or ".join(str(owner) for owner in sorted(self.owners))
            return (
                f"{path} belongs to user {info.st_uid}, not to user {expected}, so it is not read; "
                "if it is sound, chown it, or set NEXFORT_CACHE_DIR to a directory of your own"
            )
        found = stat.S_IMODE(info.st_mode)
        loose = self.loose if loose is None else loose
        if found & loose and not stat.S_ISLNK(info.st_mode):
            can = "write" if found & WRITABLE_BY_OTHERS else "read"
            bits = "w" if loose == WRITABLE_BY_OTHERS else "rwx"
            return (
                f"{path} has mode {found:04o}: others than its owner can {can} it, so it is not read; "
                f"if it is yours and sound, run: chmod -R go-{bits} '{path}'"
            )
        if self.unwritable and _can_write(path):
            return f"{path} can be written by the user of this process; a base cache must not be: make it read-only"
        return None

    def check(self, path: Path | str, info: os.stat_result) -> None:
        """DistrustError where `problem` finds one."""
        if (reason := self.problem(path, info)) is not None:
            raise DistrustError(reason)


def own() -> Trust:
    """What holds for the user's own cache: owned by the user or root, and for nobody else to enter."""
    if not hasattr(os, "geteuid"):
        return Trust(None, 0)
    return Trust(frozenset((0, os.geteuid())), GROUP_OR_OTHERS)


def base() -> Trust:
    """What holds for a base cache: owned by root or NEXFORT_CACHE_BASE_OWNER, not writable by this user or others.

    ValueError if that variable names nobody.
    """
    if not hasattr(os, "geteuid"):
        return Trust(None, 0)
    owners = frozenset((0, *_named_owner()))
    return Trust(owners, WRITABLE_BY_OTHERS, unwritable=os.geteuid() != 0)


def _named_owner() -> tuple[int, ...]:
    text = os.environ.get("NEXFORT_CACHE_BASE_OWNER", "").strip()
    if not text:
        return ()
    if text.isascii() and text.isdigit():
        return (int(text),)
    import pwd

    try:
        return (pwd.getpwnam(text).pw_uid,)
    except KeyError:
        raise ValueError(
            f"NEXFORT_CACHE_BASE_OWNER is {text!r}, which is no user here; expected a user name or a number"
        ) from None


@functools.cache
def _access_options() -> dict[str, bool]:
    return {"effective_ids": True} if os.access in os.supports_effective_ids else {}


def _can_write(path: Path | str) -> bool:
    return os.access(path, os.W_OK, **_access_options())
