# SPDX-License-Identifier: Apache-2.0
"""A directory for a while that is no store's. What a killed process leaves of one is found as a store's own is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .staging import Staging


@contextmanager
def scratch() -> Iterator[Path]:
    """A private directory in the system's temporary one, for as long as the block lasts; OSError where none can be."""
    staging = Staging(Path(tempfile.gettempdir()))
    folder = staging.elsewhere()
    try:
        yield folder
    finally:
        staging.end(folder)
