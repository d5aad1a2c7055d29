# SPDX-License-Identifier: Apache-2.0
"""Lowering workers: graphs come back as payloads, a failure is an answer, nothing is left running."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from large_rows import few
from probe import Probe, block_of, x

from nexfort_engine import api
from nexfort_engine import compile as nexfort_compile
from nexfort_engine.compilation import builder, lookup
from nexfort_engine.lowering import inductor, worker_connection, worker_pool
from nexfort_engine.system.process_settings import snapshot, without_device

OPTIONS: dict[str, object] = {"max_autotune": False}


def _lowered(helpers: worker_pool.Pool, folder: Path, probe: Probe, device: str = "cpu") -> str | None:
    """The failure of one job, or None."""
    folder.mkdir()
    answers: queue.Queue[str | None] = queue.Queue()
    helpers.submit(probe.captured, folder, [], OPTIONS, device, answers.put, lambda: "done here")
    return answers.get(timeout=300)


def _soon(condition: Callable[[], Any]) -> bool:
    """Whether it becomes true."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def _payload_agrees(folder: Path, probe: Probe) -> None:
    code = inductor.load(folder / "payload", OPTIONS, [], len(probe.artefact.weights))
    probe.artefact.code = code
    assert probe.agrees(x(3, 9, seed=4))


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The processes that were started, as in a process that had none. Afterwards none of them is left."""
    started: list[Any] = []
    start = worker_pool._started
    monkeypatch.setattr(worker_pool, "_started", lambda *a, **k: started.append(start(*a, **k)) or started[-1])
    monkeypatch.setattr(worker_pool._Forker, "_current", None)
    yield started
    monkeypatch.setattr(worker_pool, "_free_memory", lambda: 0)  # nothing stays
    deadline = time.monotonic() + 20
    while any(process.poll() is None for process in started):
        assert time.monotonic() < deadline, "a worker is still running"
        time.sleep(0.05)


@pytest.mark.parametrize("kind", few(["forked", "started anew", "spawned"], ["forked"]))
def test_graphs_come_back_as_payloads(
    kind: str, gone: list[Any], tmp_path: Path, artefact_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "spawned":
        monkeypatch.setattr(sys, "platform", "win32")
    # without a GPU the check for one always keeps forked processes from it: they start anew
    device = "cuda" if kind == "started anew" else "cpu"
    probe = Probe(block_of(lambda b, h: b.linear(h) * torch.tensor([0.5] * 8)), x())
    with worker_pool.Pool(2, device, artefact_cache) as helpers:
        assert _lowered(helpers, tmp_path / "one", probe) is None
        if hasattr(os, "getpriority"):
            own, theirs = (os.getpriority(os.PRIO_PROCESS, process) for process in (0, gone[0].pid))
            assert theirs > own, "workers do not give way to this process"
        assert _lowered(helpers, tmp_path / "two", probe) is None
    _payload_agrees(tmp_path / "one", probe)
    assert not (tmp_path / "one" / "graph.bin").exists()
    assert len(gone) == (2 if kind == "spawned" else 1)


def test_a_failure_is_an_answer_and_the_worker_goes_on(gone: list[Any], tmp_path: Path, artefact_cache: Path) -> None:
    probe = Probe(block_of(lambda b, h: b.linear(h)), x())
    with worker_pool.Pool(1, "cpu", artefact_cache) as helpers:
        (tmp_path / "broken").mkdir()
        answers: queue.Queue[str | None] = queue.Queue()
        instead = lambda: "done here"  # noqa: E731
        held = weakref.ref(instead)
        helpers.submit(probe.captured, tmp_path / "broken", ["no_such_module"], OPTIONS, "cpu", answers.put, instead)
        del instead
        assert "no_such_module" in str(answers.get(timeout=300))
        assert _soon(lambda: held() is None), "what a job held stays until the next one comes"
        assert _lowered(helpers, tmp_path / "sound", probe) is None
    _payload_agrees(tmp_path / "sound", probe)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="workers are killed by their process group here")
def test_what_a_killed_worker_had_is_done_in_the_process(gone: list[Any], tmp_path: Path) -> None:
    probe = Probe(block_of(lambda b, h: b.linear(h)), x())
    with worker_pool.Pool(2, "cpu", None) as helpers:
        os.killpg(gone[0].pid, signal.SIGKILL)
        assert _lowered(helpers, tmp_path / "one", probe) == "done here"
        assert _lowered(helpers, tmp_path / "two", probe) == "done here"


@pytest.mark.skipif(sys.platform != "linux", reason="nobody tells what processes do here")
def test_what_a_stopped_process_should_have_done_is_done_in_this_one(
    gone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_connection, "STOPPED", 1.0)
    probe = Probe(block_of(lambda b, h: b.linear(h)), x())
    with worker_pool.Pool(1, "cpu", None) as helpers:
        os.kill(gone[0].pid, signal.SIGSTOP)
        answers: queue.Queue[str | None] = queue.Queue()
        why: list[str] = []
        helpers.submit(probe.captured, tmp_path, [], OPTIONS, "cpu", answers.put, lambda: "done here", why.append)
        assert answers.get(timeout=60) == "done here"
    assert why == ["it was stopped for 1 s, and was ended"]


def test_workers_that_are_expected_are_taken_once(
    gone: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(worker_pool.VARIABLE, "1")
    worker_pool.expect("cpu", tmp_path)
    expected = worker_pool._expected
    worker_pool.expect("cpu", tmp_path)
    assert worker_pool._expected is expected is not None and len(gone) == 1
    with worker_pool.taken(1, "cpu", tmp_path) as first, worker_pool.taken(1, "cpu", tmp_path) as second:
        assert first is expected and second is not expected
    worker_pool.expect("cpu", tmp_path)
    expected = worker_pool._expected
    with worker_pool.taken(1, "cpu", tmp_path / "another") as other:
        assert other is not expected and other.probes == tmp_path / "another"
    worker_pool.expect("cpu", tmp_path)
    worker_pool.dismiss()
    worker_pool.dismiss()
    assert worker_pool._expected is None


@pytest.mark.large  # costs time and changes no result
def test_workers_are_expected_where_nothing_is_stored_for_the_model(
    gone: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(worker_pool.VARIABLE, "1")
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "store"))
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval().requires_grad_(False)
    compiled = nexfort_compile(block)
    assert len(gone) == 1
    with torch.no_grad():
        assert torch.allclose(compiled(torch.ones(2, 8)), block(torch.ones(2, 8)), atol=1e-6)
    assert compiled.report.as_dict()["artefacts_compiled"] == 1 and len(gone) == 1, "its workers were not taken"
    lookup._loaded.clear()
    api._stores.clear()  # as in a new process
    again = nexfort_compile(block)
    assert len(gone) == 1, "its artefacts are there"
    assert _soon(lambda: len(lookup._loaded)), "and are not loaded ahead"
    with torch.no_grad():
        again(torch.ones(2, 8))
    assert again.report.as_dict()["artefacts_loaded"] == 1 and not again._nexfort_engine.state.store._copies._unused
    assert worker_pool._expected is None
    wider = nexfort_compile(torch.nn.Linear(8, 9).eval().requires_grad_(False))
    assert worker_pool._expected is not None
    monkeypatch.setenv(worker_pool.VARIABLE, "0")
    with torch.no_grad():
        wider(torch.ones(2, 8))
    assert worker_pool._expected is None, "after a first step nobody waits any more"


def test_none_are_expected_where_no_step_waits(
    gone: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(worker_pool.VARIABLE, "1")
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "store"))
    block = torch.nn.Linear(8, 8).eval().requires_grad_(False)
    nexfort_compile(block, options={"options": {"compile.background": True}})
    assert worker_pool._expected is None and not gone


_left: list[Any] = []


class _Leaving(torch.nn.Linear):
    """Leaves garbage behind whenever its code runs, as a trace does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        class Garbage:  # a class holds itself
            pass

        _left.append(weakref.ref(Garbage))
        return super().forward(x)


@pytest.mark.large  # costs time and changes no result
def test_what_captures_leave_is_gone_before_the_step_goes_on(
    gone: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would be collected in a later one. Workers are at work meanwhile."""
    monkeypatch.setenv(worker_pool.VARIABLE, "1")
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "store"))
    _left.clear()
    gone_then: list[bool] = []
    compiled = nexfort_compile(_Leaving(4, 4).eval().requires_grad_(False))
    before = gc.get_threshold()
    gc.set_threshold(0)  # none of itself
    try:
        lower_all = builder.lower_all
        monkeypatch.setattr(
            builder, "lower_all", lambda *a: (lower_all(*a), gone_then.append(all(one() is None for one in _left)))
        )
        with torch.no_grad():
            compiled(torch.ones(2, 4))
    finally:
        gc.set_threshold(*before)
    assert compiled.report.as_dict()["artefacts_compiled"] == 1 and _left and gone_then == [True]


forks = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked from one process here")


def _below(process: Any) -> list[int]:
    """The processes that one has forked and that are still there."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == process.pid:
                found.append(int(file.parent.name))
    return found


@pytest.mark.large  # costs time and changes no result
@forks
def test_what_forks_workers_stays_for_the_next_batch_and_its_workers_do_not(
    gone: list[Any], tmp_path: Path, artefact_cache: Path
) -> None:
    probe = Probe(block_of(lambda b, h: b.linear(h)), x())
    with worker_pool.Pool(2, "cpu", artefact_cache) as helpers:
        assert _lowered(helpers, tmp_path / "one", probe) is None
        with worker_pool.Pool(1, "cpu", artefact_cache) as beside:
            assert _lowered(beside, tmp_path / "beside", probe) is None
            assert len(_below(gone[0])) == 3
    assert _soon(lambda: not _below(gone[0])), "a worker keeps memory that the next picture wants"
    with worker_pool.Pool(1, "cpu", tmp_path) as helpers:
        assert _lowered(helpers, tmp_path / "two", probe) is None
        assert len(_below(gone[0])) == 1
    assert _soon(lambda: not _below(gone[0]))
    assert len(gone) == 1 and gone[0].poll() is None
    _payload_agrees(tmp_path / "two", probe)
    with worker_pool.Pool(1, "cuda", None):
        assert len(gone) == 2 and gone[0].poll() is not None, "it was for another kind of device"


@forks
def test_what_forks_workers_ends_when_nothing_is_asked_of_it(
    gone: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker_pool, "_KEPT", 1.0)
    for _ in range(2):
        with worker_pool.Pool(1, "cpu", None):
            with worker_pool.Pool(1, "cpu", None):
                pass
            time.sleep(2)  # longer than it would stay after the first, or after one of two
            assert len(gone) == 1 and gone[0].poll() is None
        assert _soon(lambda: worker_pool._Forker._current is None or not worker_pool._Forker._current._users)
    assert _soon(lambda: gone[0].poll() is not None)
    with worker_pool.Pool(1, "cpu", None):
        assert len(gone) == 2


@forks
@pytest.mark.parametrize("why", ["memory is short", "it was killed"])
def test_one_that_had_to_end_is_replaced(why: str, gone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with worker_pool.Pool(1, "cpu", None):
        pass
    if why == "it was killed":
        os.killpg(gone[0].pid, signal.SIGKILL)
    else:
        monkeypatch.setattr(worker_pool, "_free_memory", lambda: worker_pool._SHORT - 1)
    assert _soon(lambda: gone[0].poll() is not None)
    monkeypatch.undo()
    with worker_pool.Pool(1, "cpu", None):
        assert worker_pool._Forker._current is not None
        now = worker_pool._Forker._current._process
        assert now is not gone[0] and now.poll() is None
    os.killpg(now.pid, signal.SIGKILL)
    assert _soon(lambda: now.poll() is not None), "the next test would be lent it"


@forks
# test_worker_lifetime.py has one with workers
@pytest.mark.parametrize("busy", few({"idle": False, "with a worker": True}, ["idle"]))
def test_nothing_outlives_a_process_that_is_killed(busy: bool) -> None:
    code = (
        "import os, signal, time; from nexfort_engine.lowering import worker_pool as pool; "
        "helpers = pool.Pool(1, 'cpu', None); "
        f"{busy} or helpers.close(); "
        "print(pool._Forker._current._process.pid, flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(worker_pool.__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=root)
    assert ended.returncode == -signal.SIGKILL
    file = Path(f"/proc/{int(ended.stdout)}/stat")
    assert _soon(lambda: not file.exists() or file.read_text().rpartition(")")[2].split()[0] == "Z")


@forks
def test_parts_of_a_work_are_done_in_processes_of_their_own() -> None:
    """From a process with one thread, as a worker is: who does them, what they give, and what goes wrong."""
    code = """
        import os, signal
        from nexfort_engine.lowering.worker import in_forks

        def failing():
            raise ValueError("a part")

        def reason(works):
            try:
                in_forks(works)
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        own = os.getpid()
        ids = in_forks([os.getpid] * 3)
        assert ids[0] == own and len(set(ids)) == 3, ids
        assert in_forks([lambda: ["a"], lambda: ["b", 1]]) == [["a"], ["b", 1]] and in_forks([]) == []
        assert "a part" in reason([os.getpid, failing]) and "a part" in reason([failing, os.getpid])
        assert "without an answer" in reason([os.getpid, lambda: os.kill(os.getpid(), signal.SIGKILL)])
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("none is left")
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.stdout == "none is left\n", done.stderr


def test_without_device_is_undone() -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    before = CachingAutotuner._make_launchers, snapshot(compiler=True)
    with without_device():
        assert CachingAutotuner._make_launchers is not before[0]
    assert (CachingAutotuner._make_launchers, snapshot(compiler=True)) == before
