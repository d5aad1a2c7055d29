# SPDX-License-Identifier: Apache-2.0
"""Bundles damaged at random, and lists changed at random and sealed again: nothing altered is ever taken in."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundle_parts import FILES, Member, Range, edited, join, member, payloads, resealed, split
from large_rows import few

from nexfort_engine.cache import bundle


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: Any) -> Iterator[Range]:
    """The same in memory where the system offers it: thousands of attempts are about bytes, not about the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory)) if os.access(memory, os.W_OK) else tmp_path
    yield Range(folder)
    if folder != tmp_path:
        shutil.rmtree(folder)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One to three changes of any kind, most of them at places where they might be believed."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        kind = chance.randrange(9)
        at = chance.randrange(len(found) + 1 if kind == 3 else max(len(found), 1))
        count = chance.choice((1, 2, 7, 512, 512, 1024, 1536))
        if not found:
            break
        if kind == 0:
            found[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            found[at] = chance.choice(b"\0\xff\x80 /.\\:'\"0179-xLKSg{}[]")
        elif kind == 2:
            del found[at : at + count]
        elif kind == 3:
            found[at:at] = chance.choice((bytes(count), chance.randbytes(count), b"../" * count, found[:count]))
        elif kind == 4:
            at -= at % 512
            found[at:at] = found[at : at + count]
        elif kind == 5:
            at, other = at - at % 512, chance.randrange(len(found)) // 512 * 512
            one, two = found[at : at + 512], found[other : other + 512]
            found[at : at + 512], found[other : other + 512] = two, one
        elif kind == 6:
            found[at : at + count] = bytes(count)
        elif kind == 7:
            del found[at:]
        else:
            forge(found, chance)
    return bytes(found)


def forge(data: bytearray, chance: random.Random) -> None:
    """Edits a field of a header and makes its checksum good."""
    starts = [at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b"ustar"]
    if not starts:
        return
    at = chance.choice(starts)
    offset, width = chance.choice(
        ((0, 100), (100, 8), (108, 8), (124, 12), (136, 12), (156, 1), (157, 100), (345, 155))
    )
    words = [
        b"../x",
        b"/etc/x",
        b"\0",
        b"77777777777\0",
        b"-1",
        b"\x80" + b"\xff" * 11,
        b"12345xgLKSD7",
        b"bundle.json",
    ]
    text = chance.choice([*words, chance.randbytes(3), b"%011o\0" % chance.randrange(4096)])
    start = chance.randrange(len(text))
    text = text[start : start + width] if width == 1 else text[:width]
    data[at : at + 512] = edited(bytes(data[at : at + 512]), offset, text, chance.choice((None, width)))


@pytest.mark.parametrize(
    "attempts, measured",
    few({"": (3_000, True), "many": (20_000, True), "whatever-its-length": (3_000, False)}, ("",)),
)
def test_no_damage_is_ever_believed(quick: Range, monkeypatch: Any, attempts: int, measured: bool) -> None:
    """Each mutation is refused with a sentence and leaves no trace, but for what came before damage at the very end."""
    if not measured:
        monkeypatch.setattr(bundle, "_check_length", lambda *_: None)
    chance = random.Random(20261121)
    tried = 0
    while tried < attempts:
        data = mutated(quick.sound, chance)
        if data == quick.sound:
            continue
        tried += 1
        assert quick.refusal(data) is not None, "an altered bundle was imported"
        if os.listdir(quick.store.root / "entries"):
            assert data.startswith(quick.sound[:-1024]) and payloads(quick.store) == quick.originals
            quick.forget()
        if tried % 1000 == 0:
            quick.nothing_happened()
    quick.nothing_happened()
    assert quick.refusal(quick.sound) is None, "the sound one still comes"
    assert payloads(quick.store) == quick.originals


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**63, 1e308, float("inf"), float("nan"), "", "0", "../../x", "/etc/x", "a\\b"),
    *("C:x", "\0", "\x1b[2J", "\ud800", "ab" * 16, "0" * 64, [], {}, [[]], [4, "0" * 64], {"a": [1, "0" * 64]}),
]  # fmt: skip


def lied(whole: Any, chance: random.Random) -> Any:
    """A tree of JSON after one change somewhere in it."""
    content = whole
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = chance.choice(keys) if keys else None
        inner = content[key] if keys else None
        if isinstance(inner, (dict, list)) and inner and chance.random() < 0.8:
            content = inner
            continue
        break
    value = json.loads(json.dumps(chance.choice([*ODD, inner])))
    if isinstance(content, list):
        chance.choice((lambda: content.insert(0, value), lambda: content.__setitem__(slice(0, 1), [value])))()
    elif key is None or chance.random() < 0.2:
        content[chance.choice(("new", "../x", "", "A", "ab", "schema", "files"))] = value
    elif chance.random() < 0.2:
        content[chance.choice(("../evil", "/evil", "AB/kernel.py", "ab", "e.pyc", "\u0430", "x/y"))] = content.pop(key)
    elif chance.random() < 0.2:
        del content[key]
    else:
        content[key] = value
    return whole


def matching(content: Any) -> list[Member]:
    """The members that a list asks for, with the bytes of the listed hash if they are known."""
    known = {hashlib.sha256(text).hexdigest(): text for text in FILES.values()}
    found = []
    for manifest in content["entries"]:
        for name, (size, digest) in sorted(manifest["files"].items()):
            text = known.get(digest, b"evil" * 8)[: int(size)]
            found.append(member(f"{manifest['id']}/{name}".encode("utf-8", "surrogatepass"), text))
    return found


def test_no_lie_gets_other_bytes_in_or_anything_out(quick: Range) -> None:
    """2,000 lists that were changed and sealed again: what is adopted is sound and lies where it belongs."""
    chance = random.Random(20261122)
    taken = 0
    for _ in range(2_000):
        held: list[Any] = []
        data = resealed(quick.sound, lambda content, held=held: held.append(lied(content, chance)))  # type: ignore[misc]
        try:
            rest = matching(held[0]) if chance.random() < 0.8 else split(quick.sound)[1:]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # the lie is in the shape of the list
            rest = split(quick.sound)[1:]
        if quick.refusal(join([split(data)[0], *rest])) is None:
            taken += 1
            (entry,) = quick.store.entries()
            assert entry.verify() is None and entry.id == quick.id
            assert set(payloads(quick.store)[entry.id].values()) <= set(FILES.values())
            quick.forget()
        assert os.listdir(quick.store.root / "entries") == []
    assert quick.around() == quick.outside
    assert 20 < taken < 1_000, "some lists differ only in what their maker says of himself; they are no damage"
