# SPDX-License-Identifier: Apache-2.0
"""Small facts about this machine, as JSON files beside the artefacts. Losing one costs finding it out again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import trust
from .disk import NotPlainError, make_private, open_plain, replace_file
from .lock import bounded_lock

log = logging.getLogger("nexfort")

_WAIT = 2.0  # seconds for the store's lock
_MOST = 16 << 20  # bytes of a file


class UnreadableError(Exception):
    """A file is there and is not to be read. The text is why."""


def recall(folder: Path | None, name: str) -> Any:
    """What was remembered under this name; None if nothing was, or if it is damaged."""
    if folder is None:
        return None
    try:
        return json.loads((folder / name).read_text())
    except (OSError, ValueError):
        return None


def remember(folder: Path | None, name: str, value: object) -> None:
    """Keep a JSON-able value under this name; without a folder, or where it cannot be written, nothing is kept."""
    if folder is None:
        return
    try:
        make_private(folder)
        replace_file(folder / name, json.dumps(value, indent=1).encode(), folder)
    except OSError as error:
        log.debug("Nexfort: %s could not be stored: %s", name, error)


def recall_own(folder: Path, name: str) -> Any:
    """What was remembered under this name in a file that only the user could have written; None if there is none.

    Raises UnreadableError with the reason.
    """
    rules = trust.own()
    try:
        rules.check(folder, folder.lstat())
        handle = open_plain(folder / name)
        with os.fdopen(handle, "rb") as file:
            rules.check(folder / name, os.fstat(handle))
            content = file.read(_MOST + 1)
        if len(content) > _MOST:
            raise UnreadableError(f"it has more than {_MOST} bytes")
        return json.loads(content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except trust.DistrustError as error:
        raise UnreadableError(str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        what = "it is no file" if isinstance(error, NotPlainError) else "it cannot be read"
        raise UnreadableError(f"{what} ({error})") from error


def update(folder: Path, name: str, change: Callable[[Any], object]) -> None:
    """Replace what is remembered under this name by what `change` makes of it; one process at a time.

    change: of the value, or of None where there is none to be read. Raises OSError where nothing can be written: the
    folder is not the user's alone, or the store's lock is held for too long.
    """
    make_private(folder)
    if (reason := trust.own().problem(folder, folder.lstat())) is not None:
        raise PermissionError(reason)
    with bounded_lock(folder / "lock", _WAIT):
        try:
            found = recall_own(folder, name)
        except UnreadableError:
            found = None  # who read it before was told why
        replace_file(folder / name, json.dumps(change(found), indent=1).encode(), folder)
