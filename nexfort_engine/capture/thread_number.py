# SPDX-License-Identifier: Apache-2.0
"""The number of the thread: code that keeps things for each thread asks for it, and a capture runs on another one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..guards.option_recorder import OfThread
from ..system.process_settings import replaced

_NOT_OF_HOSTS = ("threading", "torch", "logging", "concurrent", "weakref", "queue")


@contextmanager
def as_thread(number: int) -> Iterator[None]:
    """Inside the block hosts' code on this thread is told the number of another one; no other code and thread is."""
    plain, here, given = threading.get_ident, threading.get_ident(), OfThread(number)

    def get_ident() -> int:
        if plain() != here:
            return plain()
        asks = str(sys._getframe(1).f_globals.get("__name__", ""))
        return plain() if asks.partition(".")[0] in _NOT_OF_HOSTS else given

    with replaced(threading, "get_ident", get_ident):
        yield
