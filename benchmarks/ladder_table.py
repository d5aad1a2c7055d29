# SPDX-License-Identifier: Apache-2.0
"""The table of a ladder from its rows, as benchmarks.ladder prints it and as docs/benchmarks.md has it."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.rows import Row, newest_with

HEAD = (
    "| rung | first step cold / warm, s | ms/step | queued | times eager | TFLOP/s | of the ceiling | peak, GiB | "
    "error to fp32: eager / rung | to eager | remark |"
)
_PROCESSES = ("cold", "warm")
_SLACK, _KERNELS, _ON_CPU = 1.1, 2.0, 1e-4  # of the distance rule in docs/design/precision.md
_EXACT, _OTHERS = ("fp32", "eager", "noise"), ("core", "regional")


def table(rows: list[Row]) -> str:
    """One table a backbone, as Markdown; its heading names what was measured where."""
    found = []
    for backbone in dict.fromkeys(row["backbone"] for row in rows):
        own = [row for row in rows if row["backbone"] == backbone]
        rungs = by_rung(own)
        any_row = next((row for row in own if row["size"]), own[0])
        where = f"{any_row['gpu']}, torch {str(any_row['torch']).split('+')[0]}, {any_row['date']}, {any_row['commit']}"
        size = f" {any_row['size']}," if any_row["size"] else ""
        lines = [f"**{backbone}**,{size} {any_row['steps']} steps, {where}", "", HEAD]
        lines.append("|" + "---|" * (HEAD.count("|") - 1))
        found.append("\n".join(_without_empty_column([*lines, *(_line(name, rungs) for name in rungs)])))
    return "\n\n".join(found)


def _without_empty_column(lines: list[str]) -> list[str]:
    """The table without the column of errors to float32 where no run measured one."""
    place = HEAD.split("|").index(" error to fp32: eager / rung ")
    cells = [re.split(r"(?<!\\)\|", line) if line.startswith("|") else [line] for line in lines]
    if any(re.search(r"\d", row[place]) for row in cells[3:] if len(row) > place and " fp32" not in row[1]):
        return lines
    return ["|".join(row[:place] + row[place + 1 :]) for row in cells]


def by_rung(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Rung -> "cold", "warm" -> its row. What does not compile has its row under "cold"."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        name, process = ("default", row["way"]) if row["way"] in _PROCESSES else (row["way"], "cold")
        if name.endswith(", warm"):
            name, process = name.removesuffix(", warm"), "warm"
        found.setdefault(name, {})[process] = row
    return found


def _line(name: str, rungs: dict[str, dict[str, Row]]) -> str:
    cold = rungs[name].get("cold", {})
    facts = _steady(rungs, name)
    eager = _steady(rungs, "eager")
    firsts = [str(row.get("first_s", "")) for row in (cold, rungs[name].get("warm", {}))]
    # the ceiling is a product in the model's dtype, so that what computes in fp8 has none here
    share = f"{float(facts['of_ceiling']):.0%}" if facts["of_ceiling"] != "" and "O3" not in name else ""
    times = f"{_number(eager, 'ms') / _number(facts, 'ms'):.2f}" if eager and _has(facts, eager, "ms") else ""
    peak = facts["device_gib"] if facts["device_gib"] != "" else facts["peak_gib"]
    errors = [str(row.get("error_to_fp32", "")) or "-" for row in (eager, facts)]
    remarks = [text for text in (cold.get("reason"), facts["reason"], off(name, rungs)) if text]
    cells = [name, " / ".join(text for text in firsts if text), facts["ms"], facts["ms_queued"], times]
    cells += [facts["tflops"], share, peak]
    cells += [" / ".join(errors), facts["error_to_eager"], "; ".join(dict.fromkeys(remarks))]
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def off(name: str, rungs: dict[str, dict[str, Row]]) -> str:
    """Where a rung of Nexfort at equal precision is further off than the distance rule lets it, or nothing."""
    facts, eager, noise = (_steady(rungs, one) for one in (name, "eager", "noise"))
    if name in (*_EXACT, *_OTHERS) or "O3" in name or not eager:
        return ""
    if facts["gpu"] == "CPU":
        far = _has(facts, facts, "error_to_eager") and _number(facts, "error_to_eager") > _ON_CPU
        return f"over the distance rule: more than {_ON_CPU} from eager" if far else ""
    if _has(facts, eager, "error_to_fp32"):
        theirs = _number(eager, "error_to_fp32")
        if _number(facts, "error_to_fp32") > _SLACK * theirs:
            return f"over the distance rule: further from fp32 than {_SLACK} times eager"
    if noise and _has(facts, noise, "error_to_eager"):
        between = _number(noise, "error_to_eager")
        if _number(facts, "error_to_eager") > _KERNELS * between:
            return "over the distance rule: further from eager than twice what two attention kernels differ by"
    return ""


def newest(rows: list[Row]) -> list[Row]:
    """Of each backbone the rows of one ladder, which may have been taken in parts: those of one commit.

    On a GPU it is the last with ComfyUI's own compile node beside Nexfort's defaults: machines of one kind differ, and
    where the processor is slow eager alone is no measure.
    """
    own = [row for row in rows if row["command"].startswith("python -m benchmarks.ladder")]
    shown = {row["backbone"]: row["commit"] for row in own if row["gpu"] == "CPU"}
    shown |= newest_with(own, {"eager", "core", "cold"})
    return [row for row in own if shown.get(row["backbone"]) == row["commit"]]


def line_of(row: Row) -> str:
    """One process in one line, for whoever watches."""
    if row["ms"] == "":
        return f"{row['backbone']} {row['way']}: no figures: {row['reason']}"
    speed = f", {row['tflops']} TFLOP/s" if row["tflops"] != "" else ""
    error = f", {row['error_to_fp32']} from fp32" if row["error_to_fp32"] != "" else ""
    reason = f" ({row['reason']})" if row["reason"] else ""
    said = f"first step {row['first_s']} s, {row['ms']} ms/step{speed}{error}{reason}"
    return f"{row['backbone']} {row['way']}: {said}"


def _steady(rungs: dict[str, dict[str, Row]], name: str) -> Row:
    """The row whose steps count: that of the faster process; the warm one's, where they are as fast."""
    own = [row for row in (rungs.get(name, {}).get(process, {}) for process in ("warm", "cold")) if row]
    timed = [row for row in own if row["ms"] != ""]
    return min(timed, key=lambda row: float(row["ms"])) if timed else own[0] if own else {}


def _has(a: Row, b: Row, column: str) -> bool:
    return a[column] != "" and b[column] != ""


def _number(row: dict[str, Any], column: str) -> float:
    return float(row[column])
