# SPDX-License-Identifier: Apache-2.0
"""Directories of one process in the system's temporary directory; they go with it.

What a process leaves there that was killed is found by its lock, and goes when another one begins to use a store.
"""

from __future__ import annotations

import functools
import os
import tempfile
import weakref
from pathlib import Path

from . import owner
from .fs import remove_tree
from .staging import ELSEWHERE

NOWHERE = Path(os.devnull)


class Scratch:
    """A private directory until it is cleaned up, as the context manager that it is does, or until the process ends."""

    def __init__(self) -> None:
        """OSError where none can be made."""
        self.path, handle = owner.new_folder(Path(tempfile.gettempdir()), ELSEWHERE)
        self._goes = weakref.finalize(self, _remove, self.path, handle, os.getpid())

    @property
    def name(self) -> str:
        """The directory as text."""
        return str(self.path)

    def cleanup(self) -> None:
        """Remove it; what cannot be removed is left to a later process."""
        self._goes()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_error: object) -> None:
        self.cleanup()


def _remove(folder: Path, handle: int | None, process: int) -> None:
    if os.getpid() == process:  # a forked child has it too
        remove_tree(folder)
        if handle is not None:
            os.close(handle)


@functools.cache
def directory() -> Path:
    """The directory for artefacts that are to last no longer than this process (NEXFORT_GRAPH_CACHE=0).

    Compiled code has to lie in files to be loaded at all. Where no directory can be made it is one that nobody can make
    either, so that the store there says why it cannot be written.
    """
    try:
        return _kept().path
    except OSError:
        return NOWHERE / "nexfort"


def parent() -> Path:
    """The system's temporary directory; where none can be written, a place where nothing can be made."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return NOWHERE


@functools.cache
def _kept() -> Scratch:
    """Held to the end of the process."""
    return Scratch()
