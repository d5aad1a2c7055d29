# SPDX-License-Identifier: Apache-2.0
"""Background: artefacts made beside the steps, which run eager meanwhile; compiled code takes over between two steps.

One thread of an engine at a time. It holds the lock of captures for as long as it makes something, as a step does that
waits for its artefacts; a step of an engine that works this way never waits for that lock. It asks no host for a
cancel: what is begun is finished and kept.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import copy_context

import torch

from ..capture.types import LOCK
from ..reporting.report import named
from ..reporting.resource_shortages import describe_error
from ..runtime.forward_context import current

log = logging.getLogger("nexfort")

NOTE = "artefacts were made in the background; the steps until they were there ran eager"


class Background:
    """The thread of one engine that makes artefacts."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """note: takes what the report is told."""
        self._note = note
        self._thread: threading.Thread | None = None
        self.failed = False  # something is wrong with it: what is missing is made before the step, which says why

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

        False: there is no thread to be had. What is missing is made before steps from then on.
        """
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        context = copy_context()
        context.run(current.set, None)
        thread = threading.Thread(target=context.run, args=(self._run, work, device), name="nexfort-background")
        thread.daemon = True
        try:
            thread.start()
        except RuntimeError as error:
            self.failed = True
            self._note(f"artefacts are made before steps, not in the background: {describe_error(error)}")
            return False
        self._thread = thread
        self._note(NOTE)
        return True

    def _run(self, work: Callable[[], object], device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            with LOCK:
                work()
        except Exception as error:
            # nobody waits for this thread, so that it has to be told here; the next step makes what is missing itself
            self.failed = True
            log.warning("Nexfort: making artefacts in the background failed", exc_info=True)
            self._note(f"making artefacts in the background failed ({named(error)}); they are made before steps")

    def join(self, seconds: float | None = None) -> bool:
        """Wait until everything is there; whether it is."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.busy
