# SPDX-License-Identifier: Apache-2.0
"""The table of the old engine's published figures and ours in benchmarks/README.md (benchmarks/figures.py).

Published figures are in published.csv, from the old engine's own pages; ours in old_engine.csv, by
benchmarks/old_engine.py. A row of ours that lacks a figure is not shown. Beside ours stands the fastest eager run on
such a card: where a slow processor does not keep the card busy, eager shows that and not the card. A ratio is of one
run. So ours have one where eager of the same run was as fast as the fastest; the others are shown without.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from benchmarks.old_engine import FAMILIES, Family

HERE = Path(__file__).resolve().parent
RESULTS, PUBLISHED = HERE / "old_engine.csv", HERE / "published.csv"
_RUN = ("commit", "command", "gpu", "size")  # what rows of one run have in common
_AS_FAST = 0.99  # of the rate of the fastest eager run
_ELSEWHERE = "none: two runs"


def table(published: list[dict[str, str]], ours: list[dict[str, str]]) -> str:
    """Published and own figures as Markdown, ratios first. Ours: of the newest commit and config that has the model."""
    head = (
        "| model, size, steps | ratio | it/s eager → compiled | warm-up cold, s | warm-up cached, s | "
        "peak GiB eager → compiled | error to fp32 eager → compiled | GPU, mode, date | command |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for name, family in FAMILIES.items():
        for one in sorted((r for r in published if r["model"] == name), key=_ratio, reverse=True):
            cells = [f"{family.title}, {one['size']}, {one['steps']}", f"{_ratio(one):.2f}"]
            cells += [f"{one['eager_rate']} → {one['rate']}", one["warmup_s"], one["cached_s"]]
            cells += [f"{one['eager_gib']} → {one['gib']}", "not published"]
            cells += [f"old engine, {one['gpu']}, `{one['config']}`, {one['date']}", f"page {one['page']}"]
            lines.append("| " + " | ".join(cells) + " |")
        lines += [_own_line(family, *pair) for pair in _pairs(name, ours)]
    return "\n".join(lines)


def _ratio(one: dict[str, str]) -> float:
    return float(one["rate"]) / float(one["eager_rate"])


def _pairs(name: str, ours: list[dict[str, str]]) -> list[tuple[dict[str, str], dict[str, str]]]:
    """(eager, Nexfort) of one card and size: for each way and config the newest that old_engine.py ran.

    Eager is that of the same run where it was as fast as the fastest on such a card, else that fastest.
    """
    found: dict[str, tuple[tuple[str, str], dict[str, str]]] = {}
    fastest: dict[tuple[str, str], dict[str, str]] = {}
    same: dict[tuple[str, ...], dict[str, str]] = {}
    for one in (r for r in ours if r["model"] == name and r["rate"] and "old_engine" in r["command"]):
        card = (one["gpu"], one["size"])
        if one["way"] in ("nexfort", "nexfort-fp8"):
            found[one["way"] + one["config"]] = (card, one)
        elif one["way"] == "eager":
            same[_run(one)] = one
            if float(one["rate"]) > float(fastest.get(card, {"rate": "0"})["rate"]):
                fastest[card] = one
    pairs = []
    for card, one in found.values():
        if card in fastest and one["cached_s"]:
            own = same.get(_run(one))
            fair = own is not None and float(own["rate"]) >= _AS_FAST * float(fastest[card]["rate"])
            pairs.append((own if own is not None and fair else fastest[card], one))
    return pairs


def _run(one: dict[str, str]) -> tuple[str, ...]:
    return tuple(one[name] for name in _RUN)


def _error(eager: dict[str, str], one: dict[str, str]) -> str:
    """Both errors to float32, or the distance to eager where one of these was not measured: no run goes without."""
    both = (eager["error_to_fp32"], one["error_to_fp32"])
    return " → ".join(both) if all(both) else f"{one['error_to_eager']} to eager"


def _own_line(family: Family, eager: dict[str, str], one: dict[str, str]) -> str:
    together = _run(eager) == _run(one)
    ratio = f"**{float(one['rate']) / float(eager['rate']):.2f}**" if together else _ELSEWHERE
    cells = [f"{family.title}, {one['size']}, {one['steps']}", ratio]
    cells += [f"{eager['rate']} → **{one['rate']}**", one["warmup_s"], one["cached_s"]]
    cells += [f"{eager['max_used_gib']} → {one['max_used_gib']}", _error(eager, one)]
    config = json.loads(one["config"])
    mode = ", ".join([config.get("mode", "O2"), *config.get("options", {})])
    fp8 = f", {one['packed']} layers in fp8" if one.get("packed") else ""
    cells += [f"Nexfort, {one['gpu']}, torch {one['torch'].split('+')[0]}, `{mode}`{fp8}, {one['date']}"]
    return "| " + " | ".join([*cells, f"`{one['command']}`"]) + " |"


def read(file: Path) -> list[dict[str, str]]:
    """The lines of a CSV; none where it is not there."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
