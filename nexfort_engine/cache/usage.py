# SPDX-License-Identifier: Apache-2.0
"""What changes about an entry after it was made: when it was last used, for which sizes of calls, whether it is pinned.

`last_used` carries the time as its own time of change and the sizes as lines of text; `pinned` is there or not.
Neither is believed in anything but the order of eviction, so whatever they hold is harmless.

Times are those of a clock that never runs back: `clock` in the root remembers the latest one given. So the order of
use is right even if the machine's clock was wrong for a while.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path

from . import trust
from .fs import open_plain, write_all
from .owner import replace_file
from .trust import Trust

log = logging.getLogger("nexfort")

LAST_USED = "last_used"
PINNED = "pinned"
CLOCK = "clock"
MOST_SHAPES = 16
SHAPE_LENGTH = 200
_READ_LIMIT = 1 << 16
_REWRITE_AT = 1 << 13
_TICK = 1e-3  # file systems that keep times coarser than this tell two uses apart less well
_FARTHEST = 100 * 365 * 86400.0  # a clock this far ahead is not a clock


def tick(root: Path) -> float:
    """The present in seconds, but later than any time given before in this store, if that could be noted there."""
    now = time.time()
    clock = root / CLOCK
    try:
        info = clock.lstat()
        last = info.st_mtime if stat.S_ISREG(info.st_mode) and trust.own().problem(clock, info) is None else 0.0
    except OSError:  # the first time
        last = 0.0
    moment = last + _TICK if now <= last < now + _FARTHEST else now
    try:
        set_time(clock, moment)
    except OSError as error:
        log.debug("the clock of the cache %s is not set: %s", root, error)
    return moment


def set_time(file: Path, moment: float, text: bytes = b"") -> None:
    """Makes `moment` the time of change of a file, which is created if it is missing; `text` is put at its end."""
    handle = open_plain(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        if text:
            write_all(handle, text)
        if os.utime in os.supports_fd:
            os.utime(handle, (moment, moment))
    finally:
        os.close(handle)
    if os.utime not in os.supports_fd:
        os.utime(file, (moment, moment))


def use(file: str | Path, trusted: Trust | None = None) -> tuple[float | None, list[str]]:
    """When an entry was last used (never in the future; None if it never was) and the lines of its `last_used`.

    What is no file, or what somebody else could have written, says nothing.
    """
    trusted = trust.own() if trusted is None else trusted
    try:
        info = os.lstat(file)
    except OSError:  # never used, or evicted in the meantime
        return None, []
    if not stat.S_ISREG(info.st_mode) or trusted.problem(file, info) is not None:
        return None, []
    return min(info.st_mtime, time.time()), _shapes(file, info.st_size) if info.st_size else []


def order(entry: Path, manifest: str) -> float:
    """A number that is larger the later the entry was used or made; for eviction only."""
    for name in (LAST_USED, manifest):
        try:
            return (entry / name).lstat().st_mtime
        except OSError:  # never used, or evicted in the meantime
            continue
    return 0.0


def is_pinned(entry: Path | str) -> bool:
    """Whether the entry in this directory stays when others are evicted."""
    return os.path.lexists(f"{entry}{os.sep}{PINNED}")


def _shapes(file: Path | str, size: int) -> list[str]:
    """At most 16 different lines, newest last."""
    try:
        handle = open_plain(file)
    except OSError:  # evicted in the meantime
        return []
    try:
        if size > _READ_LIMIT:
            os.lseek(handle, -_READ_LIMIT, os.SEEK_END)
        text = os.read(handle, _READ_LIMIT).decode("utf-8", "replace")
    except OSError as error:
        log.debug("%s cannot be read: %s", file, error)
        return []
    finally:
        os.close(handle)
    lines = dict.fromkeys(reversed(text.split("\n")))
    newest_first = [line for line in lines if 0 < len(line) <= SHAPE_LENGTH and line.isprintable()]
    return newest_first[:MOST_SHAPES][::-1]


def note_shape(entry: Path, text: str, moment: float, staging: Path) -> None:
    """Puts a line at the end of `last_used`, which several processes may do at once; OSError, ValueError."""
    if "\n" in text or not text.isprintable() or not 0 < len(text) <= SHAPE_LENGTH:
        raise ValueError(f"found {text[:80]!r}, expected one printable line of at most {SHAPE_LENGTH} characters")
    file = entry / LAST_USED
    known = use(file)[1]
    # in front of the line too: the last writer may have died, or the disk become full, within its line
    line = b"" if known[-1:] == [text] else f"\n{text}\n".encode()
    set_time(file, moment, line)
    if file.lstat().st_size > _REWRITE_AT:
        content = "".join(f"{one}\n" for one in use(file)[1])
        replace_file(file, content.encode(), staging)
        set_time(file, moment)
