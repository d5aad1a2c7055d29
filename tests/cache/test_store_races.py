# SPDX-License-Identifier: Apache-2.0
"""The store under several processes at once: nothing is lost, nothing half-read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from stores import ROOT, put

from nexfort_engine.cache.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


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
