# SPDX-License-Identifier: Apache-2.0
"""The store as it should be: what is put there is found, listed, pinned, bounded and removed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stores import KEY, OTHER, SIZE, put, snapshot, use_at

from nexfort_engine.cache import index, paths
from nexfort_engine.cache.store import Entry, Store, StoreError

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
    assert paths.default_limit() == paths.parse_size(text) == size


@pytest.mark.parametrize("text", ["much", "-1", "8 PiB", "1e9", "GiB"])
def test_a_wrong_limit_is_told_and_ignored(text: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_LIMIT", text)
    assert paths.default_limit() == 8 << 30 and text in caplog.text and "8GiB" in caplog.text


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "chosen"))
    assert paths.default_root() == tmp_path / "chosen"
    monkeypatch.delenv("NEXFORT_CACHE_DIR")
    if sys.platform.startswith("linux"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert paths.default_root() == tmp_path / "nexfort"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/not/allowed")
        assert paths.default_root() == Path.home() / ".cache" / "nexfort"


# -- finding, pinning, removing ------------------------------------------------------------------------------


def test_an_entry_is_found_by_the_beginning_of_its_id(store: Store) -> None:
    entries = [put(store, variant=number) for number in range(40)]
    assert store.find(entries[3].id) == entries[3] and store.find(entries[3].id[:8]) == entries[3]
    for text, said in (("", "at least"), (entries[3].id[:3], "at least"), ("zzzz", "no entry"), ("../..", "no entry")):
        with pytest.raises(LookupError, match=said):
            store.find(text)
    twin = entries[3].path.with_name(entries[3].id[:5] + "0" * 19)
    shutil.copytree(entries[3].path, twin)
    with pytest.raises(LookupError, match=f"several ids: .*{entries[3].id}"):
        store.find(entries[3].id[:4])
    assert store.find(entries[3].id) == entries[3]
    with pytest.raises(LookupError, match="no entry"):
        Store(store.root / "nowhere").find("0" * 24)


def test_pinned_entries_stay(store: Store) -> None:
    kept, other = put(store, variant=1), put(store, variant=2)
    assert store.pin(kept.id[:6]).pinned and store.pin(kept.id).pinned
    assert {row["id"]: row["pinned"] for row in store.rows()} == {kept.id: True, other.id: False}
    assert Store(store.root).prune(0).entries == 1 and Store(store.root).clear().entries == 0
    assert Store(store.root).entries() == [kept]
    assert not store.pin(kept.id, pinned=False).pinned and not store.pin(kept.id, pinned=False).pinned
    assert store.pin(kept.id).pinned and Store(store.root).clear(pinned=True).entries == 1
    for pinned in (True, False):
        with pytest.raises(LookupError):
            store.pin(kept.id, pinned)


def test_pinned_entries_stay_when_a_commit_goes_over_the_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store.pin(put(store, variant=0).id)
    monkeypatch.setenv("NEXFORT_CACHE_LIMIT", str(2 * SIZE))
    last = [put(Store(store.root), variant=number) for number in (1, 2, 3)][-1]
    assert {entry.id for entry in store.entries()} == {kept.id, last.id}


def test_removing_takes_exactly_what_was_named_or_nothing(store: Store) -> None:
    entries = [put(store, variant=number) for number in range(4)]
    store.pin(entries[0].id)
    with pytest.raises(LookupError, match="no entry"):
        store.remove([entries[0].id, "0" * 24])
    assert len(store.entries()) == 4 and store.remove([]).entries == 0
    gone = store.remove([entries[0].id, entries[1].id[:10], entries[0].id])
    assert (gone.entries, gone.bytes) == (2, 2 * SIZE)
    assert {row["id"] for row in store.rows()} == {entries[2].id, entries[3].id}


def test_removing_takes_what_cannot_be_loaded(store: Store) -> None:
    entry = put(store)
    entry.path.chmod(0o755)
    assert store.find(entry.id).id == entry.id and store.remove([entry.id]).entries == 1
    assert not entry.path.exists() and not list((store.root / "broken").iterdir())


def test_clearing_spares_what_a_later_version_made(store: Store) -> None:
    entry = put(store)
    (entry.path / "manifest.json").write_text(json.dumps({"schema": 99}))
    assert store.clear().entries == 0 and store.prune(0).entries == 0 and entry.path.exists()
    assert "schema 99" in str(store.verify_all()[0][1])


def test_verifying_everything_changes_nothing(store: Store) -> None:
    entries = [put(store, variant=number) for number in range(5)]
    (entries[0].payload / "artefact.bin").write_bytes(b"evilevil")
    (entries[1].path / "manifest.json").write_bytes(b"{")
    shutil.rmtree(entries[2].payload)
    (entries[3].payload / "artefact.bin").unlink()
    before = snapshot(store.root)
    found = {entry.id: problem for entry, problem in store.verify_all()}
    said = ["SHA-256", "not JSON", "no payload", "missing"]
    assert all(part in str(found[entry.id]) for part, entry in zip(said, entries, strict=False))
    assert found[entries[4].id] is None and snapshot(store.root) == before
    assert [store.find(entry.id).size for entry in entries] == [SIZE, 0, 0, SIZE, SIZE]


# -- what is noted about entries -----------------------------------------------------------------------------


def test_shapes_are_remembered_newest_last(store: Store) -> None:
    entry = put(store)
    assert entry.shapes == [] and store.rows()[0]["shapes"] == [] and store.rows()[0]["last_used"] is None
    for number in [*range(20), 5, 5]:
        store.note_shape(entry, f"{number}x4x64x64")
    expected = [*(f"{number}x4x64x64" for number in (*range(4, 5), *range(6, 20))), "5x4x64x64"]
    assert entry.shapes == store.rows()[0]["shapes"] == expected and len(expected) == 16
    assert abs(store.rows()[0]["last_used"] - time.time()) < 60
    for number in range(1000):
        store.note_shape(entry, f"{number % 17}x{'9' * 100}")
    assert (entry.path / "last_used").stat().st_size < 16_000 and len(entry.shapes) == 16
    store.touch(entry)
    assert len(entry.shapes) == 16, "the time of use is another thing"


def test_noting_never_raises(store: Store) -> None:
    entry = put(store)
    for text in ("", "two\nlines", "x" * 1000, "\0", "\ud800"):
        store.note_shape(entry, text)
    assert entry.shapes == []
    shutil.rmtree(entry.path)
    store.note_shape(entry, "1x4x64x64")
    store.touch(entry)
    assert not entry.path.exists()


def test_what_the_engine_tells_can_be_asked(store: Store) -> None:
    entry = put(store, info={"machine": {"gpu": "X"}, "fingerprint": "ab", "region": "blocks.0"})
    assert (entry.machine, entry.fingerprint, entry.info["region"]) == ({"gpu": "X"}, "ab", "blocks.0")
    odd = put(store, variant=1, info={"machine": 1, "fingerprint": None})
    assert (odd.machine, odd.fingerprint) == ({}, "") and put(store, variant=2, info=3).info == {}


# -- taking in what was made elsewhere -----------------------------------------------------------------------


def adopted(store: Store, entry: Entry, manifest: dict[str, Any], **more: bytes) -> Entry:
    with store.stage() as staged:
        shutil.rmtree(staged / "payload")
        shutil.copytree(entry.payload, staged / "payload")
        for name, content in more.items():
            (staged / "payload" / name).write_bytes(content)
        return store.adopt(manifest, staged)


def test_an_adopted_entry_is_the_one_that_was_made(store: Store, tmp_path: Path) -> None:
    made = put(Store(tmp_path / "elsewhere"), info={"region": "blocks.0"})
    taken = adopted(store, made, made.manifest)
    assert taken.persistent and taken.manifest == made.manifest and store.candidates(KEY) == [taken]
    assert taken.verify() is None and taken.digest == made.digest and len(store.rows()) == 1
    assert adopted(Store(store.root), made, made.manifest) == taken


@pytest.mark.parametrize(
    "change",
    [
        *({"id": "0" * 24}, {"id": "../x"}, {"primary": OTHER}, {"primary": ".."}, {"schema": 2}, {"schema": None}),
        *({"files": {}}, {"files": {"../a": [1, "0" * 64]}}, {"guards": 1}, {"created": 1}, {"made_by": 1}),
    ],
)
def test_an_unsound_manifest_is_not_adopted(store: Store, tmp_path: Path, change: dict[str, Any]) -> None:
    made = put(Store(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match=r"."):
        adopted(store, made, {**made.manifest, **change})
    assert store.rows() == [] and not list((store.root / "staging").iterdir())


@pytest.mark.parametrize("more", [{"artefact.bin": b"evilevil"}, {"more": b"1"}, {"artefact.bin": b""}])
def test_other_files_than_listed_are_not_adopted(store: Store, tmp_path: Path, more: dict[str, bytes]) -> None:
    made = put(Store(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match="differ"):
        adopted(store, made, made.manifest, **more)
    assert store.rows() == []
