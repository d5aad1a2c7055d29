# SPDX-License-Identifier: Apache-2.0
"""Memory that the C library keeps although nobody uses it: given back to the system after steps of new sizes.

On a processor the tensors of a step lie in the C library's heap. A step of other sizes needs other places there, and
libraries keep small things of their own for each size (oneDNN its kernels), which lie between them. So free memory
comes in ever more pieces: 1.3 MB for each further size in eager code of some convolutions, 10 in compiled code, where
more tensors live at a time (torch 2.11, glibc 2.36, 2026-11). glibc can give such pieces back; other libraries are left
as they are.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable

_PART = 20  # at most one part in so many of the time is taken
_SECONDS = 0.1  # between two times at least
_STEPS = 2  # of new sizes: what libraries keep is made in the first, beside which the second has other places

_lock = threading.Lock()
_wanted = 0  # times
_due = 0.0  # when it may be done again, on the clock


def give_back(wanted: bool) -> None:
    """After a step: give unused memory back to the system. wanted: it was of new sizes; others see to what is left."""
    global _wanted, _due
    if wanted:
        _wanted = _STEPS
    if not _wanted or (trim := _trim()) is None or time.monotonic() < _due or not _lock.acquire(blocking=False):
        return
    try:
        _wanted, began = max(_wanted - 1, 0), time.thread_time()
        trim(0)
        _due = time.monotonic() + max(_SECONDS, _PART * (time.thread_time() - began))
    finally:
        _lock.release()


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's own function, or None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
