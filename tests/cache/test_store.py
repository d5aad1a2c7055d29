# SPDX-License-Identifier: Apache-2.0
"""The store as it should be: what is put there is found, listed, pinned, bounded and removed."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stores import KEY, OTHER, put, snapshot, use_at

from nexfort_engine.cache import index, place
from nexfort_engine.cache.store import Store, StoreError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


# -- the good way --------------------------------------------------------------------------------------------


def test_a_committed_entry_is_found_whole_by_another_process(store: Store) -> None:
    entry = put(store, guards={"dims": [1, (2, 3)]}, info={"region": "blocks.0"})
    assert entry.persistent and entry.verify() is None and entry.size == 12
    (found,) = Store(store.root).candidates(KEY)
    assert found == entry and found.manifest == entry.manifest
    assert found.manifest["guards"] == {"dims": [1, [2, 3]]}
    assert found.manifest["files"].keys() == {"ab/kernel.py", "artefact.bin"}
    assert found.manifest["made_by"].keys() == {"nexfort", "torch", "triton", "python", "host"}
    assert (found.payload / "ab" / "kernel.py").read_bytes() == b"code"
    assert abs(found.created - time.time()) < 60
    assert store.candidates(OTHER) == [] and not list((store.root / "staging").iterdir())


def test_directories_are_private_and_constructing_a_store_writes_nothing(store: Store) -> None:
    assert not store.root.exists() and store.candidates(KEY) == [] and store.rows() == []
    assert not store.root.exists() and store.clear().entries == 0 and not store.root.exists()
    entry = put(store)
    if os.name == "posix":
        for folder in (store.root, store.root / "staging", entry.path.parent, entry.path, entry.payload):
            assert folder.stat().st_mode & 0o777 == 0o700


def test_candidates_come_newest_first(store: Store) -> None:
    entries = [put(store, variant=n) for n in range(4)]
    assert [entry.id for entry in store.candidates(KEY)] == [entry.id for entry in reversed(entries)]


def test_an_equal_entry_is_kept_and_the_second_one_dropped(store: Store) -> None:
    first = put(store, guards=1, info={"seconds": 1})
    before = snapshot(first.path)
    second = put(store, content=b"other bytes", guards=1, info={"seconds": 2})
    assert second.id == first.id and second.manifest == first.manifest
    assert snapshot(first.path) == before and len(store.candidates(KEY)) == 1
    assert put(store, guards=2).id != first.id
    assert put(store, OTHER, guards=1).id != first.id


def test_a_failed_stage_leaves_nothing(store: Store) -> None:
    with pytest.raises(RuntimeError, match="lowering"), store.stage() as staged:
        (staged / "payload" / "half").write_text("x")
        raise RuntimeError("lowering failed")
    assert not list((store.root / "staging").iterdir()) and store.entries() == []


def test_files_that_loading_writes_are_neither_listed_nor_in_the_way(store: Store) -> None:
    with store.stage() as staged:
        payload = staged / "payload"
        (payload / "__pycache__").mkdir()
        (payload / "__pycache__" / "a.pyc").write_bytes(b"1")
        (payload / "a.lock").write_bytes(b"")
        (payload / "a.so").write_bytes(b"binary")
        entry = store.commit(KEY, staged, {})
    assert entry.manifest["files"].keys() == {"a.so"} and not (entry.payload / "__pycache__").exists()
    (entry.payload / "__pycache__").mkdir()
    (entry.payload / "__pycache__" / "a.pyc").write_bytes(b"2")
    (entry.payload / "linked_again.so").write_bytes(b"3")
    assert entry.verify() is None


def test_misuse_is_refused_before_anything_is_written(store: Store) -> None:
    with store.stage() as staged:
        with pytest.raises(ValueError, match="nothing to commit"):
            store.commit(KEY, staged, {})
        (staged / "payload" / "a").write_text("1")
        with pytest.raises(ValueError, match="hex digits"):
            store.commit("../../outside", staged, {})
        with pytest.raises(TypeError):
            store.commit(KEY, staged, {"model": object()})
        (staged / "payload" / "link").symlink_to("/etc/hosts")
        with pytest.raises(StoreError, match="symbolic link"):
            store.commit(KEY, staged, {})
    assert store.entries() == [] and store.candidates("../../outside") == []


# -- index ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1}', b'{"schema": 1, "entries": [{}]}'),
        *(b'{"schema": 2, "entries": []}', b'{"schema": 1, "entries": []}'),
    ],
)
def test_a_corrupt_or_false_index_is_rebuilt(store: Store, content: bytes) -> None:
    entry = put(store, info={"region": "blocks.0"})
    (store.root / index.NAME).write_bytes(content)
    (row,) = store.rows()
    assert row["id"] == entry.id and row["info"] == {"region": "blocks.0"}
    assert [one["id"] for one in index.read(store.root) or ()] == [entry.id]
    assert store.candidates(KEY) == [entry]


def test_the_index_follows_commits_and_removals(store: Store) -> None:
    assert store.rows() == []
    first, second = put(store, variant=1), put(store, OTHER, variant=2)
    (store.root / index.NAME).unlink()
    put(store, variant=3)
    assert [row["size"] for row in store.rows()] == [12, 12, 12]
    shutil.rmtree(first.path)
    assert len(store.rows()) == 2
    Store(store.root).prune(12)
    assert len(store.rows()) == 1
    text = (store.root / index.NAME).read_text()
    assert text.count("\n") == 3, "one line an entry, for people"
    assert second.primary in text or first.primary in text


def test_listing_does_not_read_the_manifests(store: Store) -> None:
    entry = put(store)
    (entry.path / "manifest.json").unlink()
    assert len(store.rows()) == 1
    assert store.candidates(KEY) == []
    assert store.rows() == []


# -- size ----------------------------------------------------------------------------------------------------


def test_pruning_takes_the_least_recently_used_and_spares_what_is_in_use(store: Store) -> None:
    entries = [put(store, variant=number) for number in range(5)]
    other = Store(store.root)
    for entry, when in zip(entries, (500, 100, 400, 200, 300), strict=True):
        use_at(store, entry, when)
    use_at(other, entries[1], 100)
    assert store.prune(0).entries == 0, "all of them are in use by this process"
    removed = other.prune(24)
    assert removed.entries == 3 and removed.bytes == 36
    assert {entry.id for entry in other.entries()} == {entries[0].id, entries[1].id}


def test_a_commit_keeps_the_cache_within_its_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_LIMIT", "40")
    for number in range(6):
        put(Store(store.root), variant=number)
    assert sum(entry.size for entry in store.entries()) == 36
    assert [entry.manifest["variant"] for entry in store.entries()] == [5, 4, 3]


def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(store: Store) -> None:
    put(store)
    old, new, ahead = (store.root / "staging" / name for name in ("1-old", "2-new", "3-ahead"))
    for folder, age in ((old, 2 * 86400), (new, 60), (ahead, -(10**6))):
        folder.mkdir()
        os.utime(folder, (time.time() - age,) * 2)
    store.prune()
    assert [path.name for path in sorted((store.root / "staging").iterdir())] == ["2-new", "3-ahead"]


def test_clearing_takes_all_entries_and_nothing_else(store: Store, tmp_path: Path) -> None:
    (tmp_path / "beside").write_text("mine")
    store.set_aside(put(store, variant=0), "test")
    for number in range(3):
        put(store, variant=number)
    removed = store.clear()
    assert (removed.entries, removed.bytes) == (3, 36)
    assert store.rows() == [] and not list((store.root / "broken").iterdir())
    assert (tmp_path / "beside").exists() and put(store).persistent


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6000000000", 6_000_000_000),
        ("8GiB", 8 << 30),
        ("500M", 500 << 20),
        ("1.5 gb", 3 << 29),
        ("0", 0),
        ("2t", 2 << 40),
    ],
)
def test_sizes(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_LIMIT", text)
    assert place.default_limit() == place.parse_size(text) == size


@pytest.mark.parametrize("text", ["much", "-1", "8 PiB", "1e9", "GiB"])
def test_a_wrong_limit_is_told_and_ignored(text: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_LIMIT", text)
    assert place.default_limit() == 8 << 30 and text in caplog.text and "8GiB" in caplog.text


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "chosen"))
    assert place.default_root() == tmp_path / "chosen"
    monkeypatch.delenv("NEXFORT_CACHE_DIR")
    if sys.platform.startswith("linux"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert place.default_root() == tmp_path / "nexfort"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/not/allowed")
        assert place.default_root() == Path.home() / ".cache" / "nexfort"
