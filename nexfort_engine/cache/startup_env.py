# SPDX-License-Identifier: Apache-2.0
"""TORCHINDUCTOR_CACHE_DIR as whoever started this process set it: a name that users of the old engine know.

Torch writes the variable itself, as this engine does for a scope, so what it holds later says nothing about what the
user chose. On Linux /proc keeps the environment as it was when the process started. Elsewhere the value counts that
was there when the engine was first imported, unless Inductor was imported before it. Nothing here writes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from . import ephemeral

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
AT_START = Path("/proc/self/environ")

# Read once and here, because later is too late: see above. The first import of the engine comes by this line.
_AT_IMPORT = None if "torch._inductor" in sys.modules else os.environ.get(VARIABLE)


def inductor_directory() -> Path | None:
    """The directory that the user gave Inductor before this process started, or None.

    Torch's own default is none: a process that used torch hands it down to those it starts.
    """
    value = _at_start()
    if not value:
        return None
    path = Path(os.path.abspath(os.path.expanduser(value)))
    return None if _is_torchs_default(path) else path


def _at_start() -> str | None:
    try:
        found = AT_START.read_bytes()
    except OSError:  # not Linux, or a sandbox without /proc
        return _AT_IMPORT
    prefix = VARIABLE.encode() + b"="
    values = [one.removeprefix(prefix) for one in found.split(b"\0") if one.startswith(prefix)]
    return os.fsdecode(values[0]) if values else None


def _is_torchs_default(path: Path) -> bool:
    return path.name.startswith("torchinductor_") and path.parent == ephemeral.parent().absolute()
