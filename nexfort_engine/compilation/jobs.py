# SPDX-License-Identifier: Apache-2.0
"""Making several artefacts with one progress bar, cancellable, each stored as soon as it is ready.

Captures run one after another on the calling thread (export is process-wide). Lowering runs beside it, so that the
caller can watch for a cancel several times a second; an artefact whose lowering was cancelled is finished and stored in
the background, and found there the next time.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..cache import compile_times
from ..cache.store import Entry, Store
from ..capture.types import Captured
from ..guards import option_recorder
from ..lowering import inductor, worker_pool
from ..lowering.preload import wait_for_import
from ..reporting.progress import Tracker
from ..reporting.report import named
from ..reporting.resource_shortages import advised, begun, describe_error
from ..runtime.forward_context import entered

log = logging.getLogger("nexfort")

WATCH = 0.1  # seconds between two looks at the host's cancel
ALONE = "lowering goes on in this process, without workers"

_left: list[Job] = []  # what a cancelled call left to be lowered in this process


@dataclass
class Job:
    """One artefact to make. When it is `done`: `entry`, or `problem` with the reason and its `guards`.

    done: called on the thread of `lower_all` when it has ended. more: jobs for the same device that its capture, by the
    manifest, shows to be needed too.
    """

    name: str
    capture: Callable[[], tuple[Captured, dict[str, Any]]]
    store: Store
    primary: str
    device: str
    done: Callable[[Job], None]
    more: Callable[[Job, dict[str, Any]], list[Job]]
    weight: int = 0  # how much there is to lower, for the order alone
    family: str = ""  # of the network, with its mode and the kind of block: what times are remembered by
    mode: str = ""
    kind: str = ""
    entry: Entry | None = None
    problem: str | None = None
    guards: list[list[Any]] | None = None
    names: list[list[Any]] = field(default_factory=list)  # what its code had reached by name when it failed
    modes: dict[str, Any] = field(default_factory=dict)  # of torch, that it is lowered under (system/torch_modes.py)
    refused: bool = False  # the problem lies in the block's own code
    lost: bool = False  # somebody took away the directory that it was lowered into
    again: bool = False  # it was lost before
    notes: list[str] = field(default_factory=list)  # how it was made, where that was not as usual
    seconds: float = 0.0
    began: float = 0.0
    finished: threading.Event = field(default_factory=threading.Event)


Later = Callable[[], contextlib.AbstractContextManager["list[Job]"]]


def no_later() -> contextlib.AbstractContextManager[list[Job]]:
    """Nothing is made besides."""
    return contextlib.nullcontext([])


def lower_all(
    jobs: list[Job],
    options: Callable[[str], dict[str, object]],
    cancel: Callable[[], None],
    later: Later = no_later,
) -> None:
    """Make every job's artefact.

    options: Inductor settings for a device type. cancel raises to stop; what it raises passes through. later: entered
    once all are captured, while workers lower them, and left when what it gives is captured too: jobs for the same
    device that are made with them.
    """
    wait_for_import(cancel)  # another network of this process may have begun it when this one was being loaded
    name = _work_of(jobs)
    with Tracker(len(jobs), earlier=_earlier(jobs, name)) as tracker:
        for device, group in _by_device(jobs).items():
            workers = worker_pool.count_for(len(group), device)
            with _workers(workers, device, group[0]) as helpers:
                lost = _run(group, options, cancel, later, tracker, helpers)
                tracker.add(len(lost))
                _run([_anew(job) for job in lost], options, cancel, no_later, tracker, helpers)
            later = no_later
    if name and (reason := begun("nexfort-speed", compile_times.note, jobs[0].store.root, name, tracker.ends)):
        log.debug("Nexfort: how long compiling took is not kept: %s", reason)


def _work_of(jobs: list[Job]) -> str:
    """The name under which compiles of the same work are remembered; "" where nobody said whose it is."""
    if not jobs or not jobs[0].family:
        return ""
    return compile_times.name_of(jobs[0].family, jobs[0].mode, jobs[0].device, (job.kind for job in jobs))


def _earlier(jobs: list[Job], name: str) -> list[list[float]]:
    return compile_times.read(jobs[0].store.root).get(name, []) if name else []


def _anew(job: Job) -> Job:
    """The same once more, for good."""
    made = replace(job, more=lambda *_: [], finished=threading.Event(), problem=None, seconds=0.0)
    made.lost, made.again = False, True
    return made


def _workers(count: int, device: str, first: Job) -> contextlib.AbstractContextManager[worker_pool.Pool | None]:
    """So many workers for a batch whose first job this is; None where there are to be none, or none is to be had."""
    if not count:
        return contextlib.nullcontext()
    try:
        return worker_pool.taken(count, device, first.store.root)
    except worker_pool.NoWorkers as error:
        log.warning("Nexfort: %s", (note := f"{ALONE}: {error}"))
        first.notes.append(note)
        return contextlib.nullcontext()


def _by_device(jobs: list[Job]) -> dict[str, list[Job]]:
    groups: dict[str, list[Job]] = {}
    for job in _largest_first(jobs):
        groups.setdefault(job.device, []).append(job)
    return groups


def _largest_first(jobs: list[Job]) -> list[Job]:
    """The order to begin in: the last to end decides how long all take."""
    return sorted(jobs, key=lambda job: -job.weight)


def _run(
    jobs: list[Job],
    options: Callable[[str], dict[str, object]],
    cancel: Callable[[], None],
    later: Later,
    tracker: Tracker,
    helpers: worker_pool.Pool | None,
) -> list[Job]:
    """Make all; those that were lost for the first time."""
    running: list[Job] = []
    lost: list[Job] = []

    def count(job: Job) -> None:
        if not job.seconds:
            job.seconds = time.perf_counter() - job.began
            tracker.step(job.name, job.seconds)

    def collect(job: Job) -> None:
        count(job)
        if job.lost and not job.again:
            lost.append(job)
        else:
            job.done(job)

    def begin(job: Job) -> list[Job]:
        """Capture one and have it lowered; what its capture shows to be needed besides."""
        cancel()
        job.began = time.perf_counter()
        captured = _captured(job)
        shown = job.more(job, captured[1]) if captured is not None else []
        if captured is None:
            collect(job)
        elif helpers is not None and _submitted(job, *captured, options, helpers):
            running.append(job)
        else:
            _start(job, *captured, options)
            try:
                _wait(job, cancel, tracker)
            except BaseException:
                _left.append(job)
                raise
            collect(job)
        for finished in [j for j in running if j.finished.is_set()]:
            if finished.entry is not None and finished.entry.persistent:
                count(finished)  # it is loaded when nothing is left to be captured and this thread has time
            else:  # a reason, or what nobody finds again should the host cancel
                running.remove(finished)
                collect(finished)
        return shown

    def begin_all(waiting: deque[Job]) -> None:
        while waiting:
            if shown := begin(waiting.popleft()):
                tracker.add(len(shown))
                waiting = deque(_largest_first([*waiting, *shown]))

    begin_all(deque(jobs))
    with later() as further:
        tracker.add(len(further))
        begin_all(deque(_largest_first(further)))
    if running and gc.isenabled():  # it is off while another thread captures a CUDA graph
        gc.collect()  # what captures leave is much, and would hold a later step up for a third of a second
    while running:
        ended = next((j for j in running if j.finished.is_set()), None)
        if ended is None:
            _wait(running[0], cancel, tracker, once=True)
            continue
        cancel()
        running.remove(ended)
        collect(ended)
    return lost


def await_left(cancel: Callable[[], None]) -> bool:
    """Wait for what a cancelled call left to this process; whether there was any. cancel raises to stop waiting.

    Nothing may be captured meanwhile: tracing and lowering share state of torch's that is the process's own.
    """
    waited = bool(_left)
    while _left:
        while not _left[0].finished.wait(WATCH):
            cancel()
        _left.pop(0)
    return waited


def _captured(job: Job) -> tuple[Captured, dict[str, Any]] | None:
    try:
        # a capture under inference mode would mark its tensors as inference tensors, which refuse in-place code
        with torch.inference_mode(False), entered(None):
            return job.capture()
    except option_recorder.Refused as refusal:
        job.problem, job.guards, job.refused = str(refusal), getattr(refusal, "guards", None), True
    except Exception as error:
        # torch's tracing may fail in any way on code of others; the block then runs eager with this as its reason
        job.problem = f"capturing it failed: {describe_error(error)}"
        job.guards, job.names = getattr(error, "guards", None), getattr(error, "names", [])
        log.debug("Nexfort: capturing %s failed", job.name, exc_info=True)
    return None


def _start(
    job: Job,
    captured: Captured,
    manifest: dict[str, Any],
    options: Callable[[str], dict[str, object]],
) -> None:
    """Lower beside the calling thread, in this process; on that thread itself where there is no other to be had."""
    current = torch.cuda.current_device() if job.device == "cuda" else None

    def work() -> None:
        try:
            if current is not None:
                torch.cuda.set_device(current)
            _lower_and_store(job, captured, manifest, _options(job, options))
        except Exception as error:
            job.problem = f"lowering it failed: {describe_error(error)}"
            log.debug("Nexfort: lowering %s failed", job.name, exc_info=True)
        finally:
            job.finished.set()

    if (reason := begun("nexfort-lowering", copy_context().run, work)) is not None:
        job.notes.append(f"a step waited for its artefacts without looking for a cancel: {reason}")
        work()


def _wait(job: Job, cancel: Callable[[], None], tracker: Tracker, *, once: bool = False) -> None:
    """Wait for a job while watching for a cancel; `once`: only until the next look."""
    looks = 0
    while not job.finished.wait(WATCH):
        cancel()
        looks += 1
        if looks % 10 == 0 or once:
            tracker.tick()
        if once:
            return


def _submitted(
    job: Job,
    captured: Captured,
    manifest: dict[str, Any],
    options: Callable[[str], dict[str, object]],
    helpers: worker_pool.Pool,
) -> bool:
    """Hand a graph to a worker process. False: it is to be lowered in this process."""
    if not worker_pool.portable(captured.modules):
        return False
    try:
        _submit(job, captured, manifest, options, helpers)
    except Exception as error:  # of the disk, or of a graph that cannot be pickled
        log.debug("Nexfort: %s is not handed to a worker", job.name, exc_info=True)
        job.notes.append(f"what a worker should have lowered was lowered in this process: {describe_error(error)}")
        return False
    return True


def _submit(
    job: Job,
    captured: Captured,
    manifest: dict[str, Any],
    options: Callable[[str], dict[str, object]],
    helpers: worker_pool.Pool,
) -> None:
    """Lower in a worker process; the thread that hears of its end stores the artefact."""
    stack = contextlib.ExitStack()
    staged = stack.enter_context(job.store.stage())
    device = f"cuda:{torch.cuda.current_device()}" if job.device == "cuda" else job.device

    def then(problem: str | None) -> None:
        try:
            with stack, _watched(job, staged):
                if problem is None:
                    _commit(job, staged, manifest)
                else:
                    job.problem = f"lowering it failed: {advised(problem)}"
        except Exception as error:
            job.problem = f"storing it failed: {describe_error(error)}"
        finally:
            job.finished.set()

    def instead() -> str | None:
        shutil.rmtree(staged / "payload", ignore_errors=True)
        try:
            inductor.lower(captured, staged / "payload", _options(job, options))
        except Exception as error:
            return named(error)
        return None

    def gone(reason: str) -> None:
        job.notes.append(f"a worker did not lower what it was given ({reason}); this process did")

    try:
        helpers.submit(captured, staged, captured.modules, _options(job, options), device, then, instead, gone)
    except BaseException:
        stack.close()
        raise


def _options(job: Job, options: Callable[[str], dict[str, object]]) -> dict[str, object]:
    return {**options(job.device), "nexfort.modes": job.modes}


def _lower_and_store(job: Job, captured: Captured, manifest: dict[str, Any], options: dict[str, object]) -> None:
    with job.store.stage() as staged, _watched(job, staged):
        inductor.lower(captured, staged / "payload", options)
        _commit(job, staged, manifest)


@contextlib.contextmanager
def _watched(job: Job, staged: Path) -> Iterator[None]:
    """Whoever empties a cache by hand takes away what is being made in it, too."""
    try:
        yield
    finally:
        job.lost = job.entry is None and job.store.lost(staged)


def _commit(job: Job, staged: Path, manifest: dict[str, Any]) -> None:
    inductor.take_limits(staged / "payload", manifest)
    job.entry = job.store.commit(job.primary, staged, manifest, lasts=not manifest.get("only_here"))
