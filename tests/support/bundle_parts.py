# SPDX-License-Identifier: Apache-2.0
"""Stores to make bundles from, and bundles taken apart and put together again by somebody who means no good.

The archives are built here from tar's documentation, not with the engine's own writer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nexfort_engine.cache.bundle import export, load
from nexfort_engine.cache.key import primary_key
from nexfort_engine.cache.store import Entry, Store

KEY = primary_key({"test": 1})
MACHINE = {"device": "NVIDIA H200", "torch": "2.9.1"}
HERE = {"ab" * 16: "NVIDIA H200"}  # the fingerprints of the machine on which the tests pretend to run
FILES = {"ab/kernel.py": b"code" * 150, "artefact.bin": b"\x7fELF", "empty": b""}

Member = list[bytes]  # [header, content]


def put(store: Store, files: Mapping[str, bytes] = FILES, primary: str = KEY, **manifest: Any) -> Entry:
    """Commits an entry with these payload files; `info` in `manifest` is added to what says the machine."""
    info = {"region": "blocks.0", "fingerprint": next(iter(HERE)), "machine": MACHINE} | manifest.pop("info", {})
    with store.stage() as staged:
        for name, content in files.items():
            path = staged / "payload" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return store.commit(primary, staged, manifest | {"info": info})


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of files."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def payloads(store: Store) -> dict[str, dict[str, bytes]]:
    """{id: {name: bytes}} of every entry on disk, by what lies in the payload directories."""
    found: dict[str, dict[str, bytes]] = {}
    for payload in store.root.glob("entries/*/*/payload"):
        files = [path for path in payload.rglob("*") if path.is_file()]
        found[payload.parent.name] = {path.relative_to(payload).as_posix(): path.read_bytes() for path in files}
    return found


# -- archives ------------------------------------------------------------------------------------------------


def split(data: bytes) -> list[Member]:
    """The members of a tar of plain headers, up to its end marker."""
    found, at = [], 0
    while any(data[at : at + 512]):
        size = int(data[at + 124 : at + 135], 8)
        found.append([data[at : at + 512], data[at + 512 : at + 512 + size]])
        at += 512 + size + -size % 512
    return found


def join(members: list[Member]) -> bytes:
    """A tar of these headers and contents, with its end marker."""
    return b"".join(header + content + bytes(-len(content) % 512) for header, content in members) + bytes(1024)


def sealed(header: bytes) -> bytes:
    """The header with the checksum it should have."""
    total = sum(header[:148]) + sum(header[156:512]) + 8 * 32
    return header[:148] + b"%06o\0 " % total + header[156:]


def edited(header: bytes, offset: int, content: bytes, width: int | None = None) -> bytes:
    """The header with a field replaced (filled with NULs up to `width`) and the checksum made good."""
    field = content.ljust(width or 0, b"\0")
    return sealed(header[:offset] + field + header[offset + len(field) :])


def member(name: bytes, content: bytes, kind: bytes = b"0") -> Member:
    """A member as any tar program could write it; a longer name than 100 bytes is cut."""
    fields = name[:100].ljust(100, b"\0") + b"0000600\0" + b"0000000\0" * 2 + b"%011o\0" % len(content)
    fields += b"%011o\0" % 315532800 + bytes(8) + kind + bytes(100) + b"ustar\x0000" + bytes(64)
    return [sealed(fields + b"0000000\0" * 2 + bytes(167)), content]


def pax(kind: bytes = b"x", **records: str) -> Member:
    """A pax header that overrides fields of the next member (kind x) or of all that follow (kind g)."""
    lines = b""
    for key, value in records.items():
        rest = f" {key}={value}\n".encode()
        total = next(n for n in range(len(rest), len(rest) + 9) if len(str(n)) + len(rest) == n)
        lines += str(total).encode() + rest
    return member(b"././@PaxHeader", lines, kind)


# -- bundle.json ---------------------------------------------------------------------------------------------


def dumped(content: Any) -> bytes:
    """The one form in which bundle.json is written."""
    cover = json.dumps({name: value for name, value in content.items() if name != "entries"}, sort_keys=True)
    entries = content.get("entries")
    if not isinstance(entries, list):
        return json.dumps(content, sort_keys=True).encode()
    lines = ",\n".join(json.dumps(one, sort_keys=True) for one in entries)
    return f'{cover[:-1]}, "entries": [\n{lines}\n]}}\n'.encode()


def resealed(data: bytes, edit: Callable[[dict[str, Any]], object], members: list[Member] | None = None) -> bytes:
    """The bundle with its bundle.json edited and made consistent, followed by `members` (default: as they were)."""
    old = split(data)
    content = json.loads(old[0][1])
    content.pop("digest")
    edit(content)
    content["digest"] = hashlib.sha256(dumped(content)).hexdigest()
    return join([member(b"bundle.json", dumped(content)), *(old[1:] if members is None else members)])


def with_files(data: bytes, files: Mapping[str, bytes]) -> bytes:
    """A consistent bundle whose first entry consists of these files, named in whatever way."""

    def edit(content: dict[str, Any]) -> None:
        listed = {name: [len(text), hashlib.sha256(text).hexdigest()] for name, text in files.items()}
        content["entries"][0]["files"] = listed

    own = json.loads(split(data)[0][1])["entries"][0]["id"]
    names = [(f"{own}/{name}".encode("utf-8", "surrogatepass"), text) for name, text in sorted(files.items())]
    return resealed(data, edit, [member(name, text) for name, text in names])


# -- attempts ------------------------------------------------------------------------------------------------

REFUSALS = (ValueError, OSError)  # PermissionError is one of the latter


class Range:
    """A directory of its own with a sound bundle in it, a store to import into, and files that must not change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        source = Store(folder / "source")
        put(source)
        export(source, folder / "sound")
        self.sound = (folder / "sound").read_bytes()
        self.originals = payloads(source)
        self.id = next(iter(self.originals))
        self.file = folder / "bundle"
        self.file.write_bytes(self.sound)
        self.store = Store(folder / "target")
        assert self.store.writable
        self.outside = self.around()

    def around(self) -> dict[str, bytes | None]:
        """Everything but the store and the bundle that is tried."""
        found = {path.name: path for path in self.folder.iterdir() if path not in (self.store.root, self.file)}
        inner = {f"{name}/{inner}": text for name, path in found.items() for inner, text in snapshot(path).items()}
        return dict.fromkeys(found) | inner

    def refusal(self, data: bytes) -> str | None:
        """The sentence with which `data` is refused, or None if it was imported; nothing may be left behind."""
        self.file.write_bytes(data)
        try:
            load(self.store, self.file, trust=True, fingerprints=HERE)
            reason = None
        except REFUSALS as error:
            reason = str(error)
            assert reason and "\n" not in reason and reason.isprintable(), ascii(reason)
        assert os.listdir(self.store.root / "staging") == []
        return reason

    def forget(self) -> None:
        """Removes every entry at once, more cheaply than the store does it."""
        for folder in (self.store.root / "entries").iterdir():
            shutil.rmtree(folder)
        for path in self.store.root.iterdir():
            if path.is_file():
                path.unlink()

    def nothing_happened(self) -> None:
        assert payloads(self.store) == {} and self.around() == self.outside
        assert {path.name for path in self.store.root.iterdir()} == {"entries", "staging", "broken"}
        assert not [path for name in ("entries", "broken") for path in (self.store.root / name).iterdir()]
