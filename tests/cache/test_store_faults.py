# SPDX-License-Identifier: Apache-2.0
"""The store against disks that do not take it, clocks that jump, and processes that die."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from large_rows import few
from stores import KEY, OTHER, ROOT, SIZE, put, quick_folder, snapshot, use_at
from write_points import dies_at, disk_full_from

from nexfort_engine.cache import lock, owner, root_dir, usage
from nexfort_engine.cache.store import Entry, Store, StoreError

# -- disks that do not take it -------------------------------------------------------------------------------


def works_in_memory(store: Store) -> Entry:
    entry = put(store)
    assert not entry.persistent and entry.verify() is None and (entry.payload / "ab" / "kernel.py").exists()
    assert not store.writable and store.problem is not None and "NEXFORT_CACHE_DIR" in store.problem
    store.touch(entry)
    store.set_aside(entry, "only a test")
    return entry


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("mine")
    store = Store(tmp_path / "cache")
    works_in_memory(store)
    assert store.candidates(KEY) == [] and store.rows() == [] and store.clear().entries == 0
    assert (tmp_path / "cache").read_text() == "mine"


def test_a_read_only_directory_serves_what_it_has(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = put(store)
    before = snapshot(store.root)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "rename", "replace", "unlink", "utime"):
        monkeypatch.setattr(os, name, refuse)
    real_open = os.open

    def open_for_reading(path: object, flags: int, *rest: object, **named: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(store.root)):
            refuse()
        return real_open(path, flags, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_for_reading)
    reader = Store(store.root)
    (found,) = reader.candidates(KEY)
    assert found == entry and found.verify() is None
    reader.touch(found)
    assert len(reader.rows()) == 1 and not reader.writable and "Read-only" in str(reader.problem)
    for change in (reader.clear, reader.prune):
        with pytest.raises(OSError, match="cannot be written"):
            change()
    reader.set_aside(found, "it cannot be moved")
    assert reader.candidates(KEY) == [], "what cannot be moved is skipped from then on"
    monkeypatch.undo()
    assert snapshot(store.root) == before


@pytest.mark.parametrize("full_after", range(1, 5))
def test_a_disk_that_becomes_full(store: Store, monkeypatch: pytest.MonkeyPatch, full_after: int) -> None:
    first = put(store, variant=0)
    before = snapshot(first.path)
    calls = 0
    real_fsync = os.fsync

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= full_after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real_fsync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    late = Store(store.root)
    entries = [put(late, variant=number) for number in (1, 2)]
    assert all(entry.verify() is None for entry in entries)
    assert not late.writable and "No space left" in str(late.problem)
    monkeypatch.undo()
    assert snapshot(first.path) == before and first.verify() is None
    assert all(entry.verify() is None for entry in Store(store.root).entries())
    late._ground._probed = time.monotonic() - root_dir.RETRY_AFTER - 1
    assert late.writable and late.problem is None and put(late, variant=3).persistent, "it is tried again later"


@pytest.mark.parametrize("of", [(os, "mkdir"), (tempfile, "gettempdir")], ids=["full", "none is found"])
def test_no_place_at_all_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: tuple[object, str]
) -> None:
    (tmp_path / "cache").write_text("")

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*of, full)
    with pytest.raises(StoreError, match="no place for compiled code"), Store(tmp_path / "cache").stage():
        pytest.fail("there is no stage")


def test_entries_kept_in_memory_go_with_their_process(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    (tmp_path / "tmp").mkdir()
    code = (
        "import sys, tempfile; from nexfort_engine.cache.store import Store\n"
        "store = Store(sys.argv[1])\n"
        "with store.stage() as staged:\n"
        "    (staged / 'payload' / 'a').write_text('1'); entry = store.commit('0' * 32, staged, {})\n"
        "assert entry.payload.joinpath('a').exists() and not entry.persistent\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)
    assert not list((tmp_path / "tmp").iterdir())


def everything(store: Store, first: Entry, number: int) -> None:
    """One of each kind of writing."""
    with store.stage() as staged:
        (staged / "payload" / "a").write_bytes(b"1")
        made = store.commit(OTHER, staged, {"variant": number})
        assert made.verify() is None and snapshot(store.ready(made)) == {"a": b"1"}
    store.touch(first)
    store.note_shape(first, f"{number}x4x64x64")
    store.rows()
    store.pin(first.id)
    store.prune(10**9)
    store.remove([made.id])


@pytest.mark.parametrize("times", [None, 1])
def test_a_disk_that_is_full_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int | None) -> None:
    """Whatever does not fit: what was there stays whole, and what is given to the caller can be loaded."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    store, number, ended = Store(tmp_path / "cache"), 0, False
    first = put(store, variant=0)
    before = snapshot(first.payload)
    while not ended:
        number += 1
        with disk_full_from(number, times) as refused, contextlib.suppress(StoreError, OSError, LookupError):
            everything(Store(store.root), first, number)
        ended = not refused
        assert snapshot(first.payload) == before
        fresh = Store(store.root)
        assert first in fresh.entries() and all(entry.verify() is None for entry in fresh.entries())
        assert {row["id"] for row in fresh.rows()} == {entry.id for entry in fresh.entries()}
        fresh.pin(first.id, pinned=False)
    assert number > 20 and put(Store(store.root), variant=2).persistent


# -- clocks that jump ----------------------------------------------------------------------------------------

YEAR = 365 * 86400.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of this process: its only element is added to the real time."""
    shift, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    return shift


@pytest.mark.parametrize("jump", [-YEAR, -3600.0, 3600.0, 20 * YEAR])
@pytest.mark.parametrize("back", [True, False])
def test_the_order_of_use_survives_a_clock_that_jumps(
    store: Store, clock: list[float], jump: float, back: bool
) -> None:
    early, while_wrong, late, never = (put(store, variant=number) for number in range(4))
    store.touch(early)
    clock[0] = jump
    store.touch(while_wrong)
    clock[0] = 0.0 if back else jump
    store.touch(late)
    pruned = Store(store.root)
    assert pruned.prune(3 * SIZE).entries == 1 and not never.path.exists()
    assert pruned.prune(2 * SIZE).entries == 1 and not early.path.exists()
    assert pruned.prune(SIZE).entries == 1 and late.path.exists()
    fresh = put(Store(store.root), variant=5)
    assert pruned.prune(SIZE).entries == 1 and fresh.path.exists(), "what was never used counts as used when made"
    rows = pruned.rows()
    assert all(row["last_used"] is None or row["last_used"] <= time.time() for row in rows)


@pytest.mark.parametrize("jump", [-20 * YEAR, 20 * YEAR])
def test_a_clock_that_jumps_takes_nothing_from_a_living_process(store: Store, clock: list[float], jump: float) -> None:
    entry = put(store)
    copy = store.ready(entry)
    with store.stage() as staged:
        (staged / "payload" / "a").write_bytes(b"1")
        clock[0] = jump
        Store(store.root).prune()
        made = store.commit(OTHER, staged, {})
    assert made.persistent and made.verify() is None and snapshot(copy) == snapshot(entry.payload)
    assert {one.id for one in Store(store.root).entries()} == {made.id, entry.id}


@pytest.mark.parametrize("stamp", [0.0, 1.0, 2.0**33, 2.0**40])
def test_no_time_of_change_is_too_odd(store: Store, stamp: float) -> None:
    entry = put(store)
    store.touch(entry)
    for path in (store.root / usage.CLOCK, entry.path / "last_used", entry.path / "manifest.json", entry.path):
        with contextlib.suppress(OSError, OverflowError):  # the file system cannot hold it
            os.utime(path, (stamp, stamp))
    late = Store(store.root)
    assert len(late.rows()) == 1 and late.rows()[0]["last_used"] <= time.time()
    late.touch(entry)
    late.note_shape(entry, "1x4x64x64")
    assert late.prune().entries == 0 and late.candidates(KEY) == [entry] and put(late, variant=2).persistent


def test_leftovers_are_known_by_their_process_where_there_are_no_locks(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    monkeypatch.setattr(owner, "flock", lambda: None)
    living, dead = (store.root / "staging" / f"{number}-x" for number in (os.getpid(), 2**22 + 7))
    for folder in (living, dead):
        folder.mkdir()
        os.utime(folder, (1.0, 1.0))
    Store(store.root).prune()
    assert living.exists() and not dead.exists()


# -- file systems without locks ------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks(store: Store, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = put(store, variant=1), put(store, variant=2)
    store.pin(first.id)
    assert [row["pinned"] for row in store.rows()] == [True, False]
    assert Store(store.root).prune(0).entries == 1 and Store(store.root).candidates(KEY) == [first]
    assert not second.path.exists() and Store(store.root).clear(pinned=True).entries == 1
    assert not [path for path in store.root.iterdir() if path.name.startswith("lock.x")]
    assert (store.root / "index.json").exists()


# -- processes that die --------------------------------------------------------------------------------------


def commits(store: Store) -> None:
    put(store, OTHER, variant=1)


def commits_the_first(store: Store) -> None:
    put(Store(store.root.parent / "new"), OTHER, variant=1)


def commits_again(store: Store) -> None:
    """A damaged entry is found, set aside and made again."""
    (entry,) = [one for one in store.candidates(KEY) if one.manifest["variant"] == "damaged"]
    store.set_aside(entry, str(entry.verify()))
    put(store, KEY, variant="damaged")


def adopts(store: Store) -> None:
    made = put(Store(store.root.parent / "elsewhere"), OTHER, variant=1)
    with store.stage() as staged:
        for name in made.manifest["files"]:
            (staged / "payload" / name).parent.mkdir(exist_ok=True)
            shutil.copy(made.payload / name, staged / "payload" / name)
        store.adopt(made.manifest, staged)


def pins(store: Store) -> None:
    store.pin(store.candidates(KEY)[-1].id)
    store.pin(store.candidates(KEY)[0].id, pinned=False)


def uses(store: Store) -> None:
    entry = store.candidates(KEY)[-1]
    store.touch(entry)
    for number in range(3):
        store.note_shape(entry, f"{number}x4x64x64" + "x" * 150)
    store.ready(entry)


def prunes(store: Store) -> None:
    store.prune(SIZE)


def removes(store: Store) -> None:
    store.remove([entry.id for entry in store.candidates(KEY)[1:3]])


def clears(store: Store) -> None:
    store.clear()


def lists(store: Store) -> None:
    (store.root / "index.json").unlink()
    store.rows()


WORK = [commits, commits_the_first, commits_again, adopts, pins, uses, prunes, removes, clears, lists]
REMOVING = (prunes, removes, clears)


@pytest.fixture(scope="module")
def worn() -> Iterator[Path]:
    """A store with something of everything: entries, a pinned one, a damaged one, one set aside, a leftover."""
    folder = quick_folder()
    store = Store(folder / "cache")
    entries = [put(store, variant=number) for number in range(3)]
    store.pin(entries[0].id)
    store.set_aside(put(store, variant="aside"), "test")
    damaged = put(store, variant="damaged")
    (damaged.payload / "artefact.bin").write_bytes(b"short")
    use_at(store, entries[1], 5.0)
    old = store.root / "staging" / "4194300-old"
    (old / "payload").mkdir(parents=True)
    os.utime(old, (5.0, 5.0))
    yield store.root
    shutil.rmtree(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process that dies is forked")
@pytest.mark.parametrize("locks", [pytest.param("filelock", marks=pytest.mark.large), "plain"])
@pytest.mark.parametrize("work", few(WORK, (commits,)), ids=lambda work: work.__name__)
def test_a_process_killed_at_any_write_leaves_a_valid_store(
    worn: Path, work: Callable[[Store], None], locks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if locks == "plain":
        monkeypatch.setitem(sys.modules, "filelock", None)
    else:
        pytest.importorskip("filelock")
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # what a process has written outlives it; this saves a minute
    number, died = 0, True
    while died:
        number += 1
        for half in (False, True) if work in (commits, uses, lists) else (False,):
            root = worn.parent / f"{number}-{half}" / "cache"
            shutil.copytree(worn, root)
            before = {entry.id: snapshot(entry.payload) for entry in Store(root).entries()}
            # staged is what no store, and no process, had yet: a fresh object in a process of its own
            died = dies_at(number, lambda root=root: work(Store(root)), half)
            is_valid(root, before, died, work)
            shutil.rmtree(root.parent, ignore_errors=True)  # a store that began there may still be sweeping
    assert number > 5


def is_valid(root: Path, before: dict[str, dict[str, bytes]], died: bool, work: Callable[[Store], None]) -> None:
    """Entries whole or absent, none lost that was not to go, an index that is true, no lock held, no leftovers."""
    store = Store(root)
    entries = {entry.id: entry for entry in store.entries()}
    for entry in entries.values():
        found, known = snapshot(entry.payload), before.get(entry.id)
        damaged = entry.manifest["variant"] == "damaged"
        assert (damaged and found == known) or entry.verify() is None
        assert damaged or known is None or found == known
    gone = {name for name in before if name not in entries}
    assert not gone or work in (*REMOVING, commits_again)
    if work is not clears and work is not prunes:
        assert len(gone) <= (2 if work is removes else 1)
    pinned = [entry for entry in entries.values() if entry.pinned]
    assert len(pinned) >= 1 or work is pins
    assert {row["id"] for row in store.rows()} == set(entries)
    assert [row["problem"] for row in store.rows()] == [None] * len(entries)
    with lock.bounded_lock(root / "lock", timeout=1):
        pass
    assert put(store, "0" * 32).persistent and {row["id"] for row in store.rows()} > set(entries)
    for path in (root / "staging").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is gone already, as it should be
            os.utime(path, (5.0, 5.0))
    store.prune(10**9)
    assert not list((root / "staging").iterdir()) and not list((root / "broken").iterdir())
    if work is commits_the_first:
        new = Store(root.parent / "new")
        assert len(put(new, OTHER, variant=1).manifest["files"]) == 2 and len(new.rows()) == 1
        assert died or len(new.entries()) == 1
