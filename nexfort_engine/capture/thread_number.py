# SPDX-License-Identifier: Apache-2.0
"""The number of the thread: code that keeps things for each thread asks for it, and a capture runs on another one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..guards.option_recorder import OfThread
from ..system.process_settings import replaced
from .source_hashes import is_host_code


class ThreadNumber:
    """What hosts' code is told where it asks for the number of its thread, and whether it asked."""

    def __init__(self, number: int) -> None:
        self.asked, self._number = False, number

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside the block hosts' code on this thread is told this number; no other code and thread is."""
        plain, here, given = threading.get_ident, threading.get_ident(), OfThread(self._number)

        def get_ident() -> int:
            if plain() != here or not is_host_code(sys._getframe(1).f_code):
                return plain()
            self.asked = True
            return given

        with replaced(threading, "get_ident", get_ident):
            yield


def holds_thread(value: Any) -> bool:
    """Whether a plain value is or holds the number of a thread that runs now."""
    return _holds_one_of(value, set(sys._current_frames()))


def _holds_one_of(value: Any, numbers: set[int]) -> bool:
    if isinstance(value, dict):
        return any(_holds_one_of(part, numbers) for item in value.items() for part in item)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_one_of(part, numbers) for part in value)
    return isinstance(value, int) and value in numbers
