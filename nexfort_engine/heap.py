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

_PART = 20  # of the time since it was done last is the most that it may take
_SECONDS = 1.0  # between two times at least

_lock = threading.Lock()
_due = 0.0  # when it may be done again, on the clock


def give_back() -> None:
    """Give unused memory back to the system, unless that was done a moment ago."""
    global _due
    trim = _trim()
    if trim is None or not _lock.acquire(blocking=False):
        return
    try:
        began = time.monotonic()
        if began >= _due:
            trim(0)
            ended = time.monotonic()
            _due = ended + max(_SECONDS, _PART * (ended - began))
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
