# SPDX-License-Identifier: Apache-2.0
"""The directory for artefacts that are to last no longer than this process (NEXFORT_GRAPH_CACHE=0).

Compiled code has to lie in files to be loaded at all; these lie in the system's temporary directory, are found by no
other process and go when this one ends.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from .disk import remove_at_exit


@functools.cache
def directory() -> Path:
    """The directory, one a process, made on first use."""
    folder = Path(tempfile.mkdtemp(prefix="nexfort-"))  # 0700
    remove_at_exit(folder)
    return folder
