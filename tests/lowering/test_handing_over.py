# SPDX-License-Identifier: Apache-2.0
"""A graph on its way to a worker and back: whatever is refused there, the step goes on and the reason is told once.

Refused are room, inodes, descriptors, rights, processes and threads, at each point of the way. The worker is a thread
of this process, and what is lowered is one file.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from large_rows import few
from write_points import watched

from nexfort_engine.cache.store import Store
from nexfort_engine.compilation import jobs as lowering
from nexfort_engine.compilation.jobs import Job, lower_all
from nexfort_engine.lowering import inductor, worker_pool
from nexfort_engine.lowering.worker_connection import Line, NoWorkers

PRIMARY = "0" * 32
REFUSED = [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG]


class Forker:
    """In the place of the process that forks workers. A worker of it writes a payload, as far as it may."""

    kernels, number = "", 0
    given_back = 0

    @classmethod
    def lent(cls, _device: str) -> Forker:
        return cls()

    def lines(self, count: int, lines: list[Line]) -> None:
        for _ in range(count):
            ours, theirs = socket.socketpair()
            threading.Thread(target=_work, args=(theirs,), daemon=True).start()
            with ours:
                lines.append(Line(ours.makefile("r", encoding="utf-8"), ours.makefile("w", encoding="utf-8")))

    def give_back(self) -> None:
        type(self).given_back += 1


def _work(own: socket.socket) -> None:
    with own, own.makefile("r") as jobs, own.makefile("w") as answers:
        for line in jobs:
            job = json.loads(line)
            answer: dict[str, Any] = {"ok": True}
            try:
                Path(job["file"]).unlink()
                _lowered(None, Path(job["payload"]), {})
            except OSError as error:
                answer = {"ok": False, "error": f"OSError: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _lowered(_captured: Any, payload: Path, _options: Any) -> None:
    payload.mkdir(parents=True, exist_ok=True)
    handle = os.open(payload / "code", os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        os.write(handle, b"code")
    finally:
        os.close(handle)


@pytest.fixture
def way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Job, Store]]:
    """Runs one job with workers; the job as it is told, and its store."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(worker_pool, "_Forker", Forker)
    monkeypatch.setattr(Forker, "given_back", 0)
    monkeypatch.setattr(worker_pool, "count_for", lambda *_: 2)
    monkeypatch.setattr(worker_pool, "pack", lambda _: pickle.dumps("a graph"))
    monkeypatch.setattr(inductor, "lower", _lowered)
    runs = iter(range(1000))

    def run() -> tuple[Job, Store]:
        store, told = Store(tmp_path / str(next(runs))), []
        capture = lambda: (SimpleNamespace(modules=[]), {"conditions": {}})  # noqa: E731
        job = Job("a", capture, store, PRIMARY, "cpu", done=told.append, more=lambda *_: [])
        lower_all([job], lambda _: {}, lambda: None)
        assert told == [job] and job.finished.is_set() and (job.entry is None) == (job.problem is not None)
        return job, store

    return run


def test_without_refusals_it_is_stored(way: Callable[[], tuple[Job, Store]]) -> None:
    job, store = way()
    assert job.entry is not None and job.entry.persistent and not job.notes and not job.problem
    assert [entry.id for entry in store.entries()] == [job.entry.id]
    deadline = time.monotonic() + 20
    while not Forker.given_back and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Forker.given_back == 1, "its workers are still there"


@contextmanager
def _refusing(number: int, kind: int, times: int | None, tried: set[str]) -> Iterator[list[str]]:
    """The n-th change of a disk fails, and all after it or so many; gives the names of those that failed.

    tried: gains the names of all. Which is the n-th differs from run to run, for several threads make changes.
    """
    count, refused, plain = [0], [], io.open

    def refuse(_: int, name: str, given: tuple[Any, ...]) -> None:
        if name in ("unlink", "rmdir", "remove", "utime", "chmod"):
            return
        tried.add(name)
        count[0] += 1
        if number <= count[0] and (times is None or count[0] < number + times):
            refused.append(name)
            raise OSError(kind, os.strerror(kind), *[str(one) for one in given[:1] if isinstance(one, (str, Path))])

    def opened(file: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
        if (kind == errno.EMFILE or set(mode) & set("wax+")) and not isinstance(file, int):
            refuse(0, "io.open", (file,))
        return plain(file, mode, *given, **more)

    with watched(refuse), pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        yield refused


@pytest.mark.parametrize("times", [1, None], ids=["once", "from then on"])
@pytest.mark.parametrize("kind", few(REFUSED, (errno.ENOSPC, errno.EMFILE)), ids=lambda kind: errno.errorcode[kind])
def test_whatever_cannot_be_written_costs_no_step(
    kind: int, times: int | None, way: Callable[[], tuple[Job, Store]]
) -> None:
    tried: set[str] = set()
    for number in range(1, 200):
        with _refusing(number, kind, times, tried) as refused:
            job, store = way()
        if not refused:
            break
        reasons = [*job.notes, job.problem or "", store.problem or ""]
        if job.entry is None or not job.entry.persistent:
            assert any(os.strerror(kind) in reason for reason in reasons), (number, refused, reasons)
        left = [path for path in (store.root / "staging").glob("*") if path not in store._staging.kept]
        assert not left, "what was begun lies there for good"
    assert 5 < number < 199 and {"mkdir", "open", "io.open", "rename"} <= tried, (number, tried)


@pytest.mark.parametrize("fails", ["a thread", "a later thread", "a process", "a pair of sockets"])
def test_what_cannot_be_started_costs_no_step(
    fails: str, way: Callable[[], tuple[Job, Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def no_thread(thread: threading.Thread) -> None:
        if thread.name.startswith("nexfort"):
            started.append(thread)
            if fails == "a thread" or (fails == "a later thread" and len(started) > 2):
                raise RuntimeError("can't start new thread")
        start(thread)

    def no_process(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def no_sockets() -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    if fails == "a process":
        monkeypatch.setattr(Forker, "lent", classmethod(no_process))
    elif fails == "a pair of sockets":
        monkeypatch.setattr(socket, "socketpair", no_sockets)
    job, _ = way()
    assert job.entry is not None and job.entry.persistent
    if fails == "a later thread":  # one worker is better than none
        assert len(started) > 2 and not job.notes
        return
    assert any("raise the limit" in note for note in job.notes)
    assert job.notes[0].startswith(lowering.ALONE)


def test_the_process_that_forks_is_not_kept_where_it_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything that was made for it."""
    if sys.platform != "linux":
        pytest.skip("workers are forked from one process here")

    def no_process(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(worker_pool._Forker, "_current", None)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    opened = []
    for _ in range(4):  # the first may open what stays for good, such as a log's file
        with pytest.raises(NoWorkers, match="no more processes"):
            worker_pool.Pool(2, "cpu", None)
        assert worker_pool._Forker._current is None
        opened.append(len(os.listdir("/proc/self/fd")))
    assert opened[-1] <= opened[1], opened


def test_a_graph_that_cannot_be_packed_is_lowered_here(
    way: Callable[[], tuple[Job, Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pickle(_: Any) -> bytes:
        raise pickle.PicklingError("it holds a lock")

    monkeypatch.setattr(worker_pool, "pack", no_pickle)
    job, _ = way()
    assert job.entry is not None and any("it holds a lock" in note for note in job.notes)
