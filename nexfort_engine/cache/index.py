# SPDX-License-Identifier: Apache-2.0
"""`index.json`: what the store holds, as a readable table.

The entries are the truth and the index is a view of them: it makes listing cheap, and is rebuilt whenever it
is missing, damaged or disagrees with the directories on disk. Nothing is ever loaded on the index's word.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .entry import SCHEMA, Entry, is_key

log = logging.getLogger("nexfort")

NAME = "index.json"
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "id": str, "primary": str, "size": int, "created": str, "made_by": dict, "info": dict,
}  # fmt: skip


def row_of(entry: Entry) -> dict[str, Any]:
    """One line of the table; `info` is what the engine said about the artefact (region, family, shapes)."""
    info = entry.manifest.get("info")
    return {
        "id": entry.id,
        "primary": entry.primary,
        "size": entry.size,
        "created": entry.manifest["created"],
        "made_by": entry.manifest["made_by"],
        "info": info if isinstance(info, dict) else {},
    }


def read(root: Path) -> list[dict[str, Any]] | None:
    """The rows of the index, or None if it is missing or not a sound index."""
    try:
        text = (root / NAME).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.debug("the cache index cannot be read: %s", error)
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        log.info("the cache index %s is damaged (%s); it is rebuilt from the entries", root / NAME, error)
        return None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        return None
    rows = content.get("entries")
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        log.info("the cache index %s is damaged; it is rebuilt from the entries", root / NAME)
        return None
    return rows


def _is_row(row: object) -> bool:
    if not isinstance(row, dict) or not all(isinstance(row.get(k), t) for k, t in _FIELDS.items()):
        return False
    return is_key(row["id"]) and is_key(row["primary"]) and row["size"] >= 0


def write(root: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replaces the index in one step; OSError where the store cannot be written."""
    ordered = sorted(rows, key=lambda row: (row["created"], row["id"]))
    lines = ",\n".join(json.dumps({name: row[name] for name in _FIELDS}, sort_keys=True) for row in ordered)
    text = f'{{"schema": {SCHEMA}, "entries": [\n{lines}\n]}}\n'
    temporary = root / f"{NAME}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, root / NAME)
    finally:
        temporary.unlink(missing_ok=True)


def agrees(rows: Iterable[dict[str, Any]], on_disk: Iterable[tuple[str, str]]) -> bool:
    """Whether the rows name exactly the (primary, id) directories that lie on disk."""
    return {(row["primary"], row["id"]) for row in rows} == set(on_disk)
