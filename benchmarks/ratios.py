# SPDX-License-Identifier: Apache-2.0
"""Ratios of one run: how many times as fast as uncompiled a step is, by ComfyUI's compile node and by Nexfort.

A run is one command on one commit, card and size. Figures of two runs are never divided by each other, because hosts of
one kind differ. Of a way that ran in two processes, one with an empty cache and one with a full one, the faster counts.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results.csv"
NAMES = {
    "flux": "Flux-dev, batch 1",
    "wan": "Wan2.1-1.3B, batch 2",
    "pixart": "PixArt-XL, batch 2",
    "sdxl": "SDXL, batch 2",
    "sd21": "SD2.1, batch 2",
}
HEAD = (
    "| GPU | workload | mode | ComfyUI's TorchCompileModel | Nexfort | "
    "first step, nothing cached / after a restart, s: TorchCompileModel | the same: Nexfort |"
)
CORE = ("core", "core, warm")
# mode -> ways of its two processes
MODES = {"O2": ("cold", "warm"), "O3": ("default+O3", "default+O3, warm")}
_OTHER_RUNS = "Each row is one run. Where README gives `O2` another ratio, that is of another run: hosts differ."
RUN = ("gpu", "backbone", "size", "steps", "commit", "command")

Row = dict[str, str]


def read(file: Path = RESULTS) -> list[Row]:
    """All rows; a column that a row was written without is empty."""
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream, restval=""))


def runs(rows: list[Row], *ways: Iterable[str]) -> dict[tuple[str, str], dict[str, Row]]:
    """(GPU, backbone) -> way -> row, of its newest run that has at least one way of each of `ways`, and eager."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:  # the file grows
        usual = not row["options"] or row["way"].startswith("default+")
        if row["ms"] and usual:
            found.setdefault(tuple(row[name] for name in RUN), {})[row["way"]] = row
    whole = {}
    for (gpu, backbone, *_), run in found.items():
        if "eager" in run and all(not run.keys().isdisjoint(some) for some in ways):
            whole[gpu, backbone] = run
    return whole


def fastest(run: dict[str, Row], ways: Iterable[str]) -> float:
    """Milliseconds a step of the faster of a way's processes."""
    return min(float(run[way]["ms"]) for way in ways if way in run)


def table(file: Path = RESULTS) -> str:
    """README's table. A row lacks nothing: what was not run together is in no row."""
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    whole = runs(read(file), CORE, MODES["O2"])
    for (gpu, backbone), run in sorted(whole.items(), key=lambda one: (one[0][0], _place(one[0][1]))):
        eager = fastest(run, ["eager"])
        for mode, (cold, warm) in MODES.items():
            if not {*CORE, cold, warm} <= run.keys():
                continue
            ratios = [f"{eager / fastest(run, CORE):.2f}x", f"**{eager / fastest(run, (cold, warm)):.2f}x**"]
            firsts = [" / ".join(f"{float(run[way]['first_s']):.1f}" for way in own) for own in (CORE, (cold, warm))]
            workload = f"{NAMES.get(backbone, backbone)}, {run['eager']['size']}"
            lines.append("| " + " | ".join([gpu, workload, f"`{mode}`", *ratios, *firsts]) + " |")
    return "\n".join(lines)


def taken(file: Path = RESULTS) -> str:
    """Where and when the rows of README's table were measured, in one sentence."""
    rows = [row for run in runs(read(file), CORE, MODES["O2"]).values() for row in run.values()]
    dates = sorted({row["date"] for row in rows})
    torches = " and ".join(sorted({row["torch"].split("+")[0] for row in rows}))
    return f"Measured from {dates[0]} to {dates[-1]} with torch {torches}." if rows else "Nothing was measured yet."


def low_precision(file: Path = RESULTS) -> str:
    """The table of mode `O3` beside `O2`: speed, and distance to the uncompiled result."""
    head = "| GPU | workload | `O2` | `O3` | difference, `O2` | difference, `O3` |"
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    whole = runs(read(file), MODES["O2"], MODES["O3"])
    for (gpu, backbone), run in sorted(whole.items(), key=lambda one: (one[0][0], _place(one[0][1]))):
        eager = fastest(run, ["eager"])
        two, three = (run.get(warm) or run[cold] for cold, warm in MODES.values())
        cells = [gpu, f"{NAMES.get(backbone, backbone)}, {run['eager']['size']}"]
        cells += [f"{eager / fastest(run, ways):.2f}x" for ways in MODES.values()]
        cells += [two["error_to_eager"], three["error_to_eager"]]
        if all(cells):
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _OTHER_RUNS])


def _place(backbone: str) -> int:
    return list(NAMES).index(backbone) if backbone in NAMES else len(NAMES)
