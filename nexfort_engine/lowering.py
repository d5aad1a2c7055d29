# SPDX-License-Identifier: Apache-2.0
"""Making several artefacts with one progress bar, cancellable, each stored as soon as it is ready.

Captures run one after another on the calling thread (export is process-wide). Lowering runs beside it, so that the
caller can watch for a cancel several times a second; an artefact whose lowering was cancelled is finished and stored in
the background, and found there the next time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import torch

from . import lower, readset
from .cache.store import Entry, Store
from .capture import Captured
from .progress import Tracker
from .session import entered

log = logging.getLogger("nexfort")

_WATCH = 0.1  # seconds between two looks at the host's cancel


@dataclass
class Job:
    """One artefact to make. After `lower_all`: `entry`, or `problem` with the reason and its `guards`."""

    name: str
    capture: Callable[[], tuple[Captured, dict[str, Any], str]]
    store: Store
    primary: str
    entry: Entry | None = None
    problem: str | None = None
    guards: list[list[Any]] | None = None
    seconds: float = 0.0
    finished: threading.Event = field(default_factory=threading.Event)


def lower_all(
    jobs: list[Job],
    options: Callable[[str], dict[str, object]],
    cancel: Callable[[], None],
    done: Callable[[Job], None],
) -> None:
    """Make every job's artefact. `done` is called on this thread for each as it ends.

    options: Inductor settings for a device type. cancel raises to stop; what it raises passes through.
    """
    with Tracker(len(jobs)) as tracker:
        for job in jobs:
            cancel()
            began = time.perf_counter()
            captured = _captured(job)
            if captured is not None:
                _lower_watched(job, *captured, options, cancel, tracker)
            job.seconds = time.perf_counter() - began
            done(job)
            tracker.step(job.name, job.seconds)


def _captured(job: Job) -> tuple[Captured, dict[str, Any], str] | None:
    try:
        # a capture under inference mode would mark its tensors as inference tensors, which refuse in-place code
        with torch.inference_mode(False), entered(None):
            return job.capture()
    except readset.Refused as refusal:
        job.problem, job.guards = str(refusal), getattr(refusal, "guards", None)
    except Exception as error:
        # torch's tracing may fail in any way on code of others; the block then runs eager with this as its reason
        job.problem = f"capturing it failed: {type(error).__name__}: {first_line(error)}"
        job.guards = getattr(error, "guards", None)
        log.debug("Nexfort: capturing %s failed", job.name, exc_info=True)
    return None


def first_line(error: BaseException) -> str:
    """What an error says, short enough for a report."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def _lower_watched(
    job: Job,
    captured: Captured,
    manifest: dict[str, Any],
    device: str,
    options: Callable[[str], dict[str, object]],
    cancel: Callable[[], None],
    tracker: Tracker,
) -> None:
    current = torch.cuda.current_device() if device == "cuda" else None

    def work() -> None:
        try:
            if current is not None:
                torch.cuda.set_device(current)
            _lower_and_store(job, captured, manifest, options(device))
        except Exception as error:
            job.problem = f"lowering it failed: {type(error).__name__}: {first_line(error)}"
            log.debug("Nexfort: lowering %s failed", job.name, exc_info=True)
        finally:
            job.finished.set()

    thread = threading.Thread(target=copy_context().run, args=(work,), name="nexfort-lowering", daemon=True)
    thread.start()
    ticked = time.monotonic()
    while not job.finished.wait(_WATCH):
        cancel()
        if time.monotonic() - ticked > 1.0:
            ticked = time.monotonic()
            tracker.tick()


def _lower_and_store(job: Job, captured: Captured, manifest: dict[str, Any], options: dict[str, object]) -> None:
    with job.store.stage() as staged:
        lower.lower(captured, staged / "payload", options)
        job.entry = job.store.commit(job.primary, staged, manifest)
