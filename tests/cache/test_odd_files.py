# SPDX-License-Identifier: Apache-2.0
"""Files of a cache directory that are no files, are somebody else's or are far too large, under each name that is read.

Nothing waits for them, nothing is made of them, and what does not need them goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from large_rows import few
from stores import KEY, OTHER, loaded, put, snapshot

from nexfort_engine.cache.sidecar import recall, remember
from nexfort_engine.cache.store import Store, StoreError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="there are no such files")

NOBODY = 65534
HUGE = 1 << 34  # bytes, of which none is on the disk
MOST_MEMORY = 1 << 28
WAIT = 20.0  # seconds that one look may take on a busy machine
WANTED = {"ab/kernel.py": b"code", "artefact.bin": b"codecode"}


class Waiting(BaseException):
    """Something waits for a file."""


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Waiting

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, WAIT)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the path of a socket must be short
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)
    path.chmod(0o600)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # endless zeros
    except PermissionError:
        pytest.skip("only root makes devices")


def _directory(path: Path) -> None:
    path.mkdir(mode=0o700)


def _link(path: Path) -> None:
    other = path.parent / "other"
    other.write_bytes(b"{}")
    path.symlink_to(other)


def _link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    path.write_bytes(b"{}")
    path.chmod(0o600)
    os.chown(path, NOBODY, NOBODY)


def _foreign_fifo(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.mkfifo(path, 0o666)
    os.chown(path, NOBODY, NOBODY)


def _sparse(path: Path) -> None:
    path.touch(0o600)
    os.truncate(path, HUGE)


def _deep(path: Path) -> None:
    path.touch(0o600)
    path.write_text("[" * 200_000)


def _deep_object(path: Path) -> None:
    path.touch(0o600)
    path.write_text('{"a":' * 200_000 + "1" + "}" * 200_000)


KINDS: list[Callable[[Path], None]] = [
    *(_fifo, _socket, _device, _directory, _link, _link_to_zeros, _loop, _foreign, _foreign_fifo),
    *(_sparse, _deep, _deep_object),
]
PROBES = "cpu_probes.json"
BESIDE = [PROBES, "selfchecks.json"]
ROOT_FILES = [*BESIDE, "index.json", "clock", "lock", "lock.x", "new-1-0123456789abcdef"]
ENTRY_FILES = ["last_used", "pinned", "manifest.json", "payload/artefact.bin", "payload/ab", "payload"]
OTHERS = ["staging/1-0123456789abcdef", "broken/entry-one", "entries/0123456789abcdef0123456789abcdef"]


def _put_in_its_place(path: Path, kind: Callable[[Path], None]) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    kind(path)


def _after_sweeping() -> None:
    """Waits until no thread of a store removes what dead processes left, as the files to be planted look."""
    for thread in threading.enumerate():
        if thread.name == "nexfort-sweep":
            thread.join()


def _used(store: Store) -> list[dict[str, bytes]]:
    """Everything that a process does with a store; what could be loaded."""
    found = []
    for entry in store.candidates(KEY):
        with contextlib.suppress(StoreError):
            found.append(loaded(store, entry))
            store.touch(entry)
            store.note_shape(entry, "2x16")
    assert put(store, OTHER, variant=2).verify() is None
    store.rows()
    store.verify_all()
    for change in (store.prune, store.clear, lambda: store.pin(KEY[:0] or "0123")):
        with contextlib.suppress(OSError, LookupError):
            change()
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[1:])
@pytest.mark.parametrize("name", few([*ROOT_FILES, *OTHERS], 2))
def test_what_lies_beside_entries_costs_none_of_them(store: Store, name: str, kind: Callable[[Path], None]) -> None:
    put(store)
    _after_sweeping()
    remember(store.root, PROBES, {"known": True})
    _put_in_its_place(store.root / name, kind)
    assert _used(Store(store.root)) == [WANTED]
    made = put(Store(store.root), variant=3)
    assert made.verify() is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[1:])
@pytest.mark.parametrize("name", few(ENTRY_FILES, 2))
def test_what_is_no_file_in_an_entry_is_never_loaded(store: Store, name: str, kind: Callable[[Path], None]) -> None:
    entry = put(store)
    _put_in_its_place(entry.path / name, kind)
    beside = name in ("last_used", "pinned")
    assert _used(Store(store.root)) == ([WANTED] if beside else [])
    assert put(store).verify() is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[1:])
@pytest.mark.parametrize("name", BESIDE)
def test_what_is_remembered_is_read_of_files_alone(tmp_path: Path, name: str, kind: Callable[[Path], None]) -> None:
    folder = tmp_path / "cache"
    remember(folder, name, {"known": 1})
    assert recall(folder, name) == {"known": 1}
    _put_in_its_place(folder / name, kind)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert recall(folder, name) is None
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_MEMORY
    remember(folder, name, {"known": 2})
    assert recall(folder, name) == (None if kind is _directory else {"known": 2}), "it is made again"


@pytest.mark.parametrize("name", BESIDE)
def test_nothing_is_read_from_or_written_to_somebody_elses_directory(tmp_path: Path, name: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    folder = tmp_path / "cache"
    remember(folder, name, {"known": 1})
    os.chown(folder, NOBODY, NOBODY)
    assert json.loads((folder / name).read_text()) == {"known": 1} and recall(folder, name) is None
    before = snapshot(folder)
    remember(folder, name, {"known": 2})
    assert snapshot(folder) == before


def test_a_directory_that_others_may_look_into_keeps_what_the_cpu_can_do(tmp_path: Path) -> None:
    """As entries are kept in such a one."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    remember(folder, PROBES, {"known": True})
    assert recall(folder, PROBES) == {"known": True} and put(Store(folder)).persistent
    folder.chmod(0o777)
    assert recall(folder, PROBES) is None and Store(folder).candidates(KEY) == []
