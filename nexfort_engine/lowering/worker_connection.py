# SPDX-License-Identifier: Apache-2.0
"""The line to a lowering worker, and how long its answer is waited for.

Whoever asks waits for the end of the line. A worker that hangs, or that somebody stopped, is ended here, so that its
line ends too; one that is only slow computes, which system/process_activity.py sees.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from ..system import compiler_processes, process_activity
from ..system.process_activity import Patience

STOPPED = 20.0  # seconds that somebody may stop one of them for
# seconds that workers may do nothing; a compiler that hangs under them is ended before (system/compiler_processes.py)
SILENT = 180.0
LONGEST = 3600.0  # seconds in which no worker is done with a graph


class WorkerGone(Exception):
    """A worker ended before it answered: it was killed, or could not start."""


class NoWorkers(Exception):
    """This machine gives no processes, threads or descriptors for workers. The text is the reason for the report."""


@dataclass
class Line:
    """The line to one worker: a job a line one way, an answer a line the other way."""

    answers: IO[str]
    jobs: IO[str]

    def ask(self, job: dict[str, Any]) -> str | None:
        """Have one job done. The failure, or None. Raises WorkerGone."""
        try:
            self.jobs.write(json.dumps(job | {"hung": compiler_processes.hung}) + "\n")
            self.jobs.flush()
            line = self.answers.readline()
        except OSError as error:
            raise WorkerGone(str(error)) from error
        if not line.endswith("\n"):
            raise WorkerGone("it ended without an answer")
        answer = json.loads(line)
        compiler_processes.hung.update(answer.get("hung") or {})
        return None if answer["ok"] else str(answer["error"])

    def close(self) -> None:
        """The worker ends as soon as it sees this."""
        for stream in (self.jobs, self.answers):
            with contextlib.suppress(OSError):
                stream.close()


class Watch:
    """Ends the workers of one batch that are not to be waited for any longer."""

    def __init__(self, leaders: Callable[[], list[int]]) -> None:
        """leaders: gives the processes whose groups the workers are in."""
        self._leaders, self._lock, self._ended = leaders, threading.Lock(), threading.Event()
        self._asked = self._done = 0
        self.why: str | None = None  # workers were ended here, just now

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a worker is waited for."""
        with self._lock:
            self._asked += 1
        try:
            yield
        finally:
            with self._lock:
                self._asked, self._done = self._asked - 1, self._done + 1

    def run(self) -> None:
        """Watch until the end, on a thread of its own."""
        patience, done = None, 0
        while not self._ended.wait(process_activity.LOOK):
            self.why = None
            if patience is None or not self._asked or self._done > done:
                patience, done = Patience(STOPPED, SILENT, LONGEST), self._done
            elif self._asked:
                self._look(patience)

    def _look(self, patience: Patience) -> None:
        leaders = self._leaders()
        found = [one for one in process_activity.running(process_activity.LOOK / 2) if one.group in leaders]
        stopped, lost = patience.stopped(found), patience.lost(found)
        if lost is not None:
            self.why = f"{lost}, and was ended"
            process_activity.end([one.number for one in found] or leaders)
        elif stopped:
            self.why = f"it was stopped for {STOPPED:.0f} s, and was ended"
            process_activity.end(stopped)

    def end(self) -> None:
        """Nobody waits any more."""
        self._ended.set()
