# SPDX-License-Identifier: Apache-2.0
"""Bundles as they are meant to be used, and what stops them: no trust, another machine, damage, a full disk."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from bundle_parts import FILES, HERE, KEY, MACHINE, dumped, join, member, payloads, put, resealed, snapshot, split

from nexfort_engine.cache import bundle, contents, ustar
from nexfort_engine.cache.bundle import Exported, Imported, export, inspect, load
from nexfort_engine.cache.key import primary_key
from nexfort_engine.cache.store import Store

OTHER = primary_key({"test": 2})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return Store(tmp_path / "target")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "all.nexfort"


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
    assert found.made_by == entry.manifest["made_by"] and contents.parse_time(found.created) >= entry.created


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


# -- what is refused before anything is read -----------------------------------------------------------------


class Recorder:
    """A bundle that notes up to which byte it was read."""

    def __init__(self, inner: BinaryIO) -> None:
        self.inner = inner
        self.end = 0

    def read(self, count: int) -> bytes:
        found = self.inner.read(count)
        self.end = max(self.end, self.inner.tell())
        return found

    def tell(self) -> int:
        return self.inner.tell()

    def fileno(self) -> int:
        return self.inner.fileno()


@pytest.fixture
def records(monkeypatch: Any) -> list[Recorder]:
    real, made = bundle._opened, []

    @contextmanager
    def opened(path: Path) -> Iterator[Any]:
        with real(path) as stream:
            made.append(Recorder(stream))
            yield made[-1]

    monkeypatch.setattr(bundle, "_opened", opened)
    return made


def list_end(data: bytes) -> int:
    """Where the payload begins."""
    return 512 + len(split(data)[0][1]) + -len(split(data)[0][1]) % 512


def test_a_bundle_is_code_and_needs_trust(store: Store, target: Store, file: Path, records: list[Recorder]) -> None:
    put(store)
    export(store, file)
    inspect(file)
    with pytest.raises(PermissionError, match=r"a bundle is code.*pass --trust"):
        load(target, file, trust=False, fingerprints=HERE)
    payload = list_end(file.read_bytes())
    assert [one.end for one in records] == [payload, payload] and not target.root.exists()
    file.write_bytes(file.read_bytes()[:payload])
    with pytest.raises(PermissionError, match="a bundle is code"):
        load(target, file, trust=False, fingerprints=HERE)


@pytest.mark.parametrize("here", [{"ef" * 16: "NVIDIA B200"}, ["ef" * 16], []])
def test_another_machine_is_refused_before_the_payload(
    store: Store, target: Store, file: Path, records: list[Recorder], here: Any
) -> None:
    put(store, variant=1)
    put(store, variant=2, info={"fingerprint": "cd" * 16, "machine": {"device": "NVIDIA A100", "cores": 108}})
    export(store, file)
    payload = list_end(file.read_bytes())
    file.write_bytes(file.read_bytes()[:payload])  # there is no payload that could be read
    with pytest.raises(ValueError, match=r"2 of 2 entries for another machine: ") as refused:
        load(target, file, trust=True, fingerprints=here)
    assert ("NVIDIA B200" if isinstance(here, dict) else "efefefef" if here else "no known kind") in str(refused.value)
    with pytest.raises(
        ValueError, match=r"1 of 2 entries .* cores 108, device NVIDIA A100 \(cdcd.* one is NVIDIA H200 \(abab"
    ):
        take(target, file)
    assert {one.end for one in records} == {payload} and not target.root.exists()


def test_one_entry_of_another_machine_stops_the_whole_bundle(store: Store, target: Store, file: Path) -> None:
    put(store, variant=1)
    put(store, variant=2, info={"fingerprint": "cd" * 16})
    export(store, file)
    with pytest.raises(ValueError, match="1 of 2 entries for another machine"):
        take(target, file)
    assert payloads(target) == {}


def test_a_bundle_larger_than_the_cache_is_refused(store: Store, target: Store, file: Path, monkeypatch: Any) -> None:
    put(store)
    export(store, file)
    monkeypatch.setenv("NEXFORT_CACHE_LIMIT", "600")
    with pytest.raises(ValueError, match=r"604 B.*at most 600 B.*NEXFORT_CACHE_LIMIT"):
        take(target, file)
    assert not target.root.exists()


def test_a_store_that_cannot_be_written_says_so(store: Store, target: Store, file: Path, monkeypatch: Any) -> None:
    put(store)
    export(store, file)
    target.root.write_bytes(b"a file")
    with pytest.raises(OSError, match="cannot be written"):
        take(target, file)
    target.root.unlink()

    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    fresh = Store(target.root)
    monkeypatch.setattr(bundle, "_created", full)
    with pytest.raises(OSError, match="No space left"):
        take(fresh, file)
    assert payloads(fresh) == {} and list((fresh.root / "staging").iterdir()) == []


def test_an_entry_that_lives_only_in_this_process_is_no_import(store: Store, file: Path, monkeypatch: Any) -> None:
    put(store)
    export(store, file)
    target = Store(file.parent / "target")

    def refuse(*_: object) -> Any:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(target, "_publish", refuse)
    with pytest.raises(OSError, match="Disk quota exceeded"):
        take(target, file)
    assert payloads(target) == {}


# -- what is no bundle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "the end of the file"),
        (b"hello", "the end of the file"),
        (bytes(10240), "the end of the archive"),
        (b"x" * 10240, "no tar header"),
        (join([member(b"readme", b"text")]), "found a file 'readme' of 4 bytes.*this is no bundle"),
        (join([member(b"bundle.json", b"", b"5")]), "found a directory .*this is no bundle"),
        (gzip.compress(b"x" * 5000), "compressed"),
        (b"BZh9" + b"x" * 5000, "compressed"),
        (b"\xfd7zXZ\0" + b"x" * 5000, "compressed"),
        (b"\x28\xb5\x2f\xfd" + b"x" * 5000, "compressed"),
        (b"PK\x03\x04" + b"x" * 5000, "compressed"),
    ],
)
def test_other_files_are_no_bundles(target: Store, file: Path, content: bytes, reason: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        inspect(file)
    with pytest.raises(ValueError, match=reason):
        take(target, file)
    assert not target.root.exists()


def test_a_file_that_shrinks_while_it_is_read_is_refused(store: Store, file: Path, monkeypatch: Any) -> None:
    put(store)
    export(store, file)
    data = file.read_bytes()
    monkeypatch.setattr(bundle, "_check_length", lambda *_: None)
    for number, cut in enumerate(range(0, len(data), 300)):
        file.write_bytes(data[:cut])
        target = Store(file.parent / f"target{number}")
        with pytest.raises(ValueError, match="found"):
            take(target, file)
        assert payloads(target) in ({}, payloads(store))
        assert not (target.root / "staging").exists() or list((target.root / "staging").iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="pipes and links")
def test_a_bundle_is_a_file_but_may_be_reached_through_a_link(store: Store, file: Path) -> None:
    put(store)
    export(store, file)
    link, pipe = file.with_name("link"), file.with_name("pipe")
    link.symlink_to(file)
    os.mkfifo(pipe)
    assert inspect(link) == inspect(file)
    for other in (pipe, file.parent, Path("/dev/zero")):
        with pytest.raises(ValueError, match="no regular file"):
            inspect(other)
    with pytest.raises(FileNotFoundError):
        inspect(file.with_name("missing"))


def test_a_bundle_of_another_version_says_which(store: Store, target: Store, file: Path) -> None:
    put(store)
    export(store, file)
    file.write_bytes(resealed(file.read_bytes(), lambda content: content.update(schema=2, new="field")))
    with pytest.raises(ValueError, match="schema '2', this engine reads 1"):
        inspect(file)


def test_a_list_without_end_is_not_read(file: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(contents, "LIMIT", 4096)
    file.write_bytes(ustar.header("bundle.json", 4097) + b" " * 8192)
    with pytest.raises(ValueError, match="4097 bytes, expected 1 to 4096"):
        inspect(file)


def test_a_manifest_that_the_store_would_not_read_does_not_travel(store: Store, file: Path, monkeypatch: Any) -> None:
    put(store)
    export(store, file)
    monkeypatch.setattr(contents, "MANIFEST_LIMIT", 700)
    for refused in (lambda: inspect(file), lambda: export(store, file)):
        with pytest.raises(ValueError, match="manifest is larger than 700 bytes"):
            refused()


@pytest.mark.parametrize("change", [lambda data: data[:-512], lambda data: data + bytes(512)])
def test_a_wrong_length_is_seen_when_a_bundle_is_shown(store: Store, file: Path, change: Any) -> None:
    put(store)
    export(store, file)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=r"bytes after bundle\.json, expected"):
        inspect(file)


def test_a_list_that_was_cut_off_says_so(store: Store, file: Path) -> None:
    put(store)
    export(store, file)
    file.write_bytes(file.read_bytes()[:700])
    with pytest.raises(ValueError, match=r"found 188 bytes of bundle\.json, expected \d+: the bundle was cut off"):
        inspect(file)


@pytest.mark.parametrize("size", [-1, 8 << 30])
def test_no_header_is_written_for_a_size_that_it_cannot_say(size: int) -> None:
    with pytest.raises(ValueError, match=f"found a file of {size} bytes"):
        ustar.header("name", size)


def test_too_many_manifests_are_exported_in_several_bundles(store: Store, file: Path, monkeypatch: Any) -> None:
    entry = put(store)
    monkeypatch.setattr(contents, "LIMIT", 500)
    with pytest.raises(ValueError, match="export fewer entries"):
        export(store, file, [entry.id])
    assert not file.exists()


# -- damage --------------------------------------------------------------------------------------------------


def test_a_bundle_cut_off_anywhere_is_refused(store: Store, file: Path) -> None:
    put(store)
    export(store, file)
    data = file.read_bytes()
    cuts = {at + more for at in range(0, len(data), 512) for more in (-1, 0, 1)} | {len(data) - 1}
    for number, cut in enumerate(sorted(cut for cut in cuts if 0 <= cut < len(data))):
        file.write_bytes(data[:cut])
        target = Store(file.parent / f"target{number}")
        with pytest.raises(ValueError, match="found"):
            take(target, file)
        assert not target.root.exists(), cut


def test_entries_before_the_damage_stay_and_the_damaged_one_does_not_come(
    store: Store, target: Store, file: Path
) -> None:
    entries = sorted((put(store, variant=n) for n in range(3)), key=lambda entry: entry.id)
    export(store, file)
    data = bytearray(file.read_bytes())
    data[[found.start() for found in re.finditer(b"ELF", data)][1]] ^= 4
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"{entries[1].id}/artefact.bin' altered"):
        take(target, file)
    assert payloads(target) == {entries[0].id: FILES} and target.find(entries[0].id).verify() is None
    assert list((target.root / "staging").iterdir()) == []


def test_the_store_looks_at_the_files_once_more(store: Store, target: Store, file: Path, monkeypatch: Any) -> None:
    put(store)
    export(store, file)
    real = bundle._read_payload

    def altered(stream: BinaryIO, manifest: Any, payload: Path | None) -> None:
        real(stream, manifest, payload)
        assert payload is not None
        (payload / "artefact.bin").write_bytes(b"evil")

    monkeypatch.setattr(bundle, "_read_payload", altered)
    with pytest.raises(ValueError, match="staged files are not those"):
        take(target, file)
    assert payloads(target) == {} and list((target.root / "staging").iterdir()) == []
