# SPDX-License-Identifier: Apache-2.0
"""The store's trust: nothing is loaded that somebody else could have written, nor anything but what was stored."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from large_rows import few
from stores import KEY, OTHER, loaded, make_base, put, snapshot

from nexfort_engine.cache import index, load_copies, trust
from nexfort_engine.cache.paths import base_root
from nexfort_engine.cache.store import Store, StoreError

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's; Windows has access lists")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# -- private to the user -------------------------------------------------------------------------------------


@posix
def test_whatever_the_umask_all_is_private(store: Store, umask: int) -> None:
    entry = put(store)
    (entry.path.parents[2] / "beside").mkdir()
    (store.root / "beside").rmdir()
    store.touch(entry)
    store.note_shape(entry, "1x4x64x64")
    store.pin(entry.id)
    store.set_aside(put(store, variant=2), "test")
    store.prune(0)
    with store.stage() as staged:
        (staged / "payload" / "deep" / "er").mkdir(parents=True)
        (staged / "payload" / "deep" / "er" / "a.so").write_bytes(b"1")
        os.chmod(staged / "payload" / "deep" / "er" / "a.so", 0o777)
        os.chmod(staged, 0o777)
        again = store.commit(OTHER, staged, {})
    assert again.persistent and again.verify() is None
    store.ready(again)
    for path in (store.root, *store.root.rglob("*")):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path
    assert Store(store.root).candidates(OTHER) == [again]


LOOSE = [
    *[(".", 0o770), (".", 0o702), ("entries", 0o750), ("entries", 0o777), ("staging", 0o770), ("broken", 0o707)],
]


@posix
@pytest.mark.parametrize(("name", "bits"), LOOSE)
def test_a_directory_that_others_may_enter_is_refused_with_what_to_do(
    store: Store, caplog: pytest.LogCaptureFixture, name: str, bits: int
) -> None:
    entry = put(store)
    os.chmod(store.root / name, bits)
    late = Store(store.root)
    assert late.candidates(KEY) == [] and late.rows() == [] and late.entries() == []
    assert f"{bits:04o}" in caplog.text and "chmod -R go-" in caplog.text and str(store.root) in caplog.text
    assert not late.writable and "chmod" in str(late.problem) and "NEXFORT_CACHE_DIR" in str(late.problem)
    made = put(late, variant=2)
    assert not made.persistent and made.verify() is None
    assert all("chmod" in str(reason) for _, reason in late.verify_all()) and late.verify_all()
    os.chmod(store.root / name, 0o700)
    assert Store(store.root).candidates(KEY) == [entry], "nothing was moved or removed"


@posix
def test_a_root_that_others_may_look_into_is_good_enough(store: Store) -> None:
    entry = put(store)
    os.chmod(store.root, 0o755)
    assert Store(store.root).candidates(KEY) == [entry] and put(Store(store.root), variant=1).persistent


INSIDE = ["..", ".", "manifest.json", "payload", "payload/ab", "payload/ab/kernel.py", "payload/artefact.bin"]


@posix
@pytest.mark.parametrize("bits", few([0o020, 0o002, 0o004, 0o040], (0o002, 0o040)))
@pytest.mark.parametrize("name", INSIDE)
def test_an_entry_that_others_can_reach_is_left_alone_and_not_loaded(
    store: Store, caplog: pytest.LogCaptureFixture, name: str, bits: int
) -> None:
    entry, sound = put(store, variant=1), put(store, OTHER, variant=2)
    place = entry.path / name
    before = mode(place)
    os.chmod(place, before | bits)
    late = Store(store.root)
    found = late.candidates(KEY)
    for one in found:  # seen only by a look at every file
        reason = str(one.verify(quick=True))
        assert f"mode {before | bits:04o}" in reason and "chmod" in reason
        with pytest.raises(StoreError, match="mode"):
            late.ready(one)
        late.set_aside(one, reason)
    assert late.candidates(KEY) == [] and late.candidates(OTHER) == [sound]
    assert "others than its owner" in caplog.text and entry.path.is_dir()
    problems = {one.id: reason for one, reason in late.verify_all()}
    assert problems[sound.id] is None and "chmod" in str(problems[entry.id])
    os.chmod(place, before)
    assert Store(store.root).candidates(KEY) == [entry], "the user put it right"


@posix
@pytest.mark.parametrize("name", INSIDE[1:])
def test_what_is_refused_is_replaced_by_what_is_made_again(store: Store, name: str) -> None:
    entry = put(store)
    os.chmod(entry.path / name, 0o777)
    late = Store(store.root)
    for one in late.candidates(KEY):
        late.set_aside(one, str(one.verify()))
    made = put(late)
    assert made.persistent and made.id == entry.id and loaded(late, made)["artefact.bin"] == b"codecode"
    assert Store(store.root).candidates(KEY) == [made]


@posix
def test_rows_tell_what_a_look_can_tell(store: Store) -> None:
    entries = [put(store, variant=number) for number in range(4)]
    os.chmod(entries[0].path, 0o755)
    os.chmod(entries[1].payload, 0o720)
    os.chmod(entries[2].path / "manifest.json", 0o644)
    late = Store(store.root)
    for read in (False, True):
        rows = {row["id"]: row["problem"] for row in late.rows()}
        told = [rows[entry.id] for entry in entries]
        assert "mode" in str(told[0]) and told[3] is None
        # what lies in a directory that nobody else can enter is looked at when it is read
        assert [one is not None for one in told[1:3]] == [read, read]
        assert all("mode" in str(problem) for entry, problem in late.verify_all() if entry.id != entries[3].id)
        (store.root / index.NAME).unlink(missing_ok=True)  # the second time nothing is known of them but the name
    for entry in entries[:3]:
        for path in (entry.path, entry.payload):
            os.chmod(path, 0o700)
        os.chmod(entry.path / "manifest.json", 0o600)
    assert [row["problem"] for row in late.rows()] == [None] * 4 and [row["size"] for row in late.rows()] == [12] * 4
    assert len(late.entries()) == 4


@posix
@needs_root
@pytest.mark.parametrize("name", [".", "entries", *(f"@{name}" for name in INSIDE)])
def test_what_belongs_to_another_user_is_not_read(store: Store, caplog: pytest.LogCaptureFixture, name: str) -> None:
    entry = put(store)
    place = entry.path / name[1:] if name.startswith("@") else store.root / name
    os.chown(place, 12345, -1)
    late = Store(store.root)
    for one in late.candidates(KEY):
        with pytest.raises(StoreError, match="belongs to user 12345"):
            late.ready(one)
        late.set_aside(one, str(one.verify()))
    assert late.candidates(KEY) == [] and "belongs to user 12345" in caplog.text and entry.path.is_dir()


@posix
@needs_root
def test_another_users_cache_is_not_touched(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store)
    os.chown(store.root, 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    reader = Store(store.root)
    assert reader.candidates(KEY) == [] and reader.rows() == [] and reader.entries() == []
    assert not reader.writable and "belongs to user 12345" in str(reader.problem)


@posix
def test_a_file_system_without_modes_keeps_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda path, mode=0o777, **more: real(path, mode, **more) or os.chmod(path, 0o777))
    entry = put(store)
    assert not entry.persistent and "0777" in str(store.problem)


def test_systems_without_owners_go_by_their_access_lists(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "geteuid")
    late = Store(store.root, base=store.root.parent / "base")
    entry = put(late)
    assert trust.own().owners is None and trust.base().owners is None
    os.chmod(entry.payload / "artefact.bin", 0o666)
    assert [one.verify() for one in Store(store.root).candidates(KEY)] == [None]


# -- only what was stored ------------------------------------------------------------------------------------


def test_what_loading_leaves_is_neither_stored_nor_loaded_again(store: Store) -> None:
    entry = put(store)
    before = snapshot(entry.path)
    copy = store.ready(entry)
    assert snapshot(copy) == snapshot(entry.payload) and copy != entry.payload and store.root in copy.parents
    (copy / "triton").mkdir()
    (copy / "triton" / "kernel.cubin").write_bytes(b"laid out by loading")
    (copy / "ab" / "kernel.py").write_bytes(b"something else")
    assert snapshot(entry.path) == before and loaded(store, entry) == {
        "ab/kernel.py": b"code",
        "artefact.bin": b"codecode",
    }
    (entry.payload / "triton").mkdir()
    (entry.payload / "triton" / "kernel.cubin").write_bytes(b"not listed")
    assert "triton/kernel.cubin" not in loaded(Store(store.root), entry)


def test_what_is_made_ready_ahead_is_the_checked_copy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"ab/kernel.py": b"code", "artefact.bin": b"codecode"}
    entry = put(store)
    late = Store(store.root)
    late.ahead([KEY, KEY])
    with monkeypatch.context() as patch:
        patch.setattr(load_copies.payload, "copy", None)
        patch.setattr(load_copies.payload, "check", None)
        copy = late.ready(entry)  # nothing is left to do
    assert snapshot(copy) == stored
    (copy / "ab" / "kernel.py").write_bytes(b"laid out by loading")
    assert snapshot(late.ready(entry)) == stored, "what loading left was given again"


def test_what_must_not_be_loaded_is_not_made_ready_ahead(store: Store) -> None:
    entry = put(store)
    late = Store(store.root)
    (entry.payload / "artefact.bin").write_bytes(b"codeCODE")
    late.ahead([KEY, "0" * 32])
    with pytest.raises(StoreError, match="artefact"):
        late.ready(entry)


def test_a_full_disk_while_copying_is_not_held_against_the_entry(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = put(store)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    late = Store(store.root)
    with pytest.raises(StoreError, match="No space left"):
        late.ready(entry)
    late.set_aside(entry, "what a caller does then")
    monkeypatch.undo()
    assert Store(store.root).candidates(KEY) == [entry] and loaded(Store(store.root), entry)


def test_a_manifest_that_the_index_does_not_know_is_not_loaded(store: Store) -> None:
    """Payload and manifest are altered together, so that they fit each other."""
    entry = put(store)
    (entry.payload / "artefact.bin").write_bytes(b"evilevil")
    with Store(store.root).stage() as staged:
        (staged / "payload" / "a").write_bytes(b"evilevil")
        digest = store.commit(OTHER, staged, {}).manifest["files"]["a"]
    for change in ({}, {"created": "2020-01-01T00:00:00+00:00"}, {"made_by": {}}):
        altered = {**entry.manifest, "files": {**entry.manifest["files"], "artefact.bin": digest}, **change}
        entry.path.mkdir(mode=0o700, exist_ok=True)
        (entry.path / "manifest.json").write_text(json.dumps(altered))
        os.chmod(entry.path / "manifest.json", 0o600)
        assert "SHA-256 is not the one in the index" in str(dict(store.verify_all())[entry])
        assert Store(store.root).candidates(KEY) == []
        aside = next((store.root / "broken").glob("entry-*[0-9a-f]"))
        aside.rename(entry.path)
        next((store.root / "broken").glob("*.reason.txt")).unlink()


def test_an_entry_made_again_is_not_measured_by_the_row_of_the_one_before(store: Store) -> None:
    entry = put(store)
    rows = (store.root / index.NAME).read_bytes()
    store.set_aside(entry, "test")
    again = put(store)
    (store.root / index.NAME).write_bytes(rows)  # as if the index had not been written yet
    assert again.digest != entry.digest and Store(store.root).candidates(KEY) == [again]


# -- base cache ----------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if hasattr(os, "getuid"):
        monkeypatch.setenv("NEXFORT_CACHE_BASE_OWNER", str(os.getuid()))
    yield tmp_path / "base"
    for path in (tmp_path / "base").rglob("*"):
        if path.is_dir():
            path.chmod(0o700)


def test_a_base_serves_what_the_private_cache_lacks_and_is_never_changed(store: Store, base: Path) -> None:
    below = make_base(base, 1, 2)
    before = {path: path.stat().st_mtime_ns for path in base.rglob("*")}, snapshot(base)
    store = Store(store.root, base)
    assert store.base_problem is None and [one.base for one in store.candidates(KEY)] == [True, True]
    own, same = put(store, variant=3), put(store, content=b"mine", variant=1)
    assert [one.manifest["variant"] for one in store.candidates(KEY)] == [1, 3, 2], "own ones first, each id once"
    assert [(row["id"], row["base"]) for row in store.rows()] == [
        *((own.id, False), (same.id, False), (below[1].id, True))
    ]
    found = store.find(below[1].id)
    assert found.base and loaded(store, found) == {"ab/kernel.py": b"base", "artefact.bin": b"basebase"}
    store.touch(found)
    store.note_shape(found, "1x4x64x64")
    for refused in (lambda: store.pin(found.id), lambda: store.remove([own.id, found.id])):
        with pytest.raises(PermissionError, match="base cache"):
            refused()
    assert own.path.is_dir()
    store.set_aside(found, "it does not load here")
    assert found.id not in [one.id for one in store.candidates(KEY)]
    store.prune(0)
    assert Store(store.root).clear().entries == 2 and len(Store(store.root, base).verify_all()) == 2
    assert ({path: path.stat().st_mtime_ns for path in base.rglob("*")}, snapshot(base)) == before


def test_a_base_without_a_sound_index_serves_as_well(store: Store, base: Path) -> None:
    below = make_base(base, 1, 2)
    (base / index.NAME).chmod(0o600)
    for content in (b"", b"{}", b"\xff" * 100):
        (base / index.NAME).write_bytes(content)
        store = Store(store.root, base)
        assert [row["id"] for row in store.rows()] == [one.id for one in below] and len(store.candidates(KEY)) == 2


def test_an_altered_base_is_not_loaded_and_not_moved(store: Store, base: Path) -> None:
    below = make_base(base, 1)
    os.chmod(below[0].payload / "artefact.bin", 0o600)
    (below[0].payload / "artefact.bin").write_bytes(b"evilevil")
    os.chmod(below[0].payload / "artefact.bin", 0o444)
    store = Store(store.root, base)
    (found,) = store.candidates(KEY)
    with pytest.raises(StoreError, match="SHA-256"):
        store.ready(found)
    store.set_aside(found, "SHA-256")
    assert store.candidates(KEY) == [] and below[0].path.is_dir()


@posix
@pytest.mark.parametrize("name", [".", "entries", "@..", "@.", "@manifest.json", "@payload", "@payload/artefact.bin"])
@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_a_base_that_others_can_write_is_refused(store: Store, base: Path, name: str, bits: int) -> None:
    below = make_base(base, 1)
    place = below[0].path / name[1:] if name.startswith("@") else base / name
    os.chmod(place, mode(place) | bits)
    store = Store(store.root, base)
    if not name.startswith("@"):
        assert "chmod" in str(store.base_problem) and store.rows() == []
    for one in store.candidates(KEY):
        assert "chmod" in str(one.verify())
        with pytest.raises(StoreError, match="mode"):
            store.ready(one)
    assert put(store, variant=1).persistent and not store.candidates(KEY)[0].base


@posix
def test_a_base_that_this_user_can_write_is_refused(
    store: Store, base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_base(base, 1)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(trust, "_can_write", lambda path: True)
    assert Store(store.root, base).candidates(KEY) == [] and "make it read-only" in caplog.text
    assert "can be written by the user of this process" in str(Store(store.root, base).base_problem)
    monkeypatch.setattr(trust, "_can_write", lambda path: False)
    assert Store(store.root, base).base_problem is None


@posix
@needs_root
def test_a_base_of_whom_nobody_named_is_refused(store: Store, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = make_base(base, 1)
    for path in (base, *base.rglob("*")):
        os.chown(path, 12345, -1)
    assert "belongs to user 12345" in str(Store(store.root, base).base_problem)
    monkeypatch.setenv("NEXFORT_CACHE_BASE_OWNER", "12345")
    trusting = Store(store.root, base)
    assert trusting.base_problem is None and [one.id for one in trusting.candidates(KEY)] == [below[0].id]
    assert loaded(trusting, trusting.candidates(KEY)[0])
    monkeypatch.setenv("NEXFORT_CACHE_BASE_OWNER", "nobody-of-this-name")
    late = Store(store.root, base)
    assert late.candidates(KEY) == [] and "no user here" in str(late.base_problem)
    monkeypatch.setenv("NEXFORT_CACHE_BASE_OWNER", "root")
    assert "belongs to user 12345" in str(Store(store.root, base).base_problem)


def test_a_base_that_is_not_there_is_told(store: Store, tmp_path: Path, base: Path) -> None:
    assert Store(store.root).base_problem is None
    late = Store(store.root, tmp_path / "nowhere")
    assert "holds no entries" in str(late.base_problem) and late.rows() == [] and put(late).persistent
    assert "user's own cache" in str(Store(store.root, store.root).base_problem)
    make_base(base, 1)
    shutil.move(base / "entries", tmp_path / "elsewhere")
    (base / "entries").symlink_to(tmp_path / "elsewhere")
    assert Store(store.root, base).base_problem is not None and len(Store(store.root, base).candidates(KEY)) == 1


def test_base_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NEXFORT_CACHE_BASE", raising=False)
    assert base_root() is None
    monkeypatch.setenv("NEXFORT_CACHE_BASE", str(tmp_path))
    assert base_root() == tmp_path
