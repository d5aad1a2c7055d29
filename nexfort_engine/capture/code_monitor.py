# SPDX-License-Identifier: Apache-2.0
"""Which code of the host runs, by sys.monitoring (PEP 669), for Python 3.12 and newer.

Each change of what is watched in the whole process makes Python prepare all code anew, most of which is torch's: that
took three quarters of a capture. So one tool is told of the first call of each function and stays. The other one is
told of calls inside a walk, and is set on functions of the host alone, which the first one knows.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

Code = types.CodeType
_NUMBERS = (4, 3)  # of tools; the others are kept for debuggers, coverage and profilers


class CodeMonitor:
    """Tells walks, each of which belongs to a thread, what code this thread runs."""

    def __init__(self, others: tuple[str, ...], is_host: Callable[[Code], bool]) -> None:
        """others: how the names of files begin that hold no host code. is_host: asked for what they leave."""
        self._monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        self._others, self._is_host = others, is_host
        self._tool: int | None = None  # that stays
        self._inside: int | None = None  # in a walk
        self._known: dict[int, weakref.ref[Code]] = {}  # by their addresses: equal code is not the same code
        self._walks: dict[int, tuple[set[Code], ...]] = {}  # thread -> its walks, the outermost first
        self._lock = threading.Lock()  # the callbacks do without: they run wherever a function begins

    @contextlib.contextmanager
    def walk(self) -> Iterator[set[Code] | None]:
        """The host's code that this thread runs inside the block; None where other tools have taken the numbers."""
        codes = set[Code]()
        if not self._opened(codes):
            yield None
            return
        try:
            yield codes
        finally:
            self._closed()

    def _opened(self, codes: set[Code]) -> bool:
        """Begin a walk of this thread. Whether there are numbers for it."""
        with self._lock:
            if not self._begin():
                return False
            self._walks[get_ident()] = (*self._walks.get(get_ident(), ()), codes)
            self._listen(True)
            return True

    def _closed(self) -> None:
        """End the innermost walk of this thread."""
        with self._lock:
            *outer, _ = self._walks.pop(get_ident())
            if outer:
                self._walks[get_ident()] = tuple(outer)
            if not self._walks:
                self._listen(False)
                self._free(self._inside)
                self._inside = None

    def close(self) -> None:
        """Be told of nothing until another walk begins."""
        with self._lock:
            if self._tool is not None:
                self._monitoring.set_events(self._tool, 0)
                self._free(self._tool)
                self._tool = None
        atexit.unregister(self.close)

    def _begin(self) -> bool:
        """Take the numbers that are needed. Whether there are enough."""
        free = [number for number in _NUMBERS if self._monitoring.get_tool(number) is None]
        if len(free) < (self._tool, self._inside).count(None):
            return False
        if self._tool is None:
            self._tool = self._take(free.pop(0), self._met)
            self._monitoring.set_events(self._tool, self._monitoring.events.PY_START)
            atexit.register(self.close)  # functions run for the first time while modules are taken down
        if self._inside is None:
            self._inside = self._take(free.pop(0), self._runs)
        return True

    def _take(self, tool: int, callback: Callable[[Code, int], Any]) -> int:
        self._monitoring.use_tool_id(tool, "nexfort")
        self._monitoring.register_callback(tool, self._monitoring.events.PY_START, callback)
        return tool

    def _free(self, tool: int | None) -> None:
        self._monitoring.register_callback(tool, self._monitoring.events.PY_START, None)
        self._monitoring.free_tool_id(tool)

    def _listen(self, on: bool) -> None:
        """Be told of each known function of the host once more, or of none."""
        for code in [code for known in list(self._known.values()) if (code := known()) is not None]:
            if self._is_host(code):
                self._set(code, False)  # or one that was told of is not told of again
                if on:
                    self._set(code, True)

    def _set(self, code: Code, on: bool) -> None:
        self._monitoring.set_local_events(self._inside, code, self._monitoring.events.PY_START if on else 0)

    # -- called by Python ----------------------------------------------------------------------------------

    def _met(self, code: Code, _offset: int) -> Any:
        """A function runs for the first time in this process."""
        if not code.co_filename.startswith(self._others):
            self._known[id(code)] = weakref.ref(code)
            if self._walks:
                self._note(code)
                if len(self._walks) > 1 or get_ident() not in self._walks:  # another thread's walk may come to it
                    self._set(code, True)
        return self._monitoring.DISABLE

    def _runs(self, code: Code, _offset: int) -> Any:
        """A known function of the host runs."""
        return self._monitoring.DISABLE if self._note(code) and len(self._walks) == 1 else None

    def _note(self, code: Code) -> bool:
        walks = self._walks.get(get_ident(), ())
        for codes in walks:
            codes.add(code)
        return bool(walks)
