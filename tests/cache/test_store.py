# SPDX-License-Identifier: Apache-2.0
"""The store against faults: whatever lies on the disk, it gives whole entries or none and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nexfort_engine.cache import index, place
from nexfort_engine.cache import store as store_module
from nexfort_engine.cache.key import primary_key
from nexfort_engine.cache.store import Entry, Store, StoreError

KEY = primary_key({"test": 1})
OTHER = primary_key({"test": 2})
ROOT = Path(store_module.__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def put(store: Store, primary: str = KEY, content: bytes = b"code", **manifest: Any) -> Entry:
    with store.stage() as staged:
        (staged / "payload" / "ab").mkdir()
        (staged / "payload" / "ab" / "kernel.py").write_bytes(content)
        (staged / "payload" / "artefact.bin").write_bytes(content * 2)
        return store.commit(primary, staged, manifest)


def use_at(store: Store, entry: Entry, seconds: float) -> None:
    store.touch(entry)
    os.utime(entry.path / "last_used", (seconds, seconds))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    late._probed = time.monotonic() - store_module.RETRY_AFTER - 1
    assert late.writable and late.problem is None and put(late, variant=3).persistent, "it is tried again later"


def test_no_place_at_all_is_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")

    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module.tempfile, "mkdtemp", full)
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


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners are checked on POSIX only")
def test_another_users_cache_is_not_touched(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store)
    os.chown(store.root, 12345, -1) if os.geteuid() == 0 else pytest.skip("needs root to give a directory away")
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    reader = Store(store.root)
    assert reader.candidates(KEY) == [] and reader.rows() == [] and reader.entries() == []
    assert not reader.writable and "belongs to user 12345" in str(reader.problem)


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


# -- several processes ---------------------------------------------------------------------------------------

WORKER = """
import random, sys
from nexfort_engine.cache.store import Store
store, seed = Store(sys.argv[1]), int(sys.argv[2])
dice = random.Random(seed)
for turn in range(60):
    primary = f"{dice.randrange(6):032x}"
    found = [entry for entry in store.candidates(primary) if entry.verify() is None]
    for entry in found:
        store.touch(entry)
        assert (entry.payload / "code").read_text() in ("0", "1")
    if not found or dice.random() < 0.3:
        with store.stage() as staged:
            (staged / "payload" / "code").write_text(str(seed))
            store.commit(primary, staged, {"variant": dice.randrange(3)})
    if found and dice.random() < 0.1:
        store.set_aside(found[0], "test")
    if dice.random() < 0.05:
        Store(store.root).prune(5)
    store.rows()
"""


def test_two_processes_with_one_cache(store: Store) -> None:
    command = [sys.executable, "-c", WORKER, str(store.root)]
    workers = [subprocess.Popen([*command, seed], stderr=subprocess.PIPE, text=True, cwd=ROOT) for seed in ("0", "1")]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    entries = store.entries()
    assert entries and all(entry.verify() is None for entry in entries)
    assert {row["id"] for row in store.rows()} == {entry.id for entry in entries}
    assert not list((store.root / "staging").iterdir())


def test_a_process_that_dies_while_staging_leaves_a_sound_store(store: Store) -> None:
    entry = put(store)
    code = (
        "import os, sys; from nexfort_engine.cache import store as s\n"
        "store = s.Store(sys.argv[1])\n"
        "s.move_directory = lambda *_: os._exit(9)\n"
        "with store.stage() as staged:\n"
        "    (staged / 'payload' / 'a').write_text('1'); store.commit('0' * 32, staged, {})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store.root)], check=False, cwd=ROOT)
    assert done.returncode == 9
    assert store.entries() == [entry] and store.candidates("0" * 32) == []
    assert put(store, "0" * 32).verify() is None


# -- against a model -----------------------------------------------------------------------------------------


class StoreMachine(RuleBasedStateMachine):
    """Any order of operations against a dictionary: the store lists what was put there and not removed."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(store_module.tempfile.mkdtemp(prefix="nexfort-test-"))
        self.model: dict[tuple[str, int], str] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(primary=st.sampled_from([KEY, OTHER]), variant=st.integers(0, 2))
    def commit(self, primary: str, variant: int) -> None:
        entry = put(Store(self.root), primary, variant=variant)
        assert self.model.setdefault((primary, variant), entry.id) == entry.id

    @rule(primary=st.sampled_from([KEY, OTHER]), fault=st.sampled_from(["manifest.json", "payload"]))
    def damage(self, primary: str, fault: str) -> None:
        for entry in Store(self.root).candidates(primary)[:1]:
            path = entry.path / fault
            path.unlink() if path.is_file() else shutil.rmtree(path)
            del self.model[primary, entry.manifest["variant"]]

    @rule(primary=st.sampled_from([KEY, OTHER]))
    def set_aside(self, primary: str) -> None:
        store = Store(self.root)
        for entry in store.candidates(primary)[-1:]:
            store.set_aside(entry, "test")
            del self.model[primary, entry.manifest["variant"]]

    @rule(keep=st.integers(0, 4))
    def prune(self, keep: int) -> None:
        store = Store(self.root)
        store.prune(keep * 12)
        left = {(entry.primary, entry.manifest["variant"]) for entry in store.entries()}
        assert left <= self.model.keys() and len(left) == min(keep, len(self.model))
        self.model = {name: self.model[name] for name in left}

    @rule()
    def clear(self) -> None:
        Store(self.root).clear()
        self.model = {}

    @rule(content=st.binary(max_size=50))
    def scribble_on_the_index(self, content: bytes) -> None:
        if self.root.exists():
            (self.root / index.NAME).write_bytes(content)

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        store = Store(self.root)
        entries = store.entries()
        assert {(one.primary, one.manifest["variant"]): one.id for one in entries} == self.model
        assert all(entry.verify() is None for entry in entries)
        assert {row["id"] for row in store.rows()} == set(self.model.values())


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


@pytest.fixture(scope="module")
def one_entry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Entry, bytes]]:
    store = Store(tmp_path_factory.mktemp("store") / "cache")
    entry = put(store, guards={"dims": [1, 2]})
    yield store, entry, (entry.path / "manifest.json").read_bytes()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_mutation_of_a_manifest_raises_or_loads_altered_bytes(
    data: st.DataObject, one_entry: tuple[Store, Entry, bytes]
) -> None:
    store, entry, text = one_entry
    at = data.draw(st.integers(0, len(text)))
    mutated = text[:at] + data.draw(st.binary(max_size=4)) + text[at + data.draw(st.integers(0, 4)) :]
    if not entry.path.exists():
        put(store, guards={"dims": [1, 2]})
    (entry.path / "manifest.json").write_bytes(mutated)
    for found in store.candidates(KEY):
        if found.verify() is None:
            assert found.manifest["files"] == entry.manifest["files"]
            assert found.manifest["guards"] == entry.manifest["guards"]
