# SPDX-License-Identifier: Apache-2.0
"""The directory for artefacts that are to last no longer than this process (NEXFORT_GRAPH_CACHE=0).

Compiled code has to lie in files to be loaded at all; these lie in the system's temporary directory, are found by no
other process and go when this one ends.
"""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from pathlib import Path

from .disk import remove_tree


@functools.cache
def directory() -> Path:
    """The directory, one a process, made on first use."""
    folder = Path(tempfile.mkdtemp(prefix="nexfort-"))  # 0700
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _remove_own(folder: Path, process: int) -> None:
    """A forked child runs this too, and must not take its parent's."""
    if os.getpid() == process:
        remove_tree(folder)
