# SPDX-License-Identifier: Apache-2.0
"""`index.json`: what the store holds, as a readable table.

The entries are the truth and the index is a view of them: it makes listing cheap, and is rebuilt whenever it
is missing, damaged or disagrees with the directories on disk. It carries its own SHA-256, so that damage to it is
never held against an entry. Nothing is ever loaded on the index's word; but what it says of an entry's manifest
(`digest`) must hold before that entry is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .entry import SCHEMA, Entry, is_key
from .fs import read_plain
from .owner import replace_file
from .trust import DistrustError, Trust

log = logging.getLogger("nexfort")

NAME = "index.json"
LIMIT = 64 << 20  # bytes: some ten thousand entries
# `inode` is the entry's directory: a row may be older than the entry that lies there now.
_FIELDS: dict[str, type] = {
    "id": str, "primary": str, "size": int, "created": str, "made_by": dict, "info": dict, "digest": str, "inode": int,
}  # fmt: skip
_KINDS = list(_FIELDS.values())
Row = dict[str, Any]


def row_of(entry: Entry) -> Row:
    """One line of the table; `info` is what the engine said about the artefact (region, family, machine)."""
    return {
        "id": entry.id,
        "primary": entry.primary,
        "size": entry.size,
        "created": entry.manifest["created"],
        "made_by": entry.manifest["made_by"],
        "info": entry.info,
        "digest": entry.digest,
        "inode": entry.seen[1] if entry.seen else 0,
    }


def read(root: Path, trust: Trust | None = None) -> list[Row] | None:
    """The rows of the index, or None if it is missing, not to be trusted or not a sound index."""
    path = root / NAME
    try:
        rows = _parse(read_plain(path, LIMIT, None if trust is None else functools.partial(trust.check, path)))
        reason = f"{path} is damaged"
    except FileNotFoundError:
        return None
    except (OSError, DistrustError) as error:
        rows, reason = None, str(error)
    if rows is None:
        log.info("the cache index is rebuilt from the entries: %s", reason)
    return rows


def _parse(text: bytes) -> list[Row] | None:
    body, found, seal = text.rpartition(b'\n], "sha256": ')
    try:
        if not found or seal != b'"%s"}\n' % hashlib.sha256(body).hexdigest().encode():
            return None
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    rows = content.get("entries") if isinstance(content, dict) and content.get("schema") == SCHEMA else None
    return rows if isinstance(rows, list) and all(map(_is_row, rows)) else None


def _is_row(row: object) -> bool:
    if not isinstance(row, dict) or [type(row.get(name)) for name in _FIELDS] != _KINDS:
        return False
    return is_key(row["id"]) and is_key(row["primary"]) and row["size"] >= 0


def write(root: Path, rows: Iterable[Row], staging: Path) -> None:
    """Replaces the index in one step, through a file in `staging`; OSError where the store cannot be written."""
    ordered = sorted(rows, key=lambda row: (row["created"], row["id"]))
    lines = ",\n".join(json.dumps({name: row[name] for name in _FIELDS}, sort_keys=True) for row in ordered)
    body = f'{{"schema": {SCHEMA}, "entries": [\n{lines}'.encode()
    seal = f'\n], "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()
    replace_file(root / NAME, body + seal, staging)


def agrees(rows: Iterable[Row], on_disk: Iterable[tuple[str, str]]) -> bool:
    """Whether the rows name exactly the (primary, id) directories that lie on disk."""
    return {(row["primary"], row["id"]) for row in rows} == set(on_disk)


def digest_for(row: Row | None, entry: Entry) -> str | None:
    """What the row says the SHA-256 of the entry's manifest is; None if it speaks of an earlier one in its place.

    An entry that was built again has another directory and another date; an altered one has kept one of them.
    """
    if row is None:
        return None
    again = entry.seen is not None and row["inode"] != entry.seen[1] and row["created"] != entry.manifest["created"]
    return None if again else row["digest"]
