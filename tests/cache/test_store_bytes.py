# SPDX-License-Identifier: Apache-2.0
"""Altered bytes in any file of the store: it never raises and never gives anything but what was stored."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from large_rows import few
from stores import KEY, loaded, put, quick_folder, snapshot

from nexfort_engine.cache.store import Entry, Store, StoreError

FEW, MUTATIONS = 400, 21_000  # in all, by `make test` and by `make test-large`; the shares of the files add up to 1
SHARES = {"index.json": 0.3, "manifest.json": 0.35, "payload": 0.2, "last_used": 0.1, "pinned": 0.05}
TOKENS = [
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"1e999", b"NaN", b"1" * 5000, b"[" * 2000),
    *(b'"\\ud800"', b"\\u0000", b"\0", b"\xff\xfe", b"../", b"..\\", b"/etc/passwd", b'"files": {}', b'"schema": 2'),
    *(b"\n", b"\r\n", b"0" * 24, b'{"a": 1}', b"\xf0\x9f\x98\x80"),
]


def mutated(content: bytes, dice: random.Random) -> bytes:
    """One small or rude change, sometimes several."""
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        at, length = dice.randint(0, len(content)), dice.choice((1, 1, 2, 8, 60))
        kind = dice.randrange(8)
        middle = content[at : at + length]
        if kind == 0 and middle:
            middle = bytes([middle[0] ^ (1 << dice.randrange(8))]) + middle[1:]
        elif kind == 1:
            middle = dice.randbytes(len(middle))
        elif kind == 2:
            middle = b""
        elif kind == 3:
            middle = dice.choice(TOKENS) + middle
        elif kind == 4:
            middle = dice.choice(TOKENS)
        elif kind == 5:
            middle = middle * 2
        elif kind == 6:
            other = dice.randint(0, len(content))
            middle = content[other : other + length]
        elif dice.random() < 0.2:
            return content[:at]
        content = content[:at] + middle + content[at + length :]
    return content


@pytest.fixture(scope="module")
def whole() -> Iterator[tuple[Path, Entry]]:
    """A store of one entry with all that may lie beside it."""
    folder = quick_folder()
    store = Store(folder / "cache")
    entry = put(store, guards={"dims": [1, 2]}, info={"region": "blocks.0"})
    store.note_shape(entry, "1x4x64x64")
    store.pin(entry.id)
    (entry.path / "pinned").write_bytes(b"anything")
    logging.disable(logging.CRITICAL)  # each of them is told, which is another test's subject
    yield folder / "cache", entry
    logging.disable(logging.NOTSET)
    shutil.rmtree(folder)


@pytest.mark.parametrize("mutations", [FEW, pytest.param(MUTATIONS, marks=pytest.mark.large)])
@pytest.mark.parametrize("name", few(list(SHARES), ("payload", "last_used", "pinned")))
def test_no_mutation_raises_or_loads_altered_bytes(whole: tuple[Path, Entry], name: str, mutations: int) -> None:
    root, entry = whole
    dice = random.Random(f"nexfort {name}")
    stored = snapshot(entry.payload)
    kernel = entry.payload / "ab" / "kernel.py"
    file = {"index.json": root / name, "payload": kernel}.get(name, entry.path / name)
    content, listed = file.read_bytes(), (root / "index.json").read_bytes()
    loads = 0
    for number in range(int(mutations * SHARES[name])):
        altered = mutated(content, dice)
        file.write_bytes(altered)
        without_index = name == "manifest.json" and number % 4 == 0
        if without_index:
            (root / "index.json").unlink(missing_ok=True)
        given = whatever_is_loaded(Store(root), copied=number % 4 == 0)
        if given is None:
            assert name in ("manifest.json", "payload"), "damage beside an entry is never held against it"
            assert altered != content
        else:
            loads += 1
            assert given == stored or (without_index and given.items() <= stored.items())
            assert altered == content or name != "payload"
            assert altered == content or name != "manifest.json" or without_index
        if number % 16 == 0:
            told(Store(root))
        restore(root, entry, file, content, listed)
    assert loads > 0 or name in ("manifest.json", "payload")
    assert whatever_is_loaded(Store(root)) == stored


def whatever_is_loaded(store: Store, copied: bool = True) -> dict[str, bytes] | None:
    """What an engine would get: the files of the first candidate that passes, with what does not set aside."""
    for entry in store.candidates(KEY):
        problem = entry.verify(quick=copied)
        if problem is None:
            try:
                return (
                    loaded(store, entry)
                    if copied
                    else {name: (entry.payload / name).read_bytes() for name in entry.manifest["files"]}
                )
            except StoreError as error:
                problem = str(error)
            finally:
                shutil.rmtree(store._copies._folder or "", ignore_errors=True)
        store.set_aside(entry, problem)
    return None


def told(store: Store) -> None:
    """All that only looks."""
    for row in store.rows():
        assert isinstance(row["shapes"], list) and len(row["shapes"]) <= 16
    for entry, _ in store.verify_all():
        assert isinstance(entry.size, int) and isinstance(entry.info, dict) and isinstance(entry.shapes, list)
        assert store.find(entry.id).id == entry.id


def restore(root: Path, entry: Entry, file: Path, content: bytes, listed: bytes) -> None:
    """Puts back what was set aside and altered."""
    if not entry.path.exists():
        (aside,) = [path for path in (root / "broken").iterdir() if path.is_dir()]
        entry.path.parent.mkdir(mode=0o700, exist_ok=True)
        os.rename(aside, entry.path)
        for reason in (root / "broken").iterdir():
            reason.unlink()
    file.write_bytes(content)
    if not (root / "index.json").exists() or file.name == "manifest.json":
        (root / "index.json").write_bytes(listed)
        (root / "index.json").chmod(0o600)
