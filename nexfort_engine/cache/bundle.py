# SPDX-License-Identifier: Apache-2.0
"""Bundles: entries of a store in one file, to be carried to a like machine.

    bundle.json   what the bundle holds, by whom and for which machines: the manifests with every file's SHA-256
    <id>/<name>   the payload files of the first entry, in the order of their names; then those of the next one

A bundle is code. `inspect` shows what it says of itself and reads nothing else; `load` takes nothing without the
user's word, nothing that was made for another machine, and no byte that is not the one bundle.json lists. The tar
around it is read by comparison with what must be there (`ustar`), never by believing it; names on disk come from
bundle.json alone (`contents`). Nothing here runs or unpickles anything.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from . import bundle_manifest, bundle_tar, owner
from .bundle_manifest import Bundle
from .entry import PAYLOAD, Entry, made_by, now_text
from .fs import NotPlainError, open_new, open_plain, sync_directory
from .paths import default_limit, size_text
from .store import Store, StoreError

__all__ = ["Bundle", "Exported", "Imported", "export", "inspect", "load"]

_BLOCK = 1 << 20
_UNDER_WAY = ".nexfort-"  # begins the name of a bundle that is being written


@dataclass(frozen=True)
class Exported:
    """What went into a bundle. `left_out` says why an entry that nobody asked for by name could not: {id: reason}."""

    entries: int
    bytes: int
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Imported:
    """What came out of a bundle: new entries, bytes of their payload, and entries that were there already."""

    entries: int
    bytes: int
    kept: int


# -- out ---------------------------------------------------------------------------------------------------------


def export(store: Store, file: Path, ids: Iterable[str] | None = None) -> Exported:
    """Writes the store's entries, or those with these ids, to `file`, which appears whole (mode 0600) or not at all.

    Equal entries give equal bytes, but for the date and the exporter's description in bundle.json. LookupError for an
    unknown id; ValueError if an entry asked for cannot travel or was altered, or if there is nothing to export;
    OSError if the file cannot be written. Without `ids`, entries that cannot travel are left out and named.
    """
    file = Path(file)
    chosen = store.entries() if ids is None else [store.find(one) for one in ids]
    entries = {entry.id: entry for entry in sorted(chosen, key=lambda entry: entry.id)}
    left_out = {}
    for entry in list(entries.values()):
        reason = bundle_manifest.problem(entry.manifest) or entry.verify()
        if reason is not None:
            left_out[entry.id] = reason
            del entries[entry.id]
    if left_out and ids is not None:
        name, reason = next(iter(left_out.items()))
        raise ValueError(f"the entry {name} cannot be exported: {reason}")
    if not entries:
        why = "".join(f"; {name}: {reason}" for name, reason in list(left_out.items())[:3])
        raise ValueError(f"found nothing to export in {store.root}{why}")
    text = bundle_manifest.write(now_text(), made_by(), [entry.manifest for entry in entries.values()])
    with _new_file(file) as stream:
        stream.write(bundle_tar.header(bundle_manifest.NAME, len(text)) + text + bundle_tar.padding(len(text)))
        for entry in entries.values():
            _write_payload(stream, entry)
        stream.write(bundle_tar.END)
    return Exported(len(entries), sum(entry.size for entry in entries.values()), left_out)


def _write_payload(stream: BinaryIO, entry: Entry) -> None:
    """Appends the payload, hashed once more while it is copied: what is written is what the manifest lists."""
    for name, (size, digest) in bundle_manifest.files_of(entry.manifest):
        stream.write(bundle_tar.header(f"{entry.id}/{name}", size))
        try:
            with os.fdopen(open_plain(entry.payload.joinpath(*name.split("/"))), "rb") as source:
                found = _copy(source, stream, size)
        except (FileNotFoundError, NotPlainError) as error:
            raise ValueError(f"the entry {entry.id} changed while it was exported: {error}") from None
        if found != digest:
            raise ValueError(f"the entry {entry.id} changed while it was exported: {bundle_tar.quoted(name)} differs")
        stream.write(bundle_tar.padding(size))


@contextlib.contextmanager
def _new_file(file: Path) -> Iterator[BinaryIO]:
    """A file only this user can read, under a temporary name beside `file` until all of it is written."""
    if not file.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"found no directory {file.parent}, expected one to write the bundle to")
    if file.exists() and not file.is_file():
        raise FileExistsError(errno.EEXIST, f"found {file}, which is no regular file; give the name of a file")
    for name in os.listdir(file.parent):
        if owner.is_name_of_own(name, _UNDER_WAY):  # of an export that was killed
            owner.remove_left(file.with_name(name))
    with (
        owner.replacing(file, file.parent, _UNDER_WAY) as handle,
        os.fdopen(handle, "wb", closefd=False) as stream,
    ):
        yield stream
        stream.flush()
        os.fsync(handle)
    sync_directory(file.parent)


# -- in ----------------------------------------------------------------------------------------------------------


def inspect(file: Path) -> Bundle:
    """What a bundle says it holds, from bundle.json and the file's length alone; all of it is its maker's word.

    ValueError with one sentence if it is no sound bundle, OSError if the file cannot be read.
    """
    with _opened(Path(file)) as stream:
        found = bundle_manifest.parse(bundle_tar.first_file(stream, bundle_manifest.NAME, bundle_manifest.LIMIT))
        _check_length(stream, found)
        return found


def load(store: Store, file: Path, *, trust: bool, fingerprints: Collection[str]) -> Imported:
    """Takes the entries of a bundle into the store; each one whole or not at all, those that are there already stay.

    `fingerprints` are those of this machine; a mapping may give their readable names. PermissionError without
    `trust`, before anything is read; ValueError if any entry is for another machine, before any payload byte is read,
    or as soon as a byte of the bundle is not what it must be: entries that were complete by then stay. OSError if the
    file cannot be read or the store cannot be written.
    """
    if not trust:
        raise PermissionError(
            "a bundle is code: what it holds runs as you as soon as a model uses it. If you trust whoever made it, "
            "pass --trust; without it `cache import` shows what the bundle says of itself"
        )
    with _opened(Path(file)) as stream:
        found = bundle_manifest.parse(bundle_tar.first_file(stream, bundle_manifest.NAME, bundle_manifest.LIMIT))
        _refuse_other_machines(found, fingerprints)
        _check_length(stream, found)
        _check_room(store, found)
        entries, size, kept = 0, 0, 0
        for manifest in found.entries:
            if _is_present(store, manifest):
                _read_payload(stream, manifest, None)
                kept += 1
                continue
            entry = _take(store, stream, manifest)
            entries += 1
            size += entry.size
        if stream.read(len(bundle_tar.END)) != bundle_tar.END or stream.read(1):
            raise ValueError("found something else than the end of the archive after the last file it lists")
    return Imported(entries, size, kept)


def _take(store: Store, stream: BinaryIO, manifest: Mapping[str, Any]) -> Entry:
    try:
        with store.stage() as staged:
            _read_payload(stream, manifest, staged / PAYLOAD)
            if not store.writable:  # it was staged in a temporary directory, where nobody would find it
                raise OSError(errno.EROFS, store.problem)
            entry = store.adopt(manifest, staged)
    except StoreError as error:
        raise OSError(errno.EIO, str(error)) from error
    if not entry.persistent:
        raise OSError(errno.EIO, store.problem or f"{entry.id} could not be written to {store.root}")
    return entry


def _read_payload(stream: BinaryIO, manifest: Mapping[str, Any], payload: Path | None) -> None:
    """Reads the files of one entry in their order, into the directory `payload` unless it is None."""
    for name, (size, digest) in bundle_manifest.files_of(manifest):
        member = f"{manifest['id']}/{name}"
        bundle_tar.expect(stream, member, size)
        if payload is None:
            found = _copy(stream, None, size)
        else:
            *folders, last = name.split("/")
            target = payload
            for folder in folders:
                target = target / folder
                target.mkdir(mode=0o700, exist_ok=True)
            with _created(target / last) as copy:
                found = _copy(stream, copy, size)
        if found != digest:
            raise ValueError(f"found {bundle_tar.quoted(member)} altered: its SHA-256 is not the one the bundle lists")
        bundle_tar.expect_padding(stream, member, size)


def _is_present(store: Store, manifest: Mapping[str, Any]) -> bool:
    """Whether a sound entry with this id is there; one of ours that is not makes room for that of the bundle."""
    for entry in store.candidates(manifest["primary"]):
        if entry.id == manifest["id"]:
            reason = entry.verify()
            if reason is None:
                return True
            store.set_aside(entry, reason)
    return False


def _refuse_other_machines(found: Bundle, fingerprints: Collection[str]) -> None:
    other = [one for one in found.entries if one["info"]["fingerprint"] not in fingerprints]
    if not other:
        return
    info = other[0]["info"]
    theirs = f"{bundle_manifest.machine_text(info.get('machine', {}))} ({info['fingerprint'][:16]})"
    names = fingerprints if isinstance(fingerprints, Mapping) else dict.fromkeys(fingerprints, "fingerprint")
    ours = ", ".join(f"{name} ({mark[:16]})" for mark, name in names.items()) or "a machine of no known kind"
    raise ValueError(
        f"found {len(other)} of {len(found.entries)} entries for another machine: {theirs}; this one is {ours}. "
        "Compiled code runs only on the kind of machine it was made for: import a bundle that was exported on one"
    )


def _check_length(stream: BinaryIO, found: Bundle) -> None:
    """Right after bundle.json: exactly the listed files can follow, and the archive's end."""
    rest = os.fstat(stream.fileno()).st_size - stream.tell()
    listed = len(bundle_tar.END)
    for manifest, name, size, _ in found.files():
        listed += bundle_tar.length(f"{manifest['id']}/{name}", size)
    if rest != listed:
        what = "it was cut off" if rest < listed else "something was added to it"
        raise ValueError(f"found {rest} bytes after {bundle_manifest.NAME}, expected {listed}: {what}")


def _check_room(store: Store, found: Bundle) -> None:
    if found.bytes > (limit := default_limit()):
        raise ValueError(
            f"found {size_text(found.bytes)} of compiled code, but the cache holds at most {size_text(limit)}: "
            "raise NEXFORT_CACHE_LIMIT, or export fewer entries"
        )
    if not store.writable:
        raise OSError(errno.EROFS, store.problem)


# -- files -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """The bundle for reading. It may be reached through a link, but must be a file: a pipe could wait for ever."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(file, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"found {file}, which is no regular file, expected a bundle")
    with os.fdopen(handle, "rb") as stream:
        yield stream


def _created(path: Path) -> BinaryIO:
    return os.fdopen(open_new(path), "wb")


def _copy(source: BinaryIO, target: BinaryIO | None, size: int) -> str:
    """Copies exactly `size` bytes and gives their SHA-256; ValueError if there are fewer."""
    digest = hashlib.sha256()
    left = size
    while left:
        block = source.read(min(left, _BLOCK))
        if not block:
            raise ValueError(f"found {size - left} bytes, expected {size}: the file was cut off")
        digest.update(block)
        if target is not None:
            target.write(block)
        left -= len(block)
    return digest.hexdigest()
