# SPDX-License-Identifier: Apache-2.0
"""Small facts about this machine, as JSON files beside the artefacts. Losing one costs finding it out again."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import trust
from .fs import NotPlainError, make_private, read_plain
from .lock import bounded_lock
from .owner import replace_file

log = logging.getLogger("nexfort")

_WAIT = 2.0  # seconds for the store's lock
_MOST = 4 << 20  # bytes of a file


class UnreadableError(Exception):
    """A file is there and is not to be read. The text is why. in_short: what is said of the file to its user."""

    in_short = "is damaged"


class DeniedError(UnreadableError):
    """This user may not read it."""

    in_short = "may not be read by you"


class NotOwnError(UnreadableError):
    """Others could have written it."""

    in_short = "is not yours alone"


def recall(folder: Path | None, name: str) -> Any:
    """What was remembered under this name; None if nothing was, or if it is not to be read, with the reason in the log.

    The folder may let others look in, as the root of a store may.
    """
    if folder is None:
        return None
    try:
        return _read(folder, name, trust.WRITABLE_BY_OTHERS)
    except UnreadableError as reason:
        tell_once(f"{folder / name} is not read and is made again: {reason}")
        return None


def remember(folder: Path | None, name: str, value: object) -> None:
    """Keep a JSON-able value under this name; without a folder, or where it cannot be written, nothing is kept."""
    if folder is None:
        return
    try:
        _write(folder, name, value, trust.WRITABLE_BY_OTHERS)
    except OSError as error:
        log.debug("Nexfort: %s could not be stored: %s", name, error)


def recall_own(folder: Path, name: str) -> Any:
    """What was remembered under this name, in a folder that is the user's alone; None if nothing was.

    Raises UnreadableError with the reason.
    """
    return _read(folder, name)


@functools.cache
def tell_once(text: str) -> None:
    """Log it, unless this process has said the same: a file may be read many times before it is made anew."""
    log.info("Nexfort: %s", text)


def update(folder: Path, name: str, change: Callable[[Any], object]) -> None:
    """Replace what is remembered under this name by what `change` makes of it; one process at a time.

    change: of the value, or of None where there is none to be read. Raises OSError where nothing can be written: the
    folder is not the user's alone, or the store's lock is held for too long.
    """
    _make(folder)
    with bounded_lock(folder / "lock", _WAIT):
        try:
            found = recall_own(folder, name)
        except UnreadableError:
            found = None  # who read it before was told why
        _write(folder, name, change(found))


def _read(folder: Path, name: str, loose: int | None = None) -> Any:
    """What a file holds that nobody else could have written; `loose`: as for Trust.problem, of the folder.

    Nothing where this user may not look at the folder: whoever writes to it is told why.
    """
    rules, file = trust.own(), folder / name
    try:
        try:
            state = folder.stat()
        except PermissionError:
            return None
        if (reason := rules.problem(folder, state, loose)) is not None:
            raise NotOwnError(reason)
        return json.loads(read_plain(file, _MOST, functools.partial(rules.check, file)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except trust.DistrustError as error:
        raise NotOwnError(str(error)) from error
    except PermissionError as error:
        raise DeniedError(str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        what = "it is no file of ours" if isinstance(error, NotPlainError) else "it cannot be read"
        raise UnreadableError(f"{what} ({error})") from error


def _make(folder: Path, loose: int | None = None) -> None:
    make_private(folder)
    if (reason := trust.own().problem(folder, folder.stat(), loose)) is not None:
        raise PermissionError(reason)


def _write(folder: Path, name: str, value: object, loose: int | None = None) -> None:
    _make(folder, loose)
    replace_file(folder / name, json.dumps(value, indent=1).encode(), folder)
