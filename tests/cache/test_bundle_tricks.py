# SPDX-License-Identifier: Apache-2.0
"""Bundles made by somebody who means no good: names, archive tricks, lies in the list."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle_parts import (
    FILES,
    Member,
    Range,
    edited,
    join,
    member,
    pax,
    payloads,
    resealed,
    split,
    with_files,
)

from nexfort_engine.cache import bundle
from nexfort_engine.cache.bundle import inspect
from nexfort_engine.cache.entry import entry_id


@pytest.fixture
def place(tmp_path: Path) -> Range:
    return Range(tmp_path)


def test_the_tests_own_archives_are_accepted_where_nothing_is_wrong(place: Range) -> None:
    assert join(split(place.sound)) == place.sound
    assert resealed(place.sound, lambda content: None) == place.sound
    assert with_files(place.sound, FILES) == place.sound
    assert place.refusal(place.sound) is None and payloads(place.store) == place.originals


# -- names in the list ---------------------------------------------------------------------------------------

BAD_NAMES = [
    *("../x", "../../../../../../tmp/x", "/etc/cron.d/x", "a/../../x", "a/..", "..", ".", "./a", "a/./b", "a//b"),
    *("a\\b", "..\\..\\x", "\\\\host\\share\\x", "c:x", "C:\\x", "c:/x", "a:stream", "//host/share/x", "a/", ""),
    *("~\n", "a\0b", "\0", "a\tb", "a\x1b[2J", "a\x7f"),
    *("artef\u0430ct.bin", "artefact\u2024bin", "a\u202ebin", "e\u0301", "\u00e9", "\u2215x"),
    *("\ud800", "con", "NUL.txt", "aux.py", "com1", "Lpt9.so", "a.", "a ", "d./a", "x" * 256, "d/" * 600 + "a"),
    *("__pycache__/a.pyc", "a.lock", "a.pyc"),
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=[ascii(name)[:30] for name in BAD_NAMES])
def test_no_name_leads_out_of_the_entry_or_to_another_file(place: Range, name: str) -> None:
    """The archive is consistent with its list: the name alone is wrong."""
    reason = place.refusal(with_files(place.sound, {name: b"evil", "other": b"1"}))
    assert reason is not None and ("as a file's name" in reason or "staged files are not those" in reason)
    if not name.endswith((".lock", ".pyc")):  # those are never part of an entry; the store itself says so
        with pytest.raises(ValueError, match="as a file's name"):
            inspect(place.file)
    place.nothing_happened()


@pytest.mark.parametrize(
    "names",
    [("A", "a"), ("d/x", "D/y"), ("d/x", "d/X"), ("d", "d/x"), ("d/x", "d/x/y"), ("D", "d/x")],
)
def test_names_that_would_meet_on_disk_are_refused(place: Range, names: tuple[str, ...]) -> None:
    reason = place.refusal(with_files(place.sound, dict.fromkeys(names, b"1")))
    assert reason is not None and ("differ in more than case" in reason or "as a file and as the directory" in reason)
    place.nothing_happened()


# -- lies in the list ----------------------------------------------------------------------------------------

EVIL_INFO = {"fingerprint": "ab" * 16, "machine": {}, "region": "\x1b]0;title\x07"}
FIRST_FILE = ("entries", 0, "files", "artefact.bin")
LIES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "id out of the store": (("entries", 0, "id"), "../../../../x"),
    "primary out of the store": (("entries", 0, "primary"), "../../x"),
    "id of something else": (("entries", 0, "id"), "0" * 24),
    "identity changed": (("entries", 0, "guards"), [1]),
    "schema of an entry": (("entries", 0, "schema"), 2),
    "no date": (("entries", 0, "created"), None),
    "date with an escape": (("entries", 0, "created"), "2026-11-21\x1b20:00:00"),
    "maker is a list": (("entries", 0, "made_by"), ["host"]),
    "maker is nested": (("entries", 0, "made_by"), {"host": ["a"]}),
    "maker with an escape": (("entries", 0, "made_by"), {"host": "\x1b[2J"}),
    "info is text": (("entries", 0, "info"), "text"),
    "no fingerprint": (("entries", 0, "info"), {"machine": {}}),
    "fingerprint is a list": (("entries", 0, "info", "fingerprint"), ["ab" * 16]),
    "machine is text": (("entries", 0, "info", "machine"), "NVIDIA"),
    "region with an escape": (("entries", 0, "info"), EVIL_INFO),
    "region from right to left": (("entries", 0, "info", "region"), "\u202eevil"),
    "region in half a character": (("entries", 0, "info", "region"), "\udc80"),
    "no files": (("entries", 0, "files"), {}),
    "files is a list": (("entries", 0, "files"), [["a", 1]]),
    "size below zero": (FIRST_FILE, [-4, "0" * 64]),
    "size that tar cannot say": (FIRST_FILE, [8 << 30, "0" * 64]),
    "size of many digits": (FIRST_FILE, [10**4000, "0" * 64]),
    "size is true": (FIRST_FILE, [True, "0" * 64]),
    "size is a fraction": (FIRST_FILE, [4.0, "0" * 64]),
    "size is text": (FIRST_FILE, ["4", "0" * 64]),
    "hash is short": (FIRST_FILE, [4, "0"]),
    "hash in capitals": (FIRST_FILE, [4, "A" * 64]),
    "entry is text": (("entries", 0), "entry"),
    "no entries": (("entries",), []),
    "entries is an object": (("entries",), {"a": 1}),
    "entries is a number": (("entries",), 5),
    "entries is nothing": (("entries",), None),
    "other machines on the cover": (("machines",), [{"device": "NVIDIA B200"}]),
    "no machines": (("machines",), []),
    "another schema": (("schema",), 2),
    "schema is true": (("schema",), True),
    "no date of the bundle": (("created",), None),
    "a number for the bundle's date": (("created",), 1.5),
    "escape in the bundle's date": (("created",), "2026-11-21\x1b20:00:00"),
    "maker of the bundle": (("made_by",), None),
    "escape in the maker": (("made_by",), {"host": "a\rb"}),
    "one key more": (("more",), 1),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_consistent_bundle_with_a_lie_in_its_list_is_refused(place: Range, lie: str) -> None:
    path, value = LIES[lie]

    def edit(content: Any) -> None:
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = value

    data = resealed(place.sound, edit)
    reason = place.refusal(data)
    assert reason is not None and ("bundle.json cannot be used" in reason), reason
    with pytest.raises(ValueError, match=r"bundle\.json cannot be used"):
        inspect(place.file)
    place.nothing_happened()


@pytest.mark.parametrize("primary", ["../../../x", "/tmp/x", "..", "", "C:x", "A" * 32, "0" * 65, 5, None, ["0" * 32]])
def test_a_primary_key_is_no_path(place: Range, primary: Any) -> None:
    def edit(content: Any) -> None:
        manifest = content["entries"][0]
        manifest["primary"] = primary
        manifest["id"] = entry_id(primary, manifest)  # as if the store had made it so

    (head, *members) = split(resealed(place.sound, edit))
    own = json.loads(head[1])["entries"][0]["id"]
    renamed = [[edited(header, 0, own.encode() + header[24:100]), text] for header, text in members]
    assert "expected hex digits" in str(place.refusal(join([head, *renamed])))
    place.nothing_happened()


def test_a_machine_is_described_by_facts(place: Range) -> None:
    def edit(content: Any) -> None:
        content["entries"][0]["info"]["machine"] = "NVIDIA"
        content["machines"] = ["NVIDIA"]

    assert "does not say readably what it is" in str(place.refusal(resealed(place.sound, edit)))
    place.nothing_happened()


def test_a_bundle_of_nothing_is_refused(place: Range) -> None:
    empty = resealed(place.sound, lambda content: content.update(entries=[], machines=[]), [])
    assert "it lists no entries" in str(place.refusal(empty))
    place.nothing_happened()


def test_an_entry_listed_twice_is_refused(place: Range) -> None:
    members = split(place.sound)[1:]
    twice = resealed(place.sound, lambda content: content["entries"].append(content["entries"][0]), members * 2)
    assert "one is there twice" in str(place.refusal(twice))
    place.nothing_happened()


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"\n", b"null", b"[]", b'"text"', b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{\0}\0", b"1e999"),
        *(b"NaN", b'{"schema": 1}', b'{"schema": ' + b"9" * 5000 + b"}", b'{"schema": 1, "schema": 1}'),
    ],
    ids=lambda text: ascii(text[:20]),
)  # fmt: skip
def test_other_text_in_the_place_of_the_list_is_refused(place: Range, text: bytes) -> None:
    assert place.refusal(join([member(b"bundle.json", text), *split(place.sound)[1:]])) is not None
    place.nothing_happened()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b'"entries": [', b'"entries": [ ', 1),  # not the one form
        lambda text: text.replace(b'"schema": 1, "entries"', b'"schema": 1, "schema": 1, "entries"', 1),  # a key twice
        lambda text: text.rstrip(b"\n"),
        lambda text: text + b"\n",
        lambda text: text.replace(b"blocks.0", b"blocks.1", 1),  # an honest text, but not the one that was sealed
        lambda text: text.replace(b'"digest": "', b'"digest": "0', 1),
        lambda text: text.replace(b"blocks.0", b"\\u0062locks.0", 1),  # the same in other letters
    ],
)
def test_every_byte_of_the_list_counts(place: Range, change: Callable[[bytes], bytes]) -> None:
    (_, text), *members = split(place.sound)
    assert change(text) != text and json.loads(change(text))
    assert "it was altered" in str(place.refusal(join([member(b"bundle.json", change(text)), *members])))
    place.nothing_happened()


# -- members -------------------------------------------------------------------------------------------------


def as_kind(kind: bytes, link: bytes = b"") -> Callable[[list[Member]], None]:
    def change(members: list[Member]) -> None:
        members[2][0] = edited(edited(members[2][0], 156, kind), 157, link, 100)

    return change


def field(offset: int, content: bytes, width: int | None = None) -> Callable[[list[Member]], None]:
    def change(members: list[Member]) -> None:
        members[2][0] = edited(members[2][0], offset, content, width)

    return change


def inserted(at: int, *new: Member) -> Callable[[list[Member]], None]:
    def change(members: list[Member]) -> None:
        members[at:at] = [list(one) for one in new]

    return change


def renamed(make: Callable[[bytes], bytes]) -> Callable[[list[Member]], None]:
    def change(members: list[Member]) -> None:
        members[2][0] = edited(members[2][0], 0, make(members[2][0][:100].rstrip(b"\0")), 100)

    return change


def swapped(one: int, other: int) -> Callable[[list[Member]], None]:
    def change(members: list[Member]) -> None:
        members[one], members[other] = members[other], members[one]

    return change


def replaced(one: int, other: int) -> Callable[[list[Member]], None]:
    def change(members: list[Member]) -> None:
        members[one] = members[other]

    return change


def dropped(one: int) -> Callable[[list[Member]], None]:
    def change(members: list[Member]) -> None:
        del members[one]

    return change


def balanced(*changes: tuple[int, int]) -> Callable[[list[Member]], None]:
    """Bytes of the header raised by these amounts, which add up to nothing: the old checksum stays right."""

    def change(members: list[Member]) -> None:
        header = bytearray(members[2][0])
        for offset, amount in changes:
            header[offset] += amount
        members[2][0] = bytes(header)

    return change


def spelled(make: Callable[[bytes], bytes]) -> Callable[[list[Member]], None]:
    def change(members: list[Member]) -> None:
        header = members[2][0]
        members[2][0] = header[:148] + make(header[148:156]) + header[156:]

    return change


LONG = b"../" * 50 + b"etc/evil\0"
TRICKS: dict[str, Callable[[list[Member]], None]] = {
    "symlink": as_kind(b"2", b"/etc/passwd"),
    "symlink upwards": as_kind(b"2", b"../../../x"),
    "hard link": as_kind(b"1", b"/etc/passwd"),
    "hard link to a member": as_kind(b"1", b"bundle.json"),
    "file with a link's target": as_kind(b"0", b"/etc/passwd"),
    "character device": as_kind(b"3"),
    "block device": as_kind(b"4"),
    "directory": as_kind(b"5"),
    "pipe": as_kind(b"6"),
    "contiguous": as_kind(b"7"),
    "oldest kind": as_kind(b"\0"),
    "sparse": as_kind(b"S"),
    "GNU directory": as_kind(b"D"),
    "volume label": as_kind(b"V"),
    "continued": as_kind(b"M"),
    "unknown kind": as_kind(b"Z"),
    "long name in its place": as_kind(b"L"),
    "pax in its place": as_kind(b"x"),
    "upwards": renamed(lambda name: b"../" + name),
    "absolute": renamed(lambda name: b"/" + name),
    "backslashes": renamed(lambda name: name.replace(b"/", b"\\")),
    "drive": renamed(lambda name: b"C:" + name),
    "NUL and more": renamed(lambda name: name + b"\0/../../evil"),
    "slash at the end": renamed(lambda name: name + b"/"),
    "dot before": renamed(lambda name: b"./" + name),
    "two slashes": renamed(lambda name: name.replace(b"/", b"//")),
    "capitals": renamed(lambda name: name.upper()),
    "look-alike": renamed(lambda name: name.replace(b"a", "\u0430".encode())),
    "decomposed": renamed(lambda name: name.replace(b"e", "e\u0301".encode())),
    "not UTF-8": renamed(lambda name: name.replace(b"a", b"\xff")),
    "name without end": renamed(lambda name: name.ljust(100, b"x")),
    "no name": renamed(lambda name: b""),
    "a prefix": field(345, b"../../..", 155),
    "an own prefix": field(345, b"x" * 155),
    "bundle.json again by name": renamed(lambda name: b"bundle.json"),
    "mode": field(100, b"0004755\0"),
    "owner": field(108, b"0001750\0"),
    "time": field(136, b"77777777777\0"),
    "owner's name": field(265, b"root", 32),
    "device numbers": field(329, b"0000001\0"),
    "GNU magic": field(257, b"ustar  \0"),
    "no magic": field(257, bytes(8)),
    "something after the header": field(500, b"evil"),
    "size below zero": field(124, b"\xff" * 12),
    "size in base 256": field(124, b"\x80" + bytes(10) + b"\x04"),
    "huge size in base 256": field(124, b"\x80" + b"\x7f" * 11),
    "largest octal size": field(124, b"77777777777\0"),
    "size 0": field(124, b"00000000000\0"),
    "one byte less": field(124, b"00000000003\0"),
    "one byte more": field(124, b"00000000005\0"),
    "size with spaces": field(124, b"          4\0"),
    "size with a sign": field(124, b"-0000000004\0"),
    "size without end": field(124, b"000000000004"),
    "size is no number": field(124, b"artefact.bin"),
    "no size": field(124, bytes(12)),
    "pax path": inserted(2, pax(path="../../evil")),
    "pax absolute path": inserted(2, pax(path="/tmp/evil")),
    "pax size": inserted(2, pax(size="1000000000")),
    "pax negative size": inserted(2, pax(size="-512")),
    "pax link": inserted(2, pax(linkpath="/etc/passwd")),
    "pax sparse": inserted(2, pax(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "evil"})),
    "pax sparse 0.1": inserted(2, pax(**{"GNU.sparse.map": "0,4", "GNU.sparse.size": "1000000000"})),
    "pax charset": inserted(2, pax(hdrcharset="BINARY", path="evil")),
    "pax with the right path": inserted(2, pax(path="artefact.bin")),
    "global pax path": inserted(1, pax(b"g", path="evil")),
    "global pax first": inserted(0, pax(b"g", path="bundle.json")),
    "pax first": inserted(0, pax(path="bundle.json")),
    "Solaris pax": inserted(2, pax(b"X", path="evil")),
    "GNU long name": inserted(2, member(b"././@LongLink", LONG, b"L")),
    "GNU long link": inserted(2, member(b"././@LongLink", LONG, b"K")),
    "GNU long name first": inserted(0, member(b"././@LongLink", b"bundle.json\0", b"L")),
    "GNU long name without end": inserted(2, member(b"././@LongLink", b"x" * 600, b"L")),
    "two lists": inserted(1, member(b"bundle.json", b"{}")),
    "list at the end": inserted(9, member(b"bundle.json", b"{}")),
    "list not first": swapped(0, 1),
    "something before the list": inserted(0, member(b"evil", b"evil")),
    "no list": dropped(0),
    "extra at the end": inserted(9, member(b"evil", b"evil")),
    "extra in between": inserted(2, member(b"../evil", b"evil")),
    "extra symlink": inserted(2, member(b"ab", b"", b"2")),
    "extra directory": inserted(1, member(b"ab/", b"", b"5")),
    "reordered": swapped(1, 2),
    "reordered with the empty one": swapped(2, 3),
    "missing": dropped(2),
    "missing at the end": dropped(3),
    "twice": inserted(2, member(b"", b"")),
    "one twice for another": replaced(2, 1),
    "other bytes": lambda members: members[2].__setitem__(1, b"evil"),
    "fewer bytes than its block": lambda members: members[1].__setitem__(1, members[1][1][:-100]),
    "an end marker in between": inserted(2, [bytes(512), b""], [bytes(512), b""]),
    "one zero block in between": inserted(2, [bytes(512), b""]),
    "symlink with the old checksum": balanced((156, 2), (329, -2)),
    "another owner with the old checksum": balanced((113, 1), (114, -1)),
    "something after the header and a wrong checksum": balanced((500, 65), (511, 66)),
    "a wrong checksum": spelled(lambda checksum: b"000000\0 "),
    "a checksum in other words": spelled(lambda checksum: checksum[:6].replace(b"0", b" ", 1) + b" \0"),
    "a header of noise": lambda members: members[2].__setitem__(0, bytes(range(256)) * 2),
}  # fmt: skip


@pytest.mark.parametrize(
    "measured", [True, pytest.param(False, marks=pytest.mark.large)], ids=["", "whatever-its-length"]
)
@pytest.mark.parametrize("trick", TRICKS)
def test_a_member_is_what_the_list_says_or_nothing(place: Range, monkeypatch: Any, trick: str, measured: bool) -> None:
    """Each trick also without the check of the file's length, which would find most of those that add something."""
    members = split(place.sound)
    TRICKS[trick](members)
    data = join(members)
    assert data != place.sound
    if not measured:
        monkeypatch.setattr(bundle, "_check_length", lambda *_: None)
    assert place.refusal(data) is not None
    if measured or not trick.endswith("at the end"):
        place.nothing_happened()
    assert payloads(place.store) in ({}, place.originals) and place.around() == place.outside


@pytest.mark.parametrize(
    "offset, content", [(100, b"0004755"), (156, b"\0"), (257, bytes(8)), (345, b".."), (500, b"x")]
)
def test_the_list_has_the_one_header_too(place: Range, offset: int, content: bytes) -> None:
    members = split(place.sound)
    members[0][0] = edited(members[0][0], offset, content)
    assert place.refusal(join(members)) is not None
    place.nothing_happened()


@pytest.mark.parametrize("measured", [True, False], ids=["", "whatever-its-length"])
@pytest.mark.parametrize("more", [b"\0", b"x", bytes(512), bytes(8192), b"evil" * 128, "a member"])
def test_nothing_comes_after_the_end(place: Range, monkeypatch: Any, more: bytes | str, measured: bool) -> None:
    if not measured:
        monkeypatch.setattr(bundle, "_check_length", lambda *_: None)
    tail = join([member(b"../evil", b"evil")]) if isinstance(more, str) else more
    assert place.refusal(place.sound + tail) is not None
    assert payloads(place.store) == ({} if measured else place.originals) and place.around() == place.outside


@pytest.mark.parametrize("at", [1, 2])
def test_padding_carries_nothing(place: Range, at: int) -> None:
    members = split(place.sound)
    end = sum(512 + len(text) + -len(text) % 512 for _, text in members[: at + 1])
    assert place.sound[end - 1] == 0
    reason = place.refusal(place.sound[: end - 1] + b"x" + place.sound[end:])
    assert reason is not None and "expected zeros" in reason
    place.nothing_happened()


def test_pythons_tarfile_reads_what_bundles_refuse(place: Range) -> None:
    """So bundles are read by a reader of their own."""
    members = split(place.sound)
    end = sum(512 + len(text) + -len(text) % 512 for _, text in members[:2])
    inserted(2, pax(path="another"))(members)
    for data in (place.sound + b"evil" * 128, place.sound[: end - 1] + b"x" + place.sound[end:], join(members)):
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            assert len(archive.getnames()) == len(split(place.sound))
            archive.extractall(place.folder.parent / f"{place.folder.name}-read", filter="data")
        assert place.refusal(data) is not None
