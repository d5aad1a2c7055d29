# SPDX-License-Identifier: Apache-2.0
"""torch's own pool of compiler processes: one that hangs while something waits for it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch._inductor.async_compile

from nexfort_engine.lowering import async_compile_pool
from nexfort_engine.lowering.async_compile_pool import PoolHangs, watched
from nexfort_engine.system import compiler_processes, process_activity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nobody tells what processes do here")


class Pool:
    """As torch's: when its process ends, what it was asked for is cancelled."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code])
        self.pending_futures: dict[int, Future[Any]] = {}

    def ask(self) -> Future[Any]:
        self.pending_futures[0] = future = Future[Any]()
        threading.Thread(target=lambda: (self.process.wait(), future.cancel()), daemon=True).start()
        return future


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pool]]:
    made: list[Pool] = []
    monkeypatch.setattr(async_compile_pool, "_pool", lambda: made[-1])
    monkeypatch.setattr(process_activity, "LOOK", 0.1)
    monkeypatch.setattr(process_activity, "WORK", 0.05)
    monkeypatch.setattr(compiler_processes, "STOPPED", 0.5)
    monkeypatch.setattr(compiler_processes, "SILENT", 1.0)
    monkeypatch.delenv(process_activity.WORKS_FOR, raising=False)
    yield made
    for pool in made:
        pool.process.kill()
        pool.process.wait()


@pytest.mark.parametrize("how", ["does nothing", "was stopped"])
def test_one_that_hangs_is_ended_and_the_next_graph_gets_another(how: str, pools: list[Pool]) -> None:
    pools.append(Pool("import time; time.sleep(600)" if how == "does nothing" else "while True: pass"))
    if how == "was stopped":
        os.kill(pools[0].process.pid, signal.SIGSTOP)
    with pytest.raises(PoolHangs, match="did nothing for 1 s" if how == "does nothing" else "was stopped"), watched():
        pools[0].ask().result(20)
    assert pools[0].process.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(600)"], ids=["it computes", "idle"])
def test_one_that_computes_or_is_asked_for_nothing_is_left_alone(code: str, pools: list[Pool]) -> None:
    pools.append(Pool(code))
    with pytest.raises(TimeoutError), watched():
        future = pools[0].ask()
        if "sleep" in code:
            pools[0].pending_futures.clear()
        future.result(3)
    assert pools[0].process.poll() is None


def test_what_fails_otherwise_is_told_as_it_is(pools: list[Pool]) -> None:
    pools.append(Pool("pass"))
    with pytest.raises(CancelledError), watched():
        pools[0].ask().result(20)


def test_torchs_own_is_found_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = torch._inductor.async_compile.AsyncCompile
    kind.process_pool.cache_clear()
    assert async_compile_pool._pool() is None and not kind.process_pool.cache_info().currsize, "one was started"
    own = type("Own", (), {"process": None, "pending_futures": {}, "shutdown": lambda _: None})()
    monkeypatch.setattr(torch._inductor.async_compile, "_pool_set", set())
    monkeypatch.setattr(torch._inductor.async_compile, "SubprocPool", lambda *_, **__: own)
    monkeypatch.setattr(torch._inductor.async_compile, "get_compile_threads", lambda: 2)
    try:
        assert kind.process_pool() is own and async_compile_pool._pool() is own
    finally:
        kind.process_pool.cache_clear()
