# SPDX-License-Identifier: Apache-2.0
"""What may leave the server: anything but where things lie on its machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# An absolute path of two parts or more, on any system. Region names are dotted and hold no slash. A part before another
# one may hold single spaces, as in "C:\Program Files" and in the names of users.
_PART = r"[^\\/\s:'\"<>|,;()\[\]]+"
_PATH = re.compile(rf"(?<![\w.\\/])(?:[A-Za-z]:)?(?:[\\/]+{_PART}(?: {_PART})*(?=[\\/]))+[\\/]+{_PART}[\\/]?")


def without_paths(value: Any) -> Any:
    """A copy of JSON-able data in which no absolute path is left: only its last part stays, after "…/"."""
    if isinstance(value, str):
        return _PATH.sub(lambda found: "…/" + re.split(r"[\\/]", found[0].rstrip("\\/"))[-1], value)
    if isinstance(value, Mapping):
        return {key: without_paths(inner) for key, inner in value.items() if key != "cache_dir"}
    if isinstance(value, (list, tuple)):
        return [without_paths(inner) for inner in value]
    return value
