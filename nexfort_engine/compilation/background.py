# SPDX-License-Identifier: Apache-2.0
"""Background: artefacts made beside the steps, which run eager meanwhile. handover.py says until when.

One thread of an engine at a time. It holds the lock of captures for as long as it makes something, as a step does that
waits for its artefacts; a step of an engine that works this way never waits for that lock. It asks no host for a
cancel: what is begun is finished and kept. No failure of it reaches a step, which runs eager with the reason.

The interpreter would end the thread wherever it is, and inside code in C++ that aborts the process. So the thread is
asked to stop before, between two artefacts.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable
from contextvars import copy_context
from dataclasses import replace

import torch

from ..capture.types import LOCK
from ..reporting import progress
from ..reporting.report import Report, named
from ..reporting.resource_shortages import describe_error
from ..runtime.forward_context import current
from ..system.live_objects import LiveObjects
from ..system.process_settings import rare_full_collections
from ..system.yielding import beside_steps

log = logging.getLogger("nexfort")

NOTE = "artefacts are made in the background; what begins before they are there runs eager"
PHASE = "background"  # of its progress
_PATIENCE = 3.0  # seconds in which a process that ends lets a capture come to its end
_REST = 3.0  # seconds in which the host may first end what it does: decoding a picture takes twice as long beside it
_LOOK = 0.05  # seconds between two looks at that
_BESIDE = "{}, in the background"
_ENDED = progress.Event(1, 1, 0.0, "Nexfort: compiled in the background; the next picture runs compiled", PHASE)
_FAILED = progress.Event(1, 1, 0.0, "Nexfort: compiling in the background failed; see the report", PHASE)

_threads: LiveObjects[threading.Thread] = LiveObjects()
_ending = threading.Event()


def stop_at_exit() -> None:
    """End this thread, the background's, if the process is about to end. For places where nothing is half done."""
    if _ending.is_set():
        raise SystemExit


@functools.cache
def _watch_exit() -> None:
    atexit.register(_end_all, os.getpid())


def _end_all(process: int) -> None:
    if os.getpid() == process:  # a forked child has no such thread
        _ending.set()
        for thread in _threads.listed():
            thread.join(_PATIENCE)


class Background:
    """The thread of one engine that makes artefacts.

    waits: there is no thread to be had, and what is missing is made before steps. problem: why its last work failed, ""
    if it did not. failures: how often it failed since it last did not. begun: how often it began.
    """

    def __init__(self, report: Report, works_on: Callable[[], Hashable] = lambda: None) -> None:
        """works_on: what the host works on now, such as a prompt; None for nothing."""
        self._report, self._works_on = report, works_on
        self._thread: threading.Thread | None = None
        self.waits = False
        self.problem, self.failures, self.begun = "", 0, 0

    @property
    def busy(self) -> bool:
        """Whether something is being made."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def here(self) -> bool:
        """Whether the caller is the thread that makes it."""
        return self._thread is threading.current_thread()

    def start(self, work: Callable[[], object]) -> bool:
        """Do the work on a thread of its own, in the caller's context and on its device, but in no step.

        False: there is no thread to be had.
        """
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        context = copy_context()
        context.run(current.set, None)
        context.run(progress.sink.set, _beside(progress.sink.get()))
        thread = threading.Thread(target=context.run, args=(self._run, work, device), name="nexfort-background")
        thread.daemon = True
        self._report.making(True)
        try:
            thread.start()
        except RuntimeError as error:
            self._report.making(False)
            self.waits = True
            self._report.note(f"artefacts are made before steps, not in the background: {describe_error(error)}")
            return False
        _threads.add(thread)
        _watch_exit()
        self._thread, self.begun = thread, self.begun + 1
        self._report.note(NOTE)
        return True

    def _run(self, work: Callable[[], object], device: int | None) -> None:
        ended = _FAILED
        try:
            if device is not None:
                torch.cuda.set_device(device)
            end, begun_in = time.monotonic() + _REST, self._works_on()
            while begun_in is not None and self._works_on() == begun_in and time.monotonic() < end:
                if _ending.wait(_LOOK):
                    break
            with LOCK, beside_steps(), rare_full_collections():
                work()
            self.problem, self.failures, ended = "", 0, _ENDED
        except Exception as error:  # nobody waits for this thread, so that it has to be told here
            self.problem = f"making artefacts in the background failed: {named(error)}"
            self.failures += 1
            log.warning("Nexfort: making artefacts in the background failed", exc_info=True)
            self._report.note(self.problem)
        finally:
            self._report.making(False)
            progress.tell(ended)

    def join(self, seconds: float | None = None) -> bool:
        """Wait until everything is there; whether it is."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.busy


def _beside(sink: progress.Sink | None) -> progress.Sink | None:
    """A sink to which is told that nobody waits for what is being made."""
    if sink is None:
        return None
    return lambda event: sink(replace(event, text=_BESIDE.format(event.text), phase=PHASE))
