# SPDX-License-Identifier: Apache-2.0
"""What stops a bundle: no trust, another machine, a full disk, damage, files that are no bundles."""

from __future__ import annotations

import errno
import gzip
import os
import re
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from bundle_parts import FILES, HERE, join, member, payloads, put, resealed, split

from nexfort_engine.cache import bundle, bundle_manifest, bundle_tar
from nexfort_engine.cache.bundle import Imported, export, inspect, load
from nexfort_engine.cache.key import primary_key
from nexfort_engine.cache.store import Store

OTHER = primary_key({"test": 2})


def take(store: Store, file: Path) -> Imported:
    return load(store, file, trust=True, fingerprints=HERE)


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
    assert [one.end for one in records] == [payload] and not target.root.exists(), "trust is asked for first"
    file.write_bytes(b"anything")
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

    monkeypatch.setattr(target._publisher, "_publish", refuse)
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
        (gzip.compress(b"x" * 5000, mtime=0), "compressed"),
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
    monkeypatch.setattr(bundle_manifest, "LIMIT", 4096)
    file.write_bytes(bundle_tar.header("bundle.json", 4097) + b" " * 8192)
    with pytest.raises(ValueError, match="4097 bytes, expected 1 to 4096"):
        inspect(file)


@pytest.mark.parametrize(
    "value", [b"[]", b"{}", b"[[[[]]]]", b'{"a":{"b":[1]}}', b"1", b'""', b'{"a":1}'], ids=lambda value: value.decode()
)
def test_what_a_bundle_says_of_itself_takes_little_memory(file: Path, value: bytes) -> None:
    """It is shown before the user trusts its maker."""
    count = (bundle_manifest.LIMIT - 200) // (len(value) + 1)
    text = b'{"schema": 1, "entries": [' + b",".join([value] * count) + b"]}\n"
    file.write_bytes(
        bundle_tar.header("bundle.json", len(text)) + text + bundle_tar.padding(len(text)) + bundle_tar.END
    )
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="values in"):
            inspect(file)
        assert tracemalloc.get_traced_memory()[1] < 3 * bundle_manifest.LIMIT
    finally:
        tracemalloc.stop()


def test_manifests_are_twice_as_long_as_their_values_are_many(store: Store, file: Path) -> None:
    for number in range(300):
        put(store, variant=number)
    export(store, file)
    ((_, text), *_) = split(file.read_bytes())
    values = sum(map(text.count, (b"[", b"{", b",", b":")))
    assert len(text) > 1 << 16 and len(text) > 1.5 * bundle_manifest._BYTES_OF_A_VALUE * values
    assert len(inspect(file).entries) == 300


def test_a_manifest_that_the_store_would_not_read_does_not_travel(store: Store, file: Path, monkeypatch: Any) -> None:
    put(store)
    export(store, file)
    monkeypatch.setattr(bundle_manifest, "MANIFEST_LIMIT", 700)
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
        bundle_tar.header("name", size)


def test_too_many_manifests_are_exported_in_several_bundles(store: Store, file: Path, monkeypatch: Any) -> None:
    entry = put(store)
    monkeypatch.setattr(bundle_manifest, "LIMIT", 500)
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
