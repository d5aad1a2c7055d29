# SPDX-License-Identifier: Apache-2.0
"""What a process leaves that is killed: it goes when the next one begins, and what a living one needs stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stores import KEY, OTHER, ROOT, SIZE, put, snapshot

from nexfort_engine.cache import ephemeral, owner
from nexfort_engine.cache.store import Store

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are known by locks")

LOADS = """
import sys, tempfile, time
sys.path.insert(0, sys.argv[2])
from stores import KEY, OTHER
from nexfort_engine.cache import bundle, fs as disk, owner, ephemeral as temporary
from nexfort_engine.cache.store import Store
store = Store(sys.argv[1])
(entry,) = store.candidates(KEY)
copies = store.ready(entry), store.ready(entry, elsewhere=True)
stage = store.stage()
(stage.__enter__() / "payload" / "half").write_bytes(b"1")
scratch, kept = temporary.Scratch(), temporary.directory()
disk.write_new(store.root / owner.name_of_own("new-"), b"half")
disk.write_new(store._staging.folder / owner.name_of_own("new-"), b"half")
print("ready", flush=True)
time.sleep(600)
"""
STORES_AT_THE_END = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[2])
from stores import KEY, put
from nexfort_engine.cache import publish as module
from nexfort_engine.cache.store import Store
slow, begun = module.write_new, threading.Event()
def write_new(*args, **more):
    begun.set()
    time.sleep(1.0)
    slow(*args, **more)
module.write_new = write_new
threading.Thread(target=lambda: put(Store(sys.argv[1])), daemon=True).start()
begun.wait()
"""


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory, for this test alone."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def start(store: Store, system: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        process = subprocess.Popen(_command(LOADS, store), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def _command(code: str, store: Store) -> list[str]:
    return [sys.executable, "-c", code, str(store.root), str(Path(__file__).parents[1] / "support")]


def there(folder: Path, *besides: str) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in besides)


def eventually(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def left_in(store: Store, system: Path) -> list[str]:
    root = [name for name in there(store.root) if name.startswith("new-")]
    return [*there(store.root / "staging"), *there(system), *root]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_left_goes_when_the_next_begins(
    store: Store, system: Path, start: Callable[[], subprocess.Popen[str]], how: signal.Signals
) -> None:
    put(store)
    process = start()
    assert len(there(store.root / "staging")) == 3 and len(there(system)) == 3, "copies, a stage and half a file"
    process.send_signal(how)
    process.wait()
    assert len(left_in(store, system)) == 7
    (entry,) = Store(store.root).candidates(KEY)
    assert eventually(lambda: not left_in(store, system)), left_in(store, system)
    assert snapshot(store.ready(entry)) == snapshot(entry.payload)


@pytest.mark.parametrize("begins", ["candidates", "prune", "clear"])
def test_what_a_living_process_needs_stays(
    store: Store, system: Path, start: Callable[[], subprocess.Popen[str]], begins: str
) -> None:
    put(store)
    start()
    before = {name for name in left_in(store, system) if "new-" not in name}  # those are held while they are written
    assert len(before) == 5
    late = Store(store.root)
    late._ground.begin = lambda: None  # type: ignore[method-assign]  # nothing beside this thread
    if begins == "candidates":
        late._ground.sweep()
    else:
        getattr(late, begins)()
    assert before <= set(left_in(store, system))


def test_what_was_left_goes_with_prune_and_clear(
    store: Store, system: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    put(store)
    for change in ("prune", "clear"):
        process = start()
        process.kill()
        process.wait()
        assert left_in(store, system)
        getattr(Store(store.root), change)()
        assert not left_in(store, system)


def test_copies_count_in_the_limit_and_those_of_the_living_stay(
    store: Store, system: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    put(store)
    process = start()
    for number in range(3):
        put(store, OTHER, variant=number)
    late = Store(store.root)
    late.prune()  # what is not held goes
    copies = late._staging.size()
    assert copies > SIZE
    assert late.prune(4 * SIZE + copies).entries == 0
    assert late.prune(4 * SIZE).entries > 0, "as much as the entries alone"
    assert late._staging.size() == copies and process.poll() is None


def test_a_clean_end_leaves_nothing_and_finishes_what_is_being_stored(store: Store, system: Path) -> None:
    subprocess.run(_command(STORES_AT_THE_END, store), cwd=ROOT, check=True)
    (entry,) = Store(store.root).entries()
    assert entry.verify() is None and not left_in(store, system)


@pytest.mark.parametrize("living", [True, False])
def test_where_there_are_no_locks_the_process_and_the_clock_decide(
    store: Store, monkeypatch: pytest.MonkeyPatch, living: bool
) -> None:
    put(store)
    monkeypatch.setattr(owner, "flock", lambda: None)
    folder, handle = owner.new_folder(store.root / "staging")
    assert handle is None and folder.name.endswith(".unlocked")
    if not living:
        folder = folder.rename(folder.with_name(folder.name.replace(str(os.getpid()), str(2**22 + 7))))
    monkeypatch.undo()  # a process that can lock sees it as well
    Store(store.root).prune()
    assert folder.exists(), "it is young"
    os.utime(folder, (1.0, 1.0))
    Store(store.root).prune()
    assert folder.exists() is living


def test_a_directory_is_never_taken_from_who_makes_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody sweeps between the making of each directory and its lock."""
    put(store)
    staging, real, swept = store.root / "staging", owner._locked, []

    def locked(path: Path) -> int | None:
        if len(swept) < 3:
            swept.append(path)
            owner.remove_left(path)
            assert not path.exists()
        return real(path)

    monkeypatch.setattr(owner, "_locked", locked)
    folder, handle = owner.new_folder(staging)
    assert len(swept) == 3 and folder.is_dir() and handle is not None
    owner.remove_left(folder)
    assert folder.is_dir()
    os.close(handle)
    owner.remove_left(folder)
    assert not folder.exists()


def test_foreign_files_in_the_temporary_directory_stay(store: Store, system: Path) -> None:
    names = ["nexfort-notes", "nexfort-1", "nexfort-1-xyz", "other-1-0123456789abcdef", "1-0123456789abcdef"]
    for name in names:
        (system / name).mkdir()
    (system / "nexfort-1-0123456789abcdef").write_text("a file")
    (system / "nexfort-2-0123456789abcdef").symlink_to(system / "nexfort-notes")
    put(store)
    store.clear()
    assert there(system) == sorted([*names, "nexfort-1-0123456789abcdef", "nexfort-2-0123456789abcdef"])


def test_scratch_goes_with_its_block_or_its_holder(system: Path) -> None:
    with ephemeral.Scratch() as folder:
        assert folder.parent == system and folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    held = ephemeral.Scratch()
    path = held.path
    del held
    assert not path.exists()
