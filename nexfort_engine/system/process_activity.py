# SPDX-License-Identifier: Apache-2.0
"""What processes do, as far as /proc tells: whether they are stopped, and how long they computed.

By that a slow process is told from one that hangs. Where there is no such directory only the clock is asked.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

LOOK = 1.0  # seconds between two looks
WORK = 0.5  # seconds of a processor that are work; who watches whether its parent is there needs less
WORKS_FOR = "NEXFORT_WORKS_FOR"  # variable: the process that is worked for, and when it began
_PLACE = Path("/proc")
_GONE = ("Z", "X")  # nobody has asked yet how it ended


@dataclass(frozen=True)
class Process:
    """One process at one moment. group: its process group. seconds: of processors, its children's included."""

    number: int
    parent: int
    group: int
    stopped: bool
    seconds: float


_lock = threading.Lock()
_last_look: tuple[float, list[Process]] = (-math.inf, [])  # the clock, and what was seen then


def running(age: float = 0.0) -> list[Process]:
    """All processes that can be seen; none where nobody counts what they compute.

    age: seconds that what was seen may be old, so that threads that each wait for a worker share a look.
    """
    global _last_look
    with _lock:
        if time.monotonic() - _last_look[0] > age:
            _last_look = time.monotonic(), _look()
        return list(_last_look[1])


def _look() -> list[Process]:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(_PLACE):
            if name.isdecimal() and (one := _seen(int(name))) is not None:
                found.append(one)
    own = next((one for one in found if one.number == os.getpid()), None)
    return found if own is not None and own.seconds > 0 else []


def below(number: int, among: Iterable[Process]) -> list[Process]:
    """A process and all that it started, as far as their parents are there."""
    found: list[Process] = []
    of: dict[int, list[Process]] = {}
    for one in among:
        of.setdefault(one.parent, []).append(one)
        if one.number == number:
            found = [one]
    for one in found:
        found += of.get(one.number, ())
    return found


def born(number: int) -> str | None:
    """When a process began; None: it is gone. "": that cannot be told here."""
    try:
        fields = _fields(number)
    except (FileNotFoundError, ProcessLookupError):
        return None if (_PLACE / "self").exists() else ""
    except OSError:
        return ""
    return None if fields[0] in _GONE else fields[19]


def end(numbers: Collection[int]) -> None:
    """End processes at once, stopped ones too."""
    for number in numbers:
        with contextlib.suppress(OSError):
            os.kill(number, getattr(signal, "SIGKILL", signal.SIGTERM))


def _fields(number: int) -> list[str]:
    """What the kernel says of a process, from its state on (man 5 proc)."""
    return (_PLACE / str(number) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _seen(number: int) -> Process | None:
    try:
        fields = _fields(number)
        if fields[0] in _GONE:
            return None
        seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        return Process(number, int(fields[1]), int(fields[2]), fields[0] == "T", seconds)
    except (OSError, IndexError, ValueError):  # it ended
        return None


class Patience:
    """How long to wait for processes that do something together. To be asked every LOOK seconds, or less often."""

    def __init__(self, stopped: float, silent: float, longest: float, unseen: float | None = None) -> None:
        """stopped: seconds that somebody may stop one for. silent: seconds that they may do nothing.

        longest: all seconds; unseen: the same where nobody sees what they do.
        """
        self._most_stopped = stopped
        self._silent, self._longest, self._unseen = silent, longest, longest if unseen is None else unseen
        self._last = time.monotonic()
        self._waited = self._idle = self._done = 0.0
        self._before: dict[int, float] = {}
        self._stopped: dict[int, float] = {}

    def stopped(self, found: Collection[Process]) -> list[int]:
        """Those that somebody stopped, and for too long. To be asked before `lost`."""
        seconds = self._since()
        self._stopped = {one.number: self._stopped.get(one.number, 0.0) + seconds for one in found if one.stopped}
        return [number for number, waited in self._stopped.items() if waited > self._most_stopped]

    def lost(self, found: Collection[Process]) -> str | None:
        """Why they are not to be waited for any longer. None: they are."""
        seconds, self._last = self._since(), time.monotonic()
        self._waited += seconds
        self._done += sum(max(0.0, one.seconds - self._before.get(one.number, 0.0)) for one in found)
        self._idle = 0.0 if self._done >= WORK or not found else self._idle + seconds
        self._done = 0.0 if self._done >= WORK else self._done
        self._before = {one.number: one.seconds for one in found}
        if self._idle > self._silent:
            return f"it did nothing for {self._silent:.0f} s"
        if self._waited > (self._longest if found else self._unseen):
            return f"it took more than {self._waited:.0f} s"
        return None

    def _since(self) -> float:
        """Seconds since the last look, but no more than two: this process may have been stopped itself."""
        return min(time.monotonic() - self._last, 2 * LOOK)
