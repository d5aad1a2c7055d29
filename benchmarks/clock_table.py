# SPDX-License-Identifier: Apache-2.0
"""The table of steps of what people run, from `prompt_clock.csv`."""

from __future__ import annotations

import csv
from pathlib import Path

CSV = Path(__file__).resolve().parent / "prompt_clock.csv"
NAMES = {
    "zimage": "Z-Image-Turbo, bfloat16",
    "zimage-int8": "Z-Image-Turbo, int8_convrot",
    "zimage-int8-lora": "Z-Image-Turbo, int8_convrot, with a LoRA",
    "qwen-int8": "Qwen-Image, int8_convrot",
    "krea2-fp8": "Krea 2, fp8",
    "klein9b-fp8": "FLUX.2 Klein 9B, fp8",
    "wan22-fp8-lora": "Wan 2.2 14B, fp8, with a LoRA",
    "sdxl": "SDXL with a LoRA",
}
HEAD = (
    "| GPU | workload | uncompiled, ms | Nexfort, ms | times as fast | distance to eager | noise floor | date, commit |"
)


def newest(file: Path = CSV) -> list[dict[str, str]]:
    """The last row of a step of each card and workload."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    with file.open(newline="", encoding="utf-8") as opened:
        for row in csv.DictReader(opened):
            if row["what"] == "step":
                found[row["card"], row["workload"]] = row
    return list(found.values())


def table(rows: list[dict[str, str]]) -> str:
    """In Markdown. A ratio is of one run."""
    lines = [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    for row in rows:
        eager, ours = float(row["eager_s"]), float(row["nexfort_s"])
        name, when = NAMES[row["workload"]], f"{row['date']}, {row['commit']}"
        figures = f"{eager * 1e3:.1f} | {ours * 1e3:.1f} | **{eager / ours:.2f}x**"
        far = " | ".join(f"{float(row[kind]):.4g}" for kind in ("distance", "noise_floor"))
        lines.append(f"| {row['card']} | {name} | {figures} | {far} | {when} |")
    return "\n".join(lines)
