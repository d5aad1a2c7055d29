# SPDX-License-Identifier: Apache-2.0
"""Bundles as they are meant to be used: what travels, what stays, and how the file comes to be."""

from __future__ import annotations

import errno
import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from bundle_parts import FILES, HERE, KEY, MACHINE, dumped, payloads, put, snapshot

from nexfort_engine.cache import bundle, bundle_manifest
from nexfort_engine.cache.bundle import Exported, Imported, export, inspect, load
from nexfort_engine.cache.key import primary_key
from nexfort_engine.cache.store import Store

OTHER = primary_key({"test": 2})


def take(store: Store, file: Path) -> Imported:
    return load(store, file, trust=True, fingerprints=HERE)


# -- the good way --------------------------------------------------------------------------------------------


def test_entries_arrive_as_they_left(store: Store, target: Store, file: Path) -> None:
    long = "deep/" * 3 + "triton_red_fused_" + "x" * 150 + ".cubin"
    one = put(store, guards={"dims": [1, 2]})
    two = put(store, {long: b"binary" * 999_999, "z": b"1"}, OTHER, info={"model": "flux \u2013 dev.safetensors"})
    assert export(store, file) == Exported(2, one.size + two.size)
    assert take(target, file) == Imported(2, one.size + two.size, 0)
    for entry in (one, two):
        found = target.find(entry.id)
        assert found.verify() is None and found.manifest == entry.manifest and found.primary == entry.primary
        assert found.created == entry.created and found.manifest["made_by"] == entry.manifest["made_by"]
    assert payloads(target) == payloads(store) and len(payloads(target)[two.id][long]) == 5_999_994
    assert [entry.id for entry in Store(target.root).candidates(KEY)] == [one.id]
    assert list((target.root / "staging").iterdir()) == []
    if os.name == "posix":
        for path in target.root.rglob("payload"):
            for inner in (path, *path.rglob("*")):
                assert inner.stat().st_mode & 0o777 == (0o700 if inner.is_dir() else 0o600)


def test_what_a_bundle_holds_is_shown_without_taking_it(store: Store, file: Path) -> None:
    entry = put(store)
    second = {"device": "CPU", "flags": ["avx2"]}
    put(store, FILES, OTHER, info={"fingerprint": "cd" * 16, "machine": second})
    export(store, file)
    found = inspect(file)
    assert found.entries == sorted((one.manifest for one in store.entries()), key=lambda one: str(one["id"]))
    assert found.fingerprints == {"ab" * 16, "cd" * 16} and found.bytes == 2 * entry.size
    assert len(found.machines) == 2 and MACHINE in found.machines and second in found.machines
    assert found.made_by == entry.manifest["made_by"] and bundle_manifest.parse_time(found.created) >= entry.created


def test_equal_entries_give_equal_bytes(store: Store, target: Store, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(bundle, "now_text", lambda: "2026-01-02T03:04:05.000000+00:00")
    for variant in range(3):
        put(store, variant=variant)
    first, second, third = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    export(store, first)
    take(target, first)
    export(target, second)  # from another store
    export(target, third, reversed([entry.id for entry in store.entries()]))  # in another order
    assert first.read_bytes() == second.read_bytes() == third.read_bytes()


def test_any_tar_program_can_look_into_a_bundle(store: Store, file: Path) -> None:
    entry = put(store, FILES | {"k" * 120: b"long", "d/" * 60 + "n": b"deep"})
    export(store, file)
    with tarfile.open(file, "r:") as archive:
        members = archive.getmembers()
        read = {member.name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    assert members[0].name == "bundle.json" and all(member.isreg() and member.mode == 0o600 for member in members)
    told = read.pop("bundle.json")
    assert json.loads(told)["entries"] == [entry.manifest] and dumped(json.loads(told)) == told
    assert read == {f"{entry.id}/{name}": content for name, content in payloads(store)[entry.id].items()}


def test_what_is_there_stays(store: Store, target: Store, file: Path) -> None:
    entry = put(store, guards=1)
    put(store, guards=2)
    export(store, file)
    own = put(target, {"other": b"built here"}, guards=1)
    assert own.id == entry.id
    before = snapshot(own.path)
    assert take(target, file) == Imported(1, entry.size, 1)
    assert take(target, file) == Imported(0, 0, 2)
    assert snapshot(own.path) == before


def test_an_import_is_not_the_first_to_go_where_the_cache_is_full(store: Store, target: Store, file: Path) -> None:
    entry = put(store, guards=1)
    export(store, file)
    own = put(target, guards=2)
    assert own.created > entry.created
    take(target, file)
    assert Store(target.root).prune(entry.size).entries == 1
    assert payloads(target).keys() == {entry.id}


def test_an_import_replaces_what_was_damaged(store: Store, target: Store, file: Path) -> None:
    entry = put(store)
    export(store, file)
    take(target, file)
    damaged = target.find(entry.id).payload / "artefact.bin"
    damaged.write_bytes(b"evil")
    assert take(target, file) == Imported(1, entry.size, 0)
    assert target.find(entry.id).verify() is None and payloads(target) == payloads(store)


@pytest.mark.skipif(os.name != "posix", reason="modes")
def test_an_import_replaces_what_others_could_have_written(store: Store, target: Store, file: Path) -> None:
    entry = put(store)
    export(store, file)
    take(target, file)
    (target.find(entry.id).payload / "artefact.bin").chmod(0o666)
    fresh = Store(target.root)
    assert take(fresh, file) == Imported(1, entry.size, 0)
    assert fresh.find(entry.id).verify() is None and payloads(fresh) == payloads(store)


def test_an_entry_of_the_base_cache_is_kept_and_never_touched(store: Store, tmp_path: Path, file: Path) -> None:
    put(store)
    export(store, file)
    above = Store(tmp_path / "above", base=store.root)
    if not above.candidates(KEY):
        pytest.skip("this user may write the base cache, so it is not read")
    before = snapshot(store.root)
    assert take(above, file) == Imported(0, 0, 1)
    assert snapshot(store.root) == before and above.entries() == []


# -- what is exported ----------------------------------------------------------------------------------------


def test_entries_are_chosen_by_id(store: Store, target: Store, file: Path) -> None:
    entries = [put(store, variant=n) for n in range(4)]
    chosen = [entries[2].id, entries[0].id[:12], entries[2].id]
    assert export(store, file, chosen).entries == 2
    assert {one["id"] for one in inspect(file).entries} == {entries[0].id, entries[2].id}
    with pytest.raises(LookupError, match="0123456789ab"):
        export(store, file, [entries[1].id, "0123456789ab"])
    assert len(inspect(file).entries) == 2, "the file from before is untouched"


def test_nothing_to_export_is_an_error_and_makes_no_file(store: Store, file: Path) -> None:
    with pytest.raises(ValueError, match="nothing to export"):
        export(store, file)
    put(store)
    with pytest.raises(ValueError, match="nothing to export"):
        export(store, file, [])
    assert not file.exists()


def test_what_cannot_travel_is_left_out_and_named(store: Store, target: Store, file: Path) -> None:
    good = put(store, variant=0)
    old = put(store, variant=1, info={"fingerprint": ""})
    odd = put(store, {"k\u00e9rnel": b"1"}, variant=2)
    rude = put(store, variant=3, info={"region": "blocks\x1b[2J"})
    torn = put(store, variant=4)
    (torn.payload / "artefact.bin").write_bytes(b"\x7fELG")
    done = export(store, file)
    assert done.entries == 1 and done.left_out.keys() == {old.id, odd.id, rude.id, torn.id}
    for entry, reason in ((old, "which machine"), (odd, "ASCII"), (rude, "plain text"), (torn, "SHA-256")):
        assert reason in done.left_out[entry.id]
        with pytest.raises(ValueError, match=rf"{entry.id} cannot be exported: .*{reason}"):
            export(store, file, [good.id, entry.id])
    assert take(target, file).entries == 1 and payloads(target).keys() == {good.id}


def test_an_entry_that_changes_meanwhile_is_not_exported(store: Store, file: Path, monkeypatch: Any) -> None:
    entry = put(store)
    real = bundle._new_file

    @contextmanager
    def late(path: Path) -> Iterator[BinaryIO]:
        (entry.payload / "ab" / "kernel.py").write_bytes(b"evil" * 150)
        with real(path) as stream:
            yield stream

    monkeypatch.setattr(bundle, "_new_file", late)
    with pytest.raises(ValueError, match="changed while it was exported"):
        export(store, file)
    assert list(file.parent.iterdir()) == [store.root]


def test_a_bundle_appears_whole_and_private_or_not_at_all(store: Store, file: Path, monkeypatch: Any) -> None:
    put(store)
    file.write_bytes(b"from before")
    file.chmod(0o644)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(bundle, "_write_payload", full)
        export(store, file)
    assert file.read_bytes() == b"from before" and sorted(file.parent.iterdir()) == sorted([file, store.root])
    with file.open("rb") as reader:
        export(store, file)
        assert reader.read() == b"from before", "who reads the old file is not disturbed"
    assert inspect(file).bytes and sorted(file.parent.iterdir()) == sorted([file, store.root])
    if os.name == "posix":
        assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.name != "posix", reason="pipes and device files")
def test_a_bundle_is_written_to_files_only(store: Store, tmp_path: Path) -> None:
    put(store)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(FileExistsError, match="no regular file"):
            export(store, place)
    with pytest.raises(FileNotFoundError, match="found no directory"):
        export(store, tmp_path / "missing" / "file")
    assert (tmp_path / "pipe").is_fifo()
