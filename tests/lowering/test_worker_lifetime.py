# SPDX-License-Identifier: Apache-2.0
"""What lowers ends with the process that it lowers for: itself, and what it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nexfort_engine.system import process_activity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nobody tells what processes do here")

SECONDS = 2.0  # within which all are gone
ROOT = Path(__file__).resolve().parent.parent.parent

# what lowers: of a group of its own, with something that computes under it
_WORKS = """import subprocess; from nexfort_engine.lowering import worker_lifetime; worker_lifetime.watch()
subprocess.run(["sleep", "600"])"""
_SERVER = f"""
    import os, signal, subprocess, sys, threading, time
    from nexfort_engine.lowering import worker_lifetime

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has its children ignore it

    def begin():
        environment = {{**os.environ, **worker_lifetime.works_for()}}
        run = [sys.executable, "-c", {_WORKS!r}]
        print(subprocess.Popen(run, env=environment, start_new_session=True).pid, flush=True)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
"""


def _group(leader: int) -> list[int]:
    return [one.number for one in process_activity.running() if one.group == leader]


def _gone(leader: int, seconds: float = SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while _group(leader) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not _group(leader)


class Server:
    """A process that others work for."""

    def __init__(self, code: str, **environment: str) -> None:
        run = [sys.executable, "-c", textwrap.dedent(code)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
        more = {**os.environ, "PYTHONPATH": path, **environment}
        self.process = subprocess.Popen(run, stdout=subprocess.PIPE, text=True, env=more, start_new_session=True)
        assert self.process.stdout is not None
        self.leader = int(self.process.stdout.readline())

    def has(self, count: int) -> bool:
        """Whether so many processes work for it before long."""
        deadline = time.monotonic() + 60
        while len(_group(self.leader)) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        return len(_group(self.leader)) >= count

    def end(self) -> None:
        process_activity.end([self.process.pid, *_group(self.process.pid), *_group(self.leader)])
        self.process.wait()


@pytest.fixture
def begun(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(_SERVER + textwrap.indent(request.param, "    "))
    yield server
    server.end()


@pytest.mark.parametrize("begun", ["time.sleep(600)"], indirect=True)
def test_it_lives_as_long_as_the_process_whatever_becomes_of_the_thread_that_started_it(begun: Server) -> None:
    assert begun.has(2)
    time.sleep(2 * SECONDS)
    assert len(_group(begun.leader)) == 2


ENDS = {
    "killed": (signal.SIGKILL, "time.sleep(600)"),
    "told to end": (signal.SIGTERM, "time.sleep(600)"),
    "interrupted": (signal.SIGINT, "time.sleep(600)"),
    "with a child that has all that it has": (signal.SIGKILL, "if not os.fork(): time.sleep(4)\ntime.sleep(600)"),
}


@pytest.mark.parametrize(("sign", "begun"), ENDS.values(), ids=ENDS, indirect=["begun"])
def test_all_of_it_is_gone_soon_after_the_process(sign: int, begun: Server) -> None:
    assert begun.has(2)
    begun.process.send_signal(sign)
    begun.process.wait(60)
    assert _gone(begun.leader), f"{len(_group(begun.leader))} are left"


@pytest.mark.parametrize("begun", ["time.sleep(600)"], indirect=True)
def test_a_process_that_nobody_has_asked_for_its_end_counts_as_gone(begun: Server) -> None:
    """Whoever started it may be busy: it is a zombie as long."""
    assert begun.has(2)
    begun.process.send_signal(signal.SIGKILL)
    assert _gone(begun.leader)
    assert begun.process.returncode is None


_BATCH = """
    import threading
    from pathlib import Path
    from nexfort_engine.lowering import worker_pool as pool

    helpers = pool.Pool(2, "cpu", None)
    pool.pack = lambda graph: b""
    class Graph: modules = []
    for number in range(2):
        folder = Path({folder!r}, str(number))
        folder.mkdir()
        helpers.submit(Graph(), folder, ["sleeping_compiler"], {{}}, "cpu", print, lambda: None)
    print(pool._Forker._current.number, flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("count", [1, 5], ids=["while it is imported", "with compilers"])
def test_workers_and_their_compilers_are_gone_soon_after_a_process_that_is_killed(count: int, tmp_path: Path) -> None:
    """The process that forks workers, two of them, and what each started."""
    (tmp_path / "temporary").mkdir()
    server = Server(_BATCH.format(folder=str(tmp_path)), TMPDIR=str(tmp_path / "temporary"))
    try:
        assert server.has(count)
        server.process.kill()
        assert _gone(server.leader), f"{len(_group(server.leader))} are left"
        server.process.wait()
    finally:
        server.end()
    left = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert all(name.startswith("nexfort-") for name in left), f"nobody finds {left}"


_ALONE = """
    import os, threading
    from pathlib import Path
    from nexfort_engine.system import compiler_processes as compilers

    def work():
        with compilers.bounded(Path({folder!r})):
            compilers.run(["sh", "-c", "echo $TMPDIR > {folder}/told; sleep 600; true"])

    threading.Thread(target=work, daemon=True).start()
    while not Path({folder!r}, "told").exists() or compilers._keeper is None:
        pass
    print(compilers._keeper.pid, flush=True)
    threading.Event().wait()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no process is started in the group of another there")
def test_a_compiler_that_the_process_itself_started_is_gone_soon_after_it(tmp_path: Path) -> None:
    server = Server(_ALONE.format(folder=str(tmp_path)))
    try:
        assert server.has(3), "the one that sees to it, a shell, and what that started"
        server.process.kill()
        assert _gone(server.leader)
        server.process.wait()
    finally:
        server.end()
    assert (tmp_path / "told").read_text().strip() == str(tmp_path), "what it leaves is not found"
