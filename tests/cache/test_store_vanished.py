# SPDX-License-Identifier: Apache-2.0
"""Directories of a store that somebody takes away while processes use it: they are made again, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import bundle_parts
import pytest
from stores import KEY, put

from nexfort_engine.cache import bundle, fs, owner, sidecar
from nexfort_engine.cache.root_dir import Ground
from nexfort_engine.cache.store import Store, StoreError

FOLDERS = [".", "entries", f"entries/{KEY}", "staging", "broken"]


def keeps(store: Store) -> None:
    """What is made is stored, and for this user's eyes alone."""
    made = put(store, variant=store.problem or "new")
    assert made.persistent and store.problem is None and made.verify() is None
    assert made.id in [entry.id for entry in Store(store.root).candidates(KEY)], "other processes find it"
    folders = [store.root / name for name in ("entries", "staging")]
    assert os.name != "posix" or all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_directory_that_was_taken_away_is_made_again(store: Store, folder: str) -> None:
    put(store)
    shutil.rmtree(store.root / folder, ignore_errors=True)
    keeps(store)


@pytest.mark.parametrize("folder", ["entries", f"entries/{KEY}", "broken"])
def test_one_that_is_taken_away_while_an_artefact_is_made(store: Store, folder: str) -> None:
    put(store)
    with store.stage() as staged:
        (staged / "payload" / "a").write_bytes(b"1")
        shutil.rmtree(store.root / folder)
        assert store.commit(KEY, staged, {}).persistent and store.problem is None
    keeps(store)


def taken_away_at(store: Store, before: str, number: int) -> bool:
    """Store something while all is taken away before the n-th call of a function of `os`; whether there was one."""
    seen, real = 0, getattr(os, before)

    def take_away(*args: object, **more: object) -> object:
        nonlocal seen
        seen += 1
        if seen == number:
            shutil.rmtree(store.root, ignore_errors=True)
        return real(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, before, take_away)
        with contextlib.suppress(StoreError, FileNotFoundError):  # what was being made went with the rest
            put(store, variant=number)
    return seen >= number


@pytest.mark.parametrize("before", ["mkdir", "rename", "replace", "open"])
def test_one_that_is_taken_away_before_it_is_used(store: Store, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """Whoever stores is told, or it is stored; and what comes after it is."""
    monkeypatch.setattr(Ground, "begin", lambda _: None)  # nothing beside this thread
    put(store)
    number = 1
    while taken_away_at(store, before, number):
        keeps(store)
        number += 1
    assert number > 1, "there is one"


def test_what_is_staged_and_gone_is_told(store: Store) -> None:
    with store.stage() as staged, pytest.raises(StoreError, match="took"):
        shutil.rmtree(store.root)
        store.commit(KEY, staged, {})
    keeps(store)


def _remember(folder: Path) -> None:
    sidecar.remember(folder, "fact.json", [1])
    assert sidecar.recall(folder, "fact.json") == [1]


def _export(folder: Path) -> None:
    store = Store(folder)
    bundle_parts.put(store)
    assert bundle.export(store, folder / "all.nexfort").entries == 1


@pytest.mark.skipif(os.name != "posix", reason="processes are known by locks")
@pytest.mark.parametrize("write", [lambda folder: keeps(Store(folder)), _remember, _export])
def test_a_file_is_never_taken_from_who_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    """Somebody sweeps between the making of each file and its lock."""
    real, swept = fs.open_new, []

    def open_new(path: Path) -> int:
        handle = real(path)
        if owner.is_name_of_own(path.name, "new-") or owner.is_name_of_own(path.name, ".nexfort-"):
            if len(swept) % 4 < 3:
                owner.remove_left(path)
                assert not path.exists()
            swept.append(path)
        return handle

    monkeypatch.setattr(owner, "open_new", open_new)
    (tmp_path / "cache").mkdir(mode=0o700)
    write(tmp_path / "cache")
    assert len(swept) >= 4 and not [path for path in swept if path.exists()]
