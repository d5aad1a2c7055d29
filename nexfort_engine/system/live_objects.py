# SPDX-License-Identifier: Apache-2.0
"""Objects that are listed as long as they live, by threads that add to the list and threads that read it."""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class LiveObjects(Generic[T]):
    """A `weakref.WeakSet` that one thread may list while another adds to it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may come in between
        self._held: weakref.WeakSet[T] = weakref.WeakSet()

    def add(self, item: T) -> None:
        """List it as long as it lives."""
        with self._lock:
            self._held.add(item)

    def listed(self) -> list[T]:
        """Those that live now, in no order."""
        with self._lock:
            return list(self._held)
