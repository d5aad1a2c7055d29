# SPDX-License-Identifier: Apache-2.0
"""How far compiling is: counted in regions, told to whoever listens in this context.

The engine steps a `Tracker`; a host installs a sink (a node's progress text, a terminal bar). Sinks are per
context, so two prompts at once do not mix. Nothing here cancels anything, and a broken sink never breaks a
compile.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from .estimate import Ends, seconds_left

logger = logging.getLogger(__name__)

_TOLD_FROM = 3  # a third is done before a time is told
SAID_EVERY = 10.0  # seconds between two lines into a pipe


@dataclass(frozen=True)
class Event:
    """One state of a tracker. `seconds_left` is None while there is nothing to estimate from, as in a first compile."""

    done: int
    total: int
    seconds_left: float | None
    text: str
    phase: str


Sink = Callable[[Event], None]
sink: ContextVar[Sink | None] = ContextVar("nexfort_progress_sink", default=None)


@contextmanager
def use_sink(fn: Sink | None) -> Iterator[None]:
    """Send the events of trackers made in this block to `fn`; None silences them."""
    token = sink.set(fn)
    try:
        yield
    finally:
        sink.reset(token)


def tell(event: Event) -> None:
    """Send one event to the sink of this context, if there is one."""
    told = sink.get()
    try:
        if told is not None:
            told(event)
    except Exception as error:  # as in Tracker
        logger.warning("Nexfort: progress display failed (%s: %s)", type(error).__name__, error)


class Tracker:
    """Counts regions done out of `total` and tells the sink of the context it was made in.

    Use it as a context manager; `step` may come from any thread. One log line at the start and one at the
    end. With `total` 0 (everything was there already) it says nothing at all. `earlier`: when the regions of earlier
    compiles of the same work were done, by which a time is told; without any none is. `ends`: the same of this one.
    """

    def __init__(
        self,
        total: int,
        *,
        phase: str = "compiling",
        clock: Callable[[], float] = time.monotonic,
        earlier: Sequence[Ends] = (),
    ) -> None:
        if total < 0:
            raise ValueError(f"total is {total}; expected the number of regions, 0 or more")
        self.phase = phase
        # Taken here: worker threads that call step() have contexts of their own, without the host's sink.
        self._sink = sink.get()
        self._clock = clock
        self._lock = threading.Lock()
        # One event at a time and in order, and never under _lock, so that a sink may call text().
        self._emit_lock = threading.RLock()
        self._total = total
        self._done = 0
        self._work = 0.0
        self._earlier = earlier
        self.ends: list[float] = []
        self._began = self._stepped = clock()

    def __enter__(self) -> Tracker:
        self._began = self._stepped = self._clock()
        if self._total:
            logger.info("Nexfort: %s %d blocks", self.phase, self._total)
            self._emit()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._total:
            took, work = self._clock() - self._began, self._work
            end = "done" if kind is None else f"stopped by {kind.__name__}"
            logger.info(
                "Nexfort: %s %s, %d of %d blocks in %.1f s (%.1f s of work)",
                *(self.phase, end, self._done, self._total, took, work),
            )

    def add(self, count: int) -> None:
        """`count` more regions turned up."""
        with self._lock:
            self._total += count
        self._emit()

    def step(self, name: str, seconds: float) -> None:
        """Region `name` is done after `seconds` of work."""
        with self._lock:
            self._done += 1
            self._total = max(self._total, self._done)
            self._work += seconds
            self._stepped = self._clock()
            self.ends.append(self._stepped - self._began)
        logger.debug("Nexfort: %s took %.2f s", name, seconds)
        self._emit()

    def tick(self) -> None:
        """Tell the sink the present state again, so that the estimate counts down between steps."""
        self._emit()

    def event(self) -> Event:
        """The present state."""
        with self._lock:
            done, total, left = self._done, self._total, self._seconds_left()
        text = f"Nexfort: {done} of {total} blocks"
        if left is not None and done < total:
            text += f", about {_readable(left)} left"
        return Event(done, total, left, text, self.phase)

    def text(self) -> str:
        """For people: "Nexfort: 5 of 14 blocks, about 10 s left"."""
        return self.event().text

    def _seconds_left(self) -> float | None:
        if self._done >= self._total:
            return 0.0
        if self._done * _TOLD_FROM < self._total:  # too little to go by: the first ones are slow
            return None
        left = seconds_left(self._earlier, self.ends, self._total)
        return None if left is None else max(0.0, left - (self._clock() - self._stepped))

    def _emit(self) -> None:
        with self._emit_lock:
            if self._sink is None:
                return
            try:
                self._sink(self.event())
            except Exception as error:
                # Progress is a courtesy: the compile goes on. A host's cancel is no Exception and passes
                # through.
                self._sink = None
                logger.warning(
                    "Nexfort: progress display failed (%s: %s); going on without it",
                    type(error).__name__,
                    error,
                )


class TerminalSink:
    """A sink for the command line: a tqdm bar on a terminal, otherwise a plain line every ten seconds and at the end.

    Use it as `with TerminalSink() as show, use_sink(show): ...`.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._bar: Any = None
        self._last: tuple[int, int] | None = None
        self._said = -math.inf
        self._make_bar = _find_tqdm() if self._stream.isatty() else None

    def __enter__(self) -> TerminalSink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Show `event`."""
        if self._make_bar is None:
            due = time.monotonic() - self._said >= SAID_EVERY or event.done >= event.total
            if due and (event.done, event.total) != self._last:
                self._last, self._said = (event.done, event.total), time.monotonic()
                print(event.text, file=self._stream, flush=True)
            return
        if self._bar is None:
            self._bar = self._make_bar(total=event.total, file=self._stream, unit="block", leave=False)
        self._bar.total = event.total
        self._bar.n = event.done
        self._bar.set_description_str(event.text, refresh=False)
        self._bar.refresh()
        if event.done >= event.total:
            self.close()

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _find_tqdm() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        logger.debug("Nexfort: tqdm is not installed; progress is shown as plain lines")
        return None
    return tqdm


def _readable(seconds: float) -> str:
    if seconds < 99.5:
        return f"{max(1, round(seconds))} s"
    return f"{max(2, round(seconds / 60))} min"
