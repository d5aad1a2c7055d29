# SPDX-License-Identifier: Apache-2.0
"""The bounded lock, with the filelock package and without it."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from nexfort_engine.cache import lock
from nexfort_engine.cache.store import Store

KINDS = ["filelock", "plain"]


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "filelock", None)
    else:
        pytest.importorskip("filelock")
    return tmp_path / "lock"


def test_one_holder_at_a_time(path: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with lock.bounded_lock(path):
                inside += 1
                most = max(most, inside)
                time.sleep(0.0005)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_waiting_is_bounded(path: Path) -> None:
    start = time.monotonic()
    refused = pytest.raises(lock.LockTimeout, match="held by another")
    with lock.bounded_lock(path), refused, lock.bounded_lock(path, timeout=0.1):
        pytest.fail("two holders")
    assert time.monotonic() - start < 5


def test_an_error_releases_it(path: Path) -> None:
    with pytest.raises(RuntimeError), lock.bounded_lock(path):
        raise RuntimeError
    with lock.bounded_lock(path, timeout=0.1):
        pass


def test_the_lock_of_a_dead_process_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "filelock", None)
    left = tmp_path / "lock.x"
    left.touch()
    with pytest.raises(lock.LockTimeout), lock.bounded_lock(tmp_path / "lock", timeout=0.1):
        pytest.fail("it may be alive")
    os.utime(left, (time.time() - lock.STALE - 1,) * 2)
    with lock.bounded_lock(tmp_path / "lock", timeout=1):
        assert left.exists()
    assert not left.exists()


def test_a_file_system_without_locks_uses_the_plain_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filelock = pytest.importorskip("filelock")

    class Refusing:
        def __init__(self, *_: object, **__: object) -> None: ...

        def acquire(self) -> None:
            raise NotImplementedError

    monkeypatch.setattr(filelock, "FileLock", Refusing)
    with lock.bounded_lock(tmp_path / "lock"):
        assert (tmp_path / "lock.x").exists()


def test_a_held_lock_does_not_stop_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexfort_engine.cache.store.LOCK_WAIT", 0.05)
    store = Store(tmp_path)
    assert store.writable
    with lock.bounded_lock(store.root / "lock"), store.stage() as staged:
        (staged / "payload" / "code").write_text("1")
        entry = store.commit("0" * 32, staged, {})
    assert entry.persistent and [row["id"] for row in store.rows()] == [entry.id]
