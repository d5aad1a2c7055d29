# SPDX-License-Identifier: Apache-2.0
"""What a machine has too little of: threads, processes, descriptors, memory, room on a disk. In plain words.

Whoever needs one gets it or the reason, and says in the report how it goes on without.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

from .report import named

_ROOM = "make room there, or name another folder in NEXFORT_CACHE_DIR"
_FILES = "too many files are open, raise the limit (ulimit -n)"
_PROCESSES = "no more processes or threads may be started, raise the limit of the user or the container"
_ADVICE = {  # by what the system says
    **{os.strerror(number): _ROOM for number in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))},
    os.strerror(errno.EMFILE): _FILES,
    os.strerror(errno.EAGAIN): _PROCESSES,
    "can't start new thread": _PROCESSES,  # Python's own
}
PASSING = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # what may be had again a moment later


def begun(name: str, work: Callable[..., object], *args: Any) -> str | None:
    """Do some work on a daemon thread of its own. None: it has begun; otherwise why there is no thread for it."""
    try:
        threading.Thread(target=work, args=args, name=name, daemon=True).start()
    except (RuntimeError, MemoryError) as error:  # Python's error where the system has no thread to give
        return describe_error(error)
    return None


def describe_error(error: BaseException) -> str:
    """What went wrong, for a report, with what helps where the machine has too little of something."""
    return advised(named(error))


def advised(problem: str) -> str:
    """A problem with what helps, if it is of this kind."""
    advice = next((advice for words, advice in _ADVICE.items() if words in problem), None)
    return problem if advice is None else f"{problem}; {advice}"
