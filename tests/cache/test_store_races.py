# SPDX-License-Identifier: Apache-2.0
"""The store under several processes at once: nothing is lost, nothing half-read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from large_rows import few
from stores import ROOT

from nexfort_engine.cache.store import Store

# Content follows from key and variant, so that half of one and half of another would show.
WORKER = """
import random, sys
from pathlib import Path
from nexfort_engine.cache.lock import LockTimeout
from nexfort_engine.cache.store import Store, StoreError

root, seed, locks = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if locks == "plain":
    sys.modules["filelock"] = None
store, dice, mine = Store(root), random.Random(seed), []
LIVE = (FileNotFoundError, LookupError)  # what another process may take away meanwhile


def text(primary, variant):
    return f"{primary} {variant} " * 500


def put(primary, variant):
    with store.stage() as staged:
        for name in ("a", "b"):
            (staged / "payload" / name).write_text(text(primary, variant))
        return store.commit(primary, staged, {"variant": variant})


def use(primary):
    for entry in store.candidates(primary):
        try:
            copy = store.ready(entry)
        except StoreError as error:
            assert not entry.path.exists() or "missing" in str(error) or "No such file" in str(error), error
            continue
        for name in ("a", "b"):
            assert (copy / name).read_text() == text(primary, entry.manifest["variant"])
        store.touch(entry)
        store.note_shape(entry, f"{dice.randrange(20)}x4x64x64")


def keep():
    primary, variant = f"{100 + seed:032x}", len(mine)
    while True:
        try:
            mine.append(store.pin(put(primary, variant).id).id)
            return
        except LookupError:  # evicted between the two
            continue


def pin():
    for entry in store.candidates(f"{dice.randrange(6):032x}")[:1]:
        store.pin(entry.id, dice.random() < 0.3)


def remove():
    store.remove([entry.id for entry in store.candidates(f"{dice.randrange(6):032x}")[:1]])


def set_aside():
    for entry in store.candidates(f"{dice.randrange(6):032x}")[:1]:
        store.set_aside(entry, "test")


WORK = {
    lambda: put(f"{dice.randrange(6):032x}", dice.randrange(3)): 60,
    lambda: use(f"{dice.choice([*range(6), 100, 101]):032x}"): 60,
    keep: 20,
    store.rows: 20,
    store.verify_all: 5,
    pin: 10,
    remove: 10,
    set_aside: 10,
    lambda: Store(root).prune(dice.choice([0, 50_000])): 5,
    lambda: Store(root).clear(): 2,
}
for turn, work in enumerate(dice.choices(list(WORK), list(WORK.values()), k=200)):
    try:
        work()
    except LIVE:
        continue
    have = {entry.id for entry in store.candidates(f"{100 + seed:032x}")}
    assert have == set(mine), (turn, set(mine) - have)
assert store.problem is None, store.problem
print(" ".join(mine))
"""


@pytest.mark.parametrize("locks", few(["filelock", "plain"], ["plain"]))
def test_two_processes_with_200_operations_each(tmp_path: Path, locks: str) -> None:
    if locks == "filelock":
        pytest.importorskip("filelock")
    root = tmp_path / "cache"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(root), seed, locks],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for seed in ("0", "1")
    ]
    kept: set[str] = set()
    for worker in workers:
        out, errors = worker.communicate(timeout=300)
        assert worker.returncode == 0, errors
        kept |= set(out.split())
    store = Store(root)
    entries = store.entries()
    assert len(kept) > 20 and kept <= {entry.id for entry in entries if entry.pinned}
    assert all(problem is None for _, problem in store.verify_all())
    assert {row["id"] for row in store.rows()} == {entry.id for entry in entries}
    assert all("SHA-256" not in reason.read_text() for reason in (root / "broken").glob("*.reason.txt"))
    assert not list((root / "staging").iterdir())


def test_a_process_that_dies_holding_the_lock_holds_up_nobody(tmp_path: Path) -> None:
    for locks in ("filelock", "plain"):
        root = tmp_path / locks
        code = (
            "import os, sys\n"
            "if sys.argv[2] == 'plain': sys.modules['filelock'] = None\n"
            "from nexfort_engine.cache.store import Store\n"
            "store = Store(sys.argv[1]); assert store.writable\n"
            "with store._ground.lock(): os._exit(9)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, str(root), locks], check=False, cwd=ROOT)
        assert done.returncode == 9
        assert Store(root).clear().entries == 0
