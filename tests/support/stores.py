# SPDX-License-Identifier: Apache-2.0
"""Stores for tests: small entries, what lies on the disk, and a base cache that nobody may write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from nexfort_engine.cache import store as store_module
from nexfort_engine.cache.key import primary_key
from nexfort_engine.cache.store import Entry, Store

KEY = primary_key({"test": 1})
OTHER = primary_key({"test": 2})
ROOT = Path(store_module.__file__).parents[2]
SIZE = 12  # bytes of an entry that `put` makes with its usual content


def put(store: Store, primary: str = KEY, content: bytes = b"code", **manifest: Any) -> Entry:
    """Commits an entry of two files."""
    with store.stage() as staged:
        (staged / "payload" / "ab").mkdir()
        (staged / "payload" / "ab" / "kernel.py").write_bytes(content)
        (staged / "payload" / "artefact.bin").write_bytes(content * 2)
        return store.commit(primary, staged, manifest)


def use_at(store: Store, entry: Entry, seconds: float) -> None:
    """Uses an entry as if it were another time."""
    store.touch(entry)
    os.utime(entry.path / "last_used", (seconds, seconds))


def snapshot(folder: Path) -> dict[str, bytes]:
    """The content of every file below a directory."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def loaded(store: Store, entry: Entry) -> dict[str, bytes]:
    """What would be loaded of an entry: the files of the copy that this process gets of it."""
    return snapshot(store.ready(entry))


def make_base(root: Path, *variants: int, primary: str = KEY) -> list[Entry]:
    """A base cache as an administrator leaves it: for everyone to read, for nobody to write."""
    store = Store(root)
    entries = [put(store, primary, content=b"base", variant=variant) for variant in variants]
    for path in (root, *root.rglob("*")):
        os.chmod(path, 0o555 if path.is_dir() else 0o444)
    return entries


def quick_folder() -> Path:
    """A directory in memory where there is one: some tests write a store thousands of times."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="nexfort-test-", dir=memory if os.access(memory, os.W_OK) else None))
