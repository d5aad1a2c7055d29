# SPDX-License-Identifier: Apache-2.0
"""The end of a process that lowers with the process that it lowers for, however that ends.

What it started, compilers among it, is in its process group and ends with it. A signal of the
kernel's own would be simpler, but that comes when the parent's thread ends; and the end of a pipe is not seen as long
as something else that the parent forked holds it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from ..reporting.resource_shortages import begun
from ..system.process_activity import WORKS_FOR, born

MAIN = f"{__package__}.worker_main"  # `python -m` of it is a worker
_LOOK = 0.5  # seconds


def works_for() -> dict[str, str]:
    """For the environment of who works for this process."""
    return {WORKS_FOR: f"{os.getpid()} {born(os.getpid()) or ''}"}


def watch() -> None:
    """End this process and its group once the process that it works for is gone, or the one that forked it.

    From a thread, which a process that is forked from this one has not. Without a thread to be had it does as it did.
    """
    number, _, began = os.environ.get(WORKS_FOR, "").partition(" ")
    if number.isdecimal():
        begun("nexfort-orphaned", _watch, int(number), began, os.getppid())


def _watch(number: int, began: str, parent: int) -> None:
    while os.getppid() == parent and born(number) in ("", began):
        time.sleep(_LOOK)
    with suppress(AttributeError, OSError):  # Windows has no such groups
        if os.getpgrp() == os.getsid(0):  # it was begun as a group of its own
            os.killpg(0, signal.SIGKILL)
    os._exit(1)
