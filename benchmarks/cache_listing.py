# SPDX-License-Identifier: Apache-2.0
"""How long the store itself takes: listing 10,000 entries, and its share of a warm start with 14 artefacts.

    python -m benchmarks.cache_listing [--entries 10000] [--artefacts 14] [--mib 2] [--dir DIR]

Prints one JSON object; figures are the best of five in milliseconds, each by a store object that knows nothing yet,
with the files in the system's page cache. The share of a warm start is all that an engine asks of the store: the
table, the candidates of each key, the checked copy to load from, the time of use. No artefact is loaded. Once where
the first step comes at once, and once where the host loads the model in between, so that all is ready by then.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nexfort_engine.cache import index
from nexfort_engine.cache.entry import MANIFEST, Entry, entry_id, made_by, manifest_text, now_text, read_entry
from nexfort_engine.cache.key import primary_key
from nexfort_engine.cache.store import Store

RUNS = 5


def fill(root: Path, count: int) -> Store:
    """A store of `count` entries, all used and with shapes, written past the store because that takes a minute."""
    store = Store(root)
    assert store.writable, store.problem
    maker, entries = made_by(), []
    for number in range(count):
        primary = primary_key({"number": number})
        info = {"region": f"blocks.{number}", "kind": "Block", "family": "UNet", "model": secrets.token_hex(16)}
        info |= {"machine": {"gpu": "NVIDIA H200", "torch": "2.11.0"}, "fingerprint": secrets.token_hex(16)}
        manifest: dict[str, Any] = {"schema": 1, "primary": primary, "created": now_text(), "made_by": maker}
        manifest |= {
            "info": info,
            "files": {"a": [1, "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"]},
        }
        manifest["id"] = entry_id(primary, manifest)
        path = root / "entries" / primary / manifest["id"]
        for folder in (path.parent, path, path / "payload"):
            folder.mkdir(mode=0o700)
        contents = {"payload/a": b"1", MANIFEST: manifest_text(manifest)}
        contents["last_used"] = b"\n2x4x128x128, 2x77x2048\n\n2x4x96x96, 2x77x2048\n"
        for name, content in contents.items():
            (path / name).write_bytes(content)
            (path / name).chmod(0o600)
        entries.append(read_entry(path))
    index.write(root, [index.row_of(entry) for entry in entries], root / "staging")
    return store


def best(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the fastest of some runs: on the clock, and of processor time."""
    times = []
    for _ in range(RUNS):
        began, busy = time.perf_counter(), time.process_time()
        work()
        times.append((time.perf_counter() - began, time.process_time() - busy))
    return round(min(one for one, _ in times) * 1000, 1), round(min(one for _, one in times) * 1000, 1)


def stock(root: Path, artefacts: int, size: int) -> list[Entry]:
    """A store with as many artefacts as a backbone has, each of six files."""
    store, made = Store(root), []
    for number in range(artefacts):
        with store.stage() as staged:
            for part in range(6):
                folder = staged / "payload" / f"{part:02x}"
                folder.mkdir()
                (folder / "kernel.bin").write_bytes(os.urandom(size // 6))
            made.append(store.commit(primary_key({"artefact": number}), staged, {"number": number}))
    return made


def warm_start(root: Path, primaries: list[str], prepared: bool) -> dict[str, float]:
    """Milliseconds of each step, for a store object that knows nothing yet, or that was given time to prepare."""
    store = Store(root)
    if prepared:
        store.rows()
        store.ahead(primaries)
    moments, busy = [time.perf_counter()], time.process_time()
    if not prepared:
        store.rows()
    moments.append(time.perf_counter())
    found = [store.candidates(primary)[0] for primary in primaries]
    moments.append(time.perf_counter())
    for entry in found:
        store.ready(entry)
    moments.append(time.perf_counter())
    for entry in found:
        store.touch(entry)
    moments.append(time.perf_counter())
    names = ("rows", "candidates", "ready", "touch")
    found_ms = {name: (b - a) * 1000 for name, a, b in zip(names, moments, moments[1:], strict=False)}
    return {**found_ms, "all": (moments[-1] - moments[0]) * 1000, "cpu": (time.process_time() - busy) * 1000}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--artefacts", type=int, default=14)
    parser.add_argument("--mib", type=float, default=2.0, help="size of one artefact")
    parser.add_argument("--dir", type=Path, help="where the stores are made and removed again")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="nexfort-listing-", dir=options.dir))
    try:
        fill(folder / "many", options.entries)
        listing, busy = best(lambda: Store(folder / "many").rows())
        assert len(Store(folder / "many").rows()) == options.entries
        made = stock(folder / "warm", options.artefacts, int(options.mib * (1 << 20)))
        primaries = [entry.primary for entry in made]
        at_once, prepared = (
            min((warm_start(folder / "warm", primaries, way) for _ in range(RUNS)), key=lambda one: one["all"])
            for way in (False, True)
        )
    finally:
        shutil.rmtree(folder)
    print(
        json.dumps(
            {
                "entries": options.entries,
                "listing_ms": listing,
                "listing_cpu_ms": busy,
                "artefacts": options.artefacts,
                "artefact_mib": options.mib,
                "warm_start_ms": {name: round(value, 1) for name, value in at_once.items()},
                "warm_start_prepared_ms": {name: round(value, 1) for name, value in prepared.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
