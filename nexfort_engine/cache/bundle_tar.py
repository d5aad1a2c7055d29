# SPDX-License-Identifier: Apache-2.0
"""The one dialect of tar that bundles are written in: plain files, one fixed header for a name and a size.

A reader that knows which files must come, compares each header with the only one `header` would write for it
instead of believing what it says. Links, devices, sparse files, records that override a path, odd sizes and
padding with something in it all fall away with that one comparison. Any tar program reads these archives; an
archive that another program wrote is refused. It knows neither bundles nor entries.
"""

from __future__ import annotations

import tarfile
from typing import BinaryIO

BLOCK = 512
END = bytes(2 * BLOCK)
SIZE_LIMIT = 8 << 30  # bytes: the first size that eleven octal digits cannot say
_NAME_LIMIT = 100  # bytes of a name that fits a plain header; a longer one comes as a pax record before it
_TIME = 315532800  # 1980-01-01: equal content gives equal bytes, and no tar program finds it implausible
_READ = 1 << 20
_KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file of the oldest kind",
    tarfile.LNKTYPE: "hard link",
    tarfile.SYMTYPE: "symbolic link",
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.DIRTYPE: "directory",
    tarfile.FIFOTYPE: "pipe",
    tarfile.CONTTYPE: "contiguous file",
    tarfile.GNUTYPE_LONGNAME: "GNU long name",
    tarfile.GNUTYPE_LONGLINK: "GNU long link",
    tarfile.GNUTYPE_SPARSE: "sparse file",
    tarfile.XHDTYPE: "pax record",
    tarfile.XGLTYPE: "global pax record",
}
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"7z\xbc\xaf", b"\x04\x22\x4d\x18")


def header(name: str, size: int) -> bytes:
    """The blocks that announce the file `name` of `size` bytes.

    ValueError for a size (in bytes) below 0 or from `SIZE_LIMIT` on, or a name that cannot be written as UTF-8.
    """
    if not 0 <= size < SIZE_LIMIT:
        raise ValueError(f"found a file of {size} bytes, expected fewer than {SIZE_LIMIT}: tar cannot say its size")
    raw = name.encode("utf-8")
    if len(raw) <= _NAME_LIMIT and raw.isascii():
        return _block(raw, size, tarfile.REGTYPE)
    record = _pax_record(b"path", raw)
    short = name.encode("ascii", "replace")[:_NAME_LIMIT]
    long_name = _block(b"././@PaxHeader", len(record), tarfile.XHDTYPE) + record + padding(len(record))
    return long_name + _block(short, size, tarfile.REGTYPE)


def padding(size: int) -> bytes:
    """The zero bytes that fill the last block of a file of `size` bytes."""
    return bytes(-size % BLOCK)


def length(name: str, size: int) -> int:
    """Bytes of the whole member: header, content, padding. ValueError as from `header`."""
    return len(header(name, size)) + size + -size % BLOCK


def expect(stream: BinaryIO, name: str, size: int) -> None:
    """Reads exactly the header of this file; ValueError saying what was found if another one stands there."""
    wanted = header(name, size)
    found = stream.read(len(wanted))
    if found != wanted:
        raise ValueError(
            f"found {describe(found)}, expected the file {quoted(name)} of {size} bytes as export writes it: "
            "the bundle is damaged or was packed by another program"
        )


def expect_padding(stream: BinaryIO, name: str, size: int) -> None:
    """Reads the rest of a file's last block; ValueError if there is anything in it, or too little of it."""
    if stream.read(-size % BLOCK) != padding(size):
        raise ValueError(f"found data after the end of {quoted(name)}, expected zeros: the bundle is damaged")


def first_file(stream: BinaryIO, name: str, limit: int) -> bytes:
    """The content of the first file, which must be `name` with 1 to `limit` bytes; ValueError otherwise."""
    block = stream.read(BLOCK)
    if block.startswith(_COMPRESSED):
        raise ValueError("found a compressed file, expected a plain tar: a bundle is never compressed, unpack it first")
    info = _parse(block)
    if info is None or info.name != name or info.type != tarfile.REGTYPE:
        raise ValueError(f"found {describe(block)}, expected the file {name} first: this is no bundle")
    if not 0 < info.size <= limit:
        raise ValueError(f"found {name} with {info.size} bytes, expected 1 to {limit}: this is no sound bundle")
    if block != header(name, info.size):
        raise ValueError(f"found {name} with another header than export writes: the bundle is damaged or was repacked")
    content = stream.read(info.size)
    if len(content) != info.size:
        raise ValueError(f"found {len(content)} bytes of {name}, expected {info.size}: the bundle was cut off")
    expect_padding(stream, name, info.size)
    return content


def describe(block: bytes) -> str:
    """What a header that was found says of itself, for a message; nothing in it is believed."""
    if len(block) < BLOCK:
        return "the end of the file"
    if not any(block[:BLOCK]):
        return "the end of the archive"
    info = _parse(block)
    if info is None:
        return "a block that is no tar header"
    text = f"a {_KINDS.get(info.type, f'member of the unknown type {info.type!r}')} {quoted(info.name)}"
    if info.linkname:
        text += f" to {quoted(info.linkname)}"
    return f"{text} of {info.size} bytes"


def quoted(text: str) -> str:
    """Somebody else's text for a message: on one line, no control characters, not too long."""
    return ascii(text if len(text) <= 120 else f"{text[:60]}...{text[-57:]}")


def _parse(block: bytes) -> tarfile.TarInfo | None:
    try:
        return tarfile.TarInfo.frombuf(block[:BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:  # empty, cut off, a wrong checksum or no number where one must be
        return None


def _pax_record(key: bytes, value: bytes) -> bytes:
    """One line "<length> <key>=<value>", where the length counts its own digits."""
    rest = b" " + key + b"=" + value + b"\n"
    total = len(rest)
    while len(rest) + len(str(total)) != total:
        total = len(rest) + len(str(total))
    return str(total).encode() + rest


def _block(name: bytes, size: int, kind: bytes) -> bytes:
    """One header block. Written here and not by tarfile, whose bytes differ between versions of Python."""
    before = name.ljust(_NAME_LIMIT, b"\0") + b"0000600\0" + b"0000000\0" * 2 + b"%011o\0%011o\0" % (size, _TIME)
    after = kind + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2 + bytes(167)
    checksum = sum(before) + sum(after) + 8 * ord(" ")
    return before + b"%06o\0 " % checksum + after
