# SPDX-License-Identifier: Apache-2.0
"""Rows of results.csv: one process of benchmarks.one_run each, with what it measured and how far its picture is off."""

from __future__ import annotations

import csv
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COLUMNS = (
    "date gpu torch commit backbone size steps way options first_s ms peak_gib first_peak_gib compiled loaded "
    "eager_regions error_to_fp32 error_to_eager command device_gib tflops of_ceiling reason ms_queued"
).split()
Row = dict[str, Any]
_ROOT = Path(__file__).resolve().parent.parent


def child(backbone: str, way: str, flags: list[str], *, latent: Path, caches: Path, log: Path | None) -> Row:
    """What one process measured, as it printed it; {"reason": ...} if it failed.

    latent: where its last latent goes. caches: the folder of all that it compiles, empty for a cold start. log: a file
    for its full output.
    """
    command = [sys.executable, "-m", "benchmarks.one_run", backbone, way, "--latent", str(latent), *flags]
    places = {"NEXFORT_CACHE_DIR": str(caches / "nexfort"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **places}, cwd=_ROOT)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    print(f"{backbone} {way} failed with status {done.returncode}:\n{done.stderr[-3000:]}", file=sys.stderr)
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {
        "reason": f"it ended with status {done.returncode}: {said[-1].strip()[:300] if said else 'and said nothing'}"
    }


def device() -> Row:
    """{"type", "gpu", "torch", "no_fp8"} of the device, as a process of its own sees it: this one takes none of it.

    no_fp8: why it has no products in fp8, or nothing.
    """
    command = [sys.executable, "-m", "benchmarks.card"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=_ROOT).stdout)


def row_of(found: Row, **more: Any) -> Row:
    """A row with what a process measured; `more` are the columns that it does not know."""
    row = dict.fromkeys(COLUMNS, "") | {k: v for k, v in found.items() if k in COLUMNS and v is not None}
    report = found.get("report") or {}
    row.update(compiled=report.get("artefacts_compiled", ""), loaded=report.get("artefacts_loaded", ""))
    row.update(eager_regions=len(report.get("eager", ())) if report else "")
    return row | {"date": datetime.date.today().isoformat(), **more}


def distance(latent: Path, reference: Path) -> Any:
    """||latent - reference|| / ||reference||, both as float32; empty where one is missing or both are one."""
    import torch

    if latent == reference or not latent.exists() or not reference.exists():
        return ""
    a, b = torch.load(latent).float(), torch.load(reference).float()
    return float(f"{float((a - b).norm() / b.norm()):.3g}")


def commit(given: str = "") -> str:
    """The commit that is measured."""
    if given:
        return given
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=_ROOT)
    return done.stdout.strip()


def append_rows(file: Path, rows: list[Row], columns: list[str]) -> None:
    """Append rows. The header is written where the file is new; a file from before a column gets it, empty.

    Raises ValueError where the file has columns that these rows do not.
    """
    _fit(file, columns)
    new = not file.exists()
    with file.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _fit(file: Path, columns: list[str]) -> None:
    """Bring the rows of a file to these columns, whole or not at all."""
    if not file.exists():
        return
    with file.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream, restval="")
        if (there := reader.fieldnames or []) == columns:
            return
        if unknown := set(there) - set(columns):
            raise ValueError(
                f"{file} has the columns {', '.join(sorted(unknown))}; expected some of {', '.join(columns)}: give "
                "another file, or append with the version that wrote this one"
            )
        rows = list(reader)
    whole = file.with_name(f"{file.name}.new")
    with whole.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    whole.replace(file)


def newest_with(rows: list[Row], ways: set[str]) -> dict[str, str]:
    """Backbone -> the newest commit with which all of these ways were run, as machines of one kind differ.

    A backbone of which there is none is not in it.
    """
    ways_of: dict[tuple[str, str], set[str]] = {}
    for row in rows:  # the file grows
        ways_of.setdefault((row["backbone"], row["commit"]), set()).add(row["way"])
    return dict(key for key, there in ways_of.items() if there >= ways)
