# SPDX-License-Identifier: Apache-2.0
"""The store against damaged and foreign things: it gives whole entries or none, and deletes nothing foreign."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError, get_ident
from typing import Any

import pytest
from stores import KEY, OTHER, put, snapshot

from nexfort_engine.cache import store as store_module
from nexfort_engine.cache.entry import MANIFEST
from nexfort_engine.cache.store import Store

# -- damaged and foreign entries -----------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def replace_by_link(path: Path) -> None:
    outside = path.parents[4] / "outside"
    shutil.copy(path, outside)
    path.unlink()
    path.symlink_to(outside)


@pytest.mark.parametrize("fault", [truncate, flip, Path.unlink, replace_by_link])
@pytest.mark.parametrize("name", ["ab/kernel.py", "artefact.bin"])
def test_an_altered_payload_is_never_sound(store: Store, fault: Callable[[Path], None], name: str) -> None:
    entry = put(store)
    fault(entry.payload / name)
    (found,) = store.candidates(KEY)
    assert name in str(found.verify()) or "symbolic link" in str(found.verify())
    store.set_aside(found, str(found.verify()))
    assert store.candidates(KEY) == [] and len(list((store.root / "broken").glob("entry-*[0-9a-f]"))) == 1
    assert put(store).verify() is None, "the entry can be built again"


def test_an_altered_file_of_equal_size_passes_only_the_quick_check(store: Store) -> None:
    entry = put(store)
    flip(entry.payload / "artefact.bin")
    assert entry.verify(quick=True) is None and "SHA-256" in str(entry.verify())


@pytest.mark.parametrize("name", ["../../secret", "/etc/hosts", "ab/../../../x", "", "a\\b", "c:\\x", "a\0b", "."])
def test_a_manifest_cannot_name_files_outside(store: Store, name: str) -> None:
    entry = put(store)
    (store.root / "index.json").unlink()  # which would refuse any other manifest
    manifest = {**entry.manifest, "files": {name: [1, "0" * 64]}}
    (entry.path / "manifest.json").write_text(json.dumps(manifest))
    (found,) = store.candidates(KEY)
    assert "not a path inside" in str(found.verify())


@pytest.mark.parametrize("length", [0, 1, 40, 200, -1])
def test_a_truncated_manifest_is_set_aside_and_rebuilt(store: Store, length: int) -> None:
    entry, other = put(store), put(store, variant=2)
    manifest = entry.path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:length])
    assert [found.id for found in store.candidates(KEY)] == [other.id]
    assert list((store.root / "broken").glob("*.reason.txt"))
    assert put(store).id == entry.id and len(store.candidates(KEY)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"guards": 2},
        {"id": "0" * 24},
        {"primary": OTHER},
        {"created": "yesterday"},
        {"created": None},
        {"files": {"a": [1]}},
        {"files": {"a": [-1, "0" * 64]}},
        {"files": {"a": [True, "0" * 64]}},
        {"files": {"a": [1, "short"]}},
        {"files": None},
        {"made_by": None},
        {"schema": None},
        {"schema": "1"},
    ],
)
def test_an_altered_manifest_is_set_aside(store: Store, change: dict[str, object]) -> None:
    entry = put(store, guards=1)
    (entry.path / "manifest.json").write_text(json.dumps({**entry.manifest, **change}))
    assert store.candidates(KEY) == [] and not entry.path.exists()


@pytest.mark.parametrize("text", ["[]", "null", "1" * 5000, "[" * 100_000, '"\\ud800"', "{}", "NaN", "\0\xff"])
def test_a_manifest_of_anything_else_is_set_aside(store: Store, text: str) -> None:
    entry = put(store)
    (entry.path / "manifest.json").write_bytes(text.encode("latin-1"))
    assert store.candidates(KEY) == [] and not entry.path.exists()


def test_foreign_things_are_set_aside_and_never_deleted(store: Store, tmp_path: Path) -> None:
    entry = put(store)
    folder = entry.path.parent
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (folder / "holiday.txt").write_text("mine")
    (folder / "notes").mkdir()
    (folder / "notes" / "note").write_text("mine")
    (folder / ("0" * 24)).symlink_to(outside)
    (folder / ".DS_Store").write_text("system")
    (store.root / "README").write_text("mine")
    (store.root / "entries" / "thing").write_text("mine")
    assert [found.id for found in store.candidates(KEY)] == [entry.id]
    assert {path.name for path in folder.iterdir()} == {entry.id, ".DS_Store"}
    kept = [path.read_text() for path in (store.root / "broken").rglob("*") if path.is_file()]
    assert kept.count("mine") == 2
    store.prune(0)
    store.clear()
    assert (outside / "file").read_text() == "mine"
    assert (store.root / "README").exists() and (store.root / "entries" / "thing").exists()
    assert len(list((store.root / "broken").glob("foreign-*[!t]"))) == 3


def test_an_entry_of_a_later_version_is_left_alone(store: Store) -> None:
    entry = put(store)
    (entry.path / "manifest.json").write_text(json.dumps({"schema": 99, "whatever": 1}))
    assert store.candidates(KEY) == [] and entry.path.exists()


@pytest.mark.parametrize("where", ["entries", "staging", "broken", "primary"])
def test_a_directory_that_is_a_link_is_not_followed(store: Store, tmp_path: Path, where: str) -> None:
    entry = put(store)
    place = entry.path.parent if where == "primary" else store.root / where
    outside = tmp_path / "outside"
    shutil.move(place, outside)
    place.symlink_to(outside)
    before = snapshot(outside)
    fresh = Store(store.root)
    assert fresh.candidates(KEY) == []
    made = put(fresh, variant=2)
    assert made.verify() is None and outside not in made.path.parents
    assert snapshot(outside) == before
    assert fresh.writable is (where == "primary")


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    store = Store(tmp_path / "cache")
    assert put(store).persistent and len(store.candidates(KEY)) == 1


def test_set_aside_spares_what_another_process_put_there_meanwhile(store: Store) -> None:
    stale = put(store)
    elsewhere = Store(store.root)
    elsewhere.set_aside(stale, "broken")
    good = put(elsewhere)
    store.set_aside(stale, "broken")
    assert good.path == stale.path and store.candidates(KEY) == [good]


def test_only_some_broken_entries_are_kept(store: Store) -> None:
    for number in range(20):
        store.set_aside(put(store, variant=number), "test")
    entries = [path for path in (store.root / "broken").iterdir() if path.is_dir()]
    assert len(entries) == 16 and len(list((store.root / "broken").iterdir())) == 32


def test_two_threads_that_find_the_same_damage_tell_it_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = put(store)
    (entry.path / MANIFEST).write_text("{")
    both, identity = Barrier(2), store_module.identity
    looked: set[int] = set()

    def seen(path: Path) -> Any:
        """Each thread's first look waits, for as long as nothing keeps the other from looking too."""
        found = identity(path)
        if path == entry.path and get_ident() not in looked:
            looked.add(get_ident())
            with suppress(BrokenBarrierError):
                both.wait(0.5)
        return found

    monkeypatch.setattr(store_module, "identity", seen)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(store.set_aside, entry, "broken") for _ in range(2)]:
            done.result()
    assert len([row for row in caplog.records if "set aside" in row.getMessage()]) == 1
    assert len(list((store.root / "broken").glob("entry-*.reason.txt"))) == 1
