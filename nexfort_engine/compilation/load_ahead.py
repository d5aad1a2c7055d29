# SPDX-License-Identifier: Apache-2.0
"""Stored artefacts loaded ahead, on a thread beside what loads the model, so that a first step need not load them.

The first step of any engine ends it: what is not loaded by then, or does not load, is left to the step that wants it,
which says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch

from ..cache.store import Entry
from ..capture.types import LOCK
from ..lowering.preload import SWITCH, wait_for_import
from ..reporting.resource_shortages import begun, describe_error
from ..system.yielding import switching_within
from .lookup import Finder

log = logging.getLogger("nexfort")

_LOOK = 0.1  # seconds between two looks at whether a step is cancelled

_running: list[_Work] = []


def begin(finder: Finder, primaries: Iterable[str], device: torch.device) -> None:
    """Load what the store has for these keys, on a thread; without one the first step loads it.

    device: where it will run.
    """
    work = _Work()
    _running[:] = [one for one in _running if not one.ended.is_set()]
    if (reason := begun("nexfort-ahead", work.run, finder, list(dict.fromkeys(primaries)), device)) is not None:
        log.debug("Nexfort: nothing is loaded ahead: %s", reason)
    else:
        _running.append(work)


def finish(cancel: Callable[[], None]) -> None:
    """End it: nothing is loaded ahead once this returns. cancel: raises to stop waiting."""
    for work in list(_running):
        work.over.set()
        while not work.ended.wait(_LOOK):
            cancel()
    _running.clear()


class _Work:
    """What one thread does."""

    def __init__(self) -> None:
        self.over, self.ended = threading.Event(), threading.Event()

    def run(self, finder: Finder, primaries: list[str], device: torch.device) -> None:
        try:
            self._run(finder, primaries, device)
        finally:
            self.ended.set()

    def _run(self, finder: Finder, primaries: list[str], device: torch.device) -> None:
        store = finder.state.store
        for primary in primaries:
            if self.over.is_set():
                return
            store.ahead([primary])
        wait_for_import()
        entries = [entry for primary in primaries for entry in store.candidates(primary)]
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), switching_within(SWITCH):
            for entry in entries:
                # whoever has the lock makes artefacts, and settings of torch's are the process's own
                if self.over.is_set() or not LOCK.acquire(blocking=False):
                    return
                try:
                    _load(finder, entry)
                finally:
                    LOCK.release()


def _load(finder: Finder, entry: Entry) -> None:
    try:
        finder.load_ahead(entry)
    except Exception as error:  # a damaged or foreign file, which the step sets aside with its reason
        log.debug("Nexfort: %s is not loaded ahead: %s", entry.id, describe_error(error))
