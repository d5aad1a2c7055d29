# SPDX-License-Identifier: Apache-2.0
"""A machine that gives no threads, or no processes: everything goes on without, and the report says why.

test_handing_over.py has the way to workers, and what cannot be written there.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nexfort_engine
from nexfort_engine import engine
from nexfort_engine.capture import exporter
from nexfort_engine.compilation import support
from nexfort_engine.compilation.background import NOTE
from nexfort_engine.lowering import preload, worker, worker_pool
from nexfort_engine.reporting import resource_shortages
from nexfort_engine.weights import offload

LIMIT = "no more processes or threads may be started"


class Small(nn.Module):
    """One region."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Refusing:
    """No thread of the engine's whose name begins with a text is to be had from now on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self._patch, self._start = patch, threading.Thread.start

    def begin(self, name: str) -> None:
        def start(thread: threading.Thread) -> None:
            if thread.name.startswith(name):
                self.names.append(thread.name)
                raise RuntimeError("can't start new thread")
            self._start(thread)

        self._patch.setattr(threading.Thread, "start", start)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    return Refusing(monkeypatch)


def _small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Small().eval().requires_grad_(False), torch.randn(2, 8)


def _step(block: nn.Module, compiled: Any, x: torch.Tensor) -> dict[str, Any]:
    with torch.no_grad():
        assert torch.allclose(compiled(x), block(x), atol=1e-5)
    return compiled.report.as_dict()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_step_is_right_where_no_thread_is_to_be_had(
    workers: str, refusing: Refusing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not one of all that a first step would start, but the one that traces."""
    monkeypatch.setenv(worker_pool.VARIABLE, workers)
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(preload, "_threads", {})
    monkeypatch.setattr(worker_pool._Forker, "_current", None)
    exporter._tracing_thread()
    refusing.begin("nexfort")
    block, x = _small()
    compiled = nexfort_engine.compile(block)
    report = _step(block, compiled, x)
    assert report["artefacts_compiled"] == 1 and {"nexfort-import", "nexfort-lowering"} <= {*refusing.names}
    assert any("without looking for a cancel" in note and LIMIT in note for note in report["notes"])
    if workers == "1":
        assert any("no workers were started ahead" in note and LIMIT in note for note in report["notes"])
    assert worker_pool._expected is None


def test_without_a_thread_to_trace_on_a_region_runs_eager(
    refusing: Refusing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And what was refused does not run on the one that there is later."""
    monkeypatch.setenv(worker_pool.VARIABLE, "0")
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(exporter, "_tracing_thread", exporter._tracing_thread.__wrapped__)
    made: list[Any] = []
    kind = exporter.ThreadPoolExecutor
    monkeypatch.setattr(exporter, "ThreadPoolExecutor", lambda *a, **k: made.append(kind(*a, **k)) or made[-1])
    refusing.begin("nexfort-tracing")
    block, x = _small()
    report = _step(block, nexfort_engine.compile(block), x)
    (row,) = report["eager"]
    assert refusing.names and LIMIT in row["reason"] and report["artefacts_compiled"] == 0
    assert all(one._work_queue.qsize() <= 1 for one in made), "a trace waits for a thread that is not there"


def test_what_no_thread_makes_in_the_background_is_made_before_steps(
    refusing: Refusing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(worker_pool.VARIABLE, "0")
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    block, x = _small()
    compiled = nexfort_engine.compile(block, options={"options": {"compile.background": True}})
    refusing.begin("nexfort-background")
    report = _step(block, compiled, x)
    assert refusing.names == ["nexfort-background"] and report["artefacts_compiled"] == 1
    assert any("not in the background" in note and LIMIT in note for note in report["notes"])
    assert NOTE not in report["notes"]


def test_weights_that_no_thread_copies_stay_where_they_are(refusing: Refusing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 1)
    home: Any = type("Home", (), {"has": lambda *_: False, "moved": lambda *_: None})()
    layer, away = nn.Linear(8, 8), offload.Offload(home)
    refusing.begin("nexfort-offload")
    assert away.without([layer], "a version") == 0 and refusing.names
    away.join(10)
    assert away.without([layer], "a version") == 0 and not offload.is_away(layer) and away.stays("a version")


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_compiler_that_cannot_be_started_now_is_asked_by_the_next_step(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(worker_pool.VARIABLE, "0")
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    from torch._inductor import cpp_builder

    def no_process(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    support.reason_for.cache_clear()
    cpp_builder.cpp_compiler_search.cache_clear()
    block, x = _small()
    compiled = nexfort_engine.compile(block)
    preload.wait_for_import()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_process)
        for _ in range(2):
            report = _step(block, compiled, x)
    (row,) = report["eager"]
    assert "could not be started" in row["reason"] and os.strerror(number) in row["reason"]
    assert _step(block, compiled, x)["artefacts_compiled"] == 1


def test_what_is_made_ready_ahead_fails_no_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_file(*_: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(engine.Engine, "stored", no_file)
    compiled = nexfort_engine.compile(_small()[0])
    assert any("too many files are open" in note for note in compiled.report.as_dict()["notes"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked here")
@pytest.mark.parametrize("what", ["fork", "pipe"])
def test_parts_for_which_no_process_is_forked_are_done_in_turn(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    monkeypatch.setattr(os, what, refused)
    assert worker.in_forks([os.getpid] * 3) == [os.getpid()] * 3
    monkeypatch.undo()
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_reasons_say_what_helps() -> None:
    said = {
        number: resource_shortages.describe_error(OSError(number, os.strerror(number)))
        for number in (errno.ENOSPC, errno.EMFILE)
    }
    assert "make room" in said[errno.ENOSPC] and "ulimit -n" in said[errno.EMFILE]
    assert LIMIT in resource_shortages.describe_error(RuntimeError("can't start new thread"))
    assert resource_shortages.describe_error(ValueError("of another kind")) == "ValueError: of another kind"


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of processes is set for a user here")
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may become another user")
def test_where_the_system_itself_refuses_processes_and_threads() -> None:
    """compile() and a step of a user who may have no more of them."""
    code = """
        import os, resource, sys, torch, nexfort_engine
        import torch._inductor.compile_fx
        os.setgroups([]); os.setgid(1003); os.setuid(1003)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        block = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 8))
        compiled, x = nexfort_engine.compile(block), torch.randn(2, 8)
        with torch.no_grad():
            assert torch.allclose(compiled(x), block(x), atol=1e-5)
        print(compiled.report)
    """
    with tempfile.TemporaryDirectory() as cache:  # pytest's own is closed to others
        os.chown(cache, 1003, 1003)
        more = {"NEXFORT_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", "USER": "one", worker_pool.VARIABLE: "2"}
        run = [sys.executable, "-c", textwrap.dedent(code)]
        root = Path(__file__).parents[2]
        done = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=root, env={**os.environ, **more})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(LIMIT) == 2 and "no workers were started ahead" in done.stdout, done.stdout
