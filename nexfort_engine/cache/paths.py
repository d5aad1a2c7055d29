# SPDX-License-Identifier: Apache-2.0
"""Where the cache lies and how large it may grow, from the environment and the platform.

Hosts with a place of their own (ComfyUI) pass it to the store instead.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path

from . import ephemeral
from .startup_env import inductor_directory

log = logging.getLogger("nexfort")

DEFAULT_LIMIT = 8 << 30
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def chosen_root() -> Path | None:
    """`NEXFORT_CACHE_DIR`, else `nexfort` in the `TORCHINDUCTOR_CACHE_DIR` that this process was started with.

    Either ranks above the platform's and a host's own place. None if nobody chose.
    """
    if chosen := os.environ.get("NEXFORT_CACHE_DIR"):
        return written_out(chosen)
    inherited = inductor_directory()
    return None if inherited is None else inherited / "nexfort"


def default_root() -> Path:
    """The directory that was chosen, or `nexfort` in the platform's cache directory of this user."""
    if (chosen := chosen_root()) is not None:
        return chosen
    try:
        if sys.platform == "win32":
            local = os.environ.get("LOCALAPPDATA")
            return (Path(local) if local else Path.home() / "AppData" / "Local") / "nexfort" / "Cache"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "nexfort"
        base = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "nexfort"
    except RuntimeError:  # no home directory; whoever owns the directory is checked before it is read
        user = os.geteuid() if hasattr(os, "geteuid") else "user"
        return ephemeral.parent() / f"nexfort-{user}"


def written_out(path: str) -> Path:
    """An absolute path; "~" stays as it is where nobody knows the home directory."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def base_root() -> Path | None:
    """`NEXFORT_CACHE_BASE`: a read-only cache under the user's own, such as one in a container's image; or None."""
    chosen = os.environ.get("NEXFORT_CACHE_BASE", "").strip()
    return written_out(chosen) if chosen else None


def default_limit() -> int:
    """`NEXFORT_CACHE_LIMIT` in bytes ("6000000000", "6GiB", "500M"), or 8 GiB."""
    text = os.environ.get("NEXFORT_CACHE_LIMIT", "").strip()
    if not text:
        return DEFAULT_LIMIT
    try:
        return parse_size(text)
    except ValueError as error:
        log.warning("NEXFORT_CACHE_LIMIT is ignored: %s", error)
        return DEFAULT_LIMIT


def parse_size(text: str) -> int:
    """Bytes of "6000000000", "6GiB", "6G" or "500 MB" (all units are powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(f"found {text!r}, expected a size such as 8GiB, 500M or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def size_text(count: float) -> str:
    """A readable size: "512 B", "3.4 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
