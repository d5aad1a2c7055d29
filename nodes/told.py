# SPDX-License-Identifier: Apache-2.0
"""What may leave the server: anything but where things lie on its machine, and the name of its user."""

from __future__ import annotations

import contextlib
import getpass
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# An absolute path of two parts or more, on any system. Region names are dotted and hold no slash. A part before another
# one may hold single spaces, as in "C:\Program Files" and in the names of users.
_PART = r"[^\\/\s:'\"<>|,;()\[\]]+"
_PATH = re.compile(rf"(?<![\w.\\/])(?:[A-Za-z]:)?(?:[\\/]+{_PART}(?: {_PART})*(?=[\\/]))+[\\/]+{_PART}[\\/]?")
# The folder of any user, whose last part is a name.
_HOME = re.compile(r"(?:[A-Za-z]:)?[\\/]+(?:home|[Uu]sers)[\\/]+[^\\/]+")
_NOBODY = {"", "root"}  # names that say nothing


class _Own(NamedTuple):
    """What finds the user's own folder where no path goes on, and what finds the user's name; None where unknown."""

    home: re.Pattern[str] | None
    names: re.Pattern[str] | None


def without_paths(value: Any) -> Any:
    """A copy of JSON-able data in which no absolute path is left: only its last part stays, after "…/".

    The user's name in that part is "user", and a user's own folder "~".
    """
    return _without(value, _own())


def _without(value: Any, own: _Own) -> Any:
    if isinstance(value, str):
        return _PATH.sub(lambda found: _last_part(found[0], own), own.home.sub("~", value) if own.home else value)
    if isinstance(value, Mapping):
        return {key: _without(inner, own) for key, inner in value.items() if key != "cache_dir"}
    if isinstance(value, (list, tuple)):
        return [_without(inner, own) for inner in value]
    return value


def _last_part(path: str, own: _Own) -> str:
    path = path.rstrip("\\/")
    if _HOME.fullmatch(path):
        return "…/~"
    last = re.split(r"[\\/]", path)[-1]
    return "…/" + (own.names.sub("user", last) if own.names else last)


def _own() -> _Own:
    home, names = None, set()
    with contextlib.suppress(OSError, KeyError, ImportError):  # a container may know no users
        names.add(getpass.getuser())
    with contextlib.suppress(RuntimeError, KeyError):
        place = Path.home()
        names.add(place.name)
        if place.name:
            parts = r"[\\/]+".join(map(re.escape, re.split(r"[\\/]+", str(place))))
            home = re.compile(rf"(?<![\w.\\/]){parts}(?![\w.-]|[\\/]+{_PART})")
    known = "|".join(map(re.escape, sorted(names - _NOBODY)))
    return _Own(home, re.compile(rf"(?<![^\W_])(?:{known})(?![^\W_])") if known else None)
