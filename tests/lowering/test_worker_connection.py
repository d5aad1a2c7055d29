# SPDX-License-Identifier: Apache-2.0
"""Workers that hang, or that somebody stopped, are ended; those that are slow are not."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nexfort_engine.lowering import worker_connection
from nexfort_engine.lowering.worker_connection import Line, Watch, WorkerGone
from nexfort_engine.system import process_activity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nobody tells what processes do here")

SLEEPS, COMPUTES = "import time; print(flush=True); time.sleep(600)", "print(flush=True)\nwhile True: pass"
STARTS = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_activity, "LOOK", 0.1)
    monkeypatch.setattr(worker_connection, "STOPPED", 0.5)
    monkeypatch.setattr(process_activity, "WORK", 0.05)
    monkeypatch.setattr(worker_connection, "SILENT", 1.0)


@contextmanager
def _working(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own that works by now."""
    run = [sys.executable, "-c", code]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process_activity.end([one.number for one in process_activity.running() if one.group == process.pid])
            process.kill()


@contextmanager
def _watched(process: subprocess.Popen[str]) -> Iterator[tuple[Watch, list[str]]]:
    """The watch of a process that is waited for, and why it was ended."""
    why: list[str] = []
    watch = Watch(lambda: [process.pid])
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        with watch.waiting():
            yield watch, why
            process.wait(20)
            why.append(str(watch.why))
    finally:
        watch.end()
        thread.join()


@pytest.mark.parametrize("code", [SLEEPS, STARTS.format(SLEEPS)], ids=["itself", "what it started"])
def test_one_that_does_nothing_is_ended(code: str) -> None:
    with _working(code) as process, _watched(process) as (_, why):
        pass
    assert process.returncode == -signal.SIGKILL and "did nothing for 1 s" in why[0]
    assert not [one for one in process_activity.running() if one.group == process.pid], "some are left"


def test_one_that_is_stopped_is_ended_though_others_compute() -> None:
    with _working(STARTS.format(COMPUTES)) as process, _watched(process) as (_, why):
        process.send_signal(signal.SIGSTOP)
    assert process.returncode == -signal.SIGKILL and "was stopped" in why[0]


@pytest.mark.parametrize("code", [COMPUTES, STARTS.format(COMPUTES)], ids=["itself", "what it started"])
def test_one_that_computes_is_waited_for(code: str) -> None:
    with _working(code) as process:
        with pytest.raises(subprocess.TimeoutExpired), _watched(process):
            process.wait(3)
        assert process.poll() is None


def test_one_that_nobody_waits_for_is_left_alone() -> None:
    with _working(SLEEPS) as process:
        watch = Watch(lambda: [process.pid])
        thread = threading.Thread(target=watch.run)
        thread.start()
        time.sleep(3)
        watch.end()
        thread.join()
        assert process.poll() is None and watch.why is None


def test_one_that_computes_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_connection, "LONGEST", 1.0)
    with _working(COMPUTES) as process, _watched(process) as (_, why):
        pass
    assert process.returncode == -signal.SIGKILL and "took more than" in why[0]


def test_where_nobody_tells_what_processes_do_time_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_activity, "running", lambda *_: [])
    with _working(SLEEPS) as process:
        with pytest.raises(subprocess.TimeoutExpired), _watched(process):
            process.wait(3)
        monkeypatch.setattr(worker_connection, "LONGEST", 1.0)
        with _watched(process):
            pass
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("said", ["", '{"ok": tr'], ids=["nothing", "half an answer"])
def test_an_answer_that_is_not_whole_is_none(said: str) -> None:
    run = [sys.executable, "-c", f"import sys; sys.stdin.readline(); print({said!r}, end='')"]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        with pytest.raises(WorkerGone, match="without an answer"):
            Line(process.stdout, process.stdin).ask({})
