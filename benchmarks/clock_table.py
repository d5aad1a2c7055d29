# SPDX-License-Identifier: Apache-2.0
"""The tables of what people run: steps and whole prompts, from `prompt_clock.csv`, and VAEs, from `vae.csv`."""

from __future__ import annotations

import csv
from pathlib import Path

CSV = Path(__file__).resolve().parent / "prompt_clock.csv"
VAES = CSV.with_name("vae.csv")
NAMES = {
    "zimage": "Z-Image-Turbo, bfloat16",
    "zimage-int8": "Z-Image-Turbo, int8_convrot",
    "zimage-int8-lora": "Z-Image-Turbo, int8_convrot, with a LoRA",
    "qwen-int8": "Qwen-Image, int8_convrot",
    "qwen-edit-int8": "Qwen-Image-Edit, int8_convrot, one reference",
    "krea2-fp8": "Krea 2, fp8",
    "klein9b-fp8": "FLUX.2 Klein 9B, fp8",
    "wan22-fp8-lora": "Wan 2.2 14B, fp8, with a LoRA",
    "ltx23-fp8": "LTX-2.3, fp8",
    "h3-int8": "MiniMax-H3, int8_convrot",
    "sdxl": "SDXL with a LoRA",
}
HEAD = "| GPU | workload | uncompiled, ms | Nexfort, ms | times as fast | difference | noise floor | date, commit |"
PROMPTS = "| GPU | workload | prompt | uncompiled, s | Nexfort, s | times as fast | GPU memory, GiB | date, commit |"
VAE_HEAD = (
    "| GPU | VAE of | what | uncompiled, s | Nexfort, s | times as fast | first, waiting, s | GPU memory, GiB "
    "| difference | date, commit |"
)


def newest(file: Path = CSV, *, steps: bool = True) -> list[dict[str, str]]:
    """The last row of each workload, whatever the card: of its step, or of each kind of prompt.

    Of a step the last with a noise floor, where there is one: a distance says little without it.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    with file.open(newline="", encoding="utf-8") as opened:
        for row in csv.DictReader(opened):
            key = row["workload"], row["what"]
            says_less = steps and not row["noise_floor"] and key in found and found[key]["noise_floor"]
            if (row["what"] == "step") is steps and not says_less:
                found[key] = row
    return list(found.values())


def table(rows: list[dict[str, str]]) -> str:
    """In Markdown. A ratio is of one run."""
    lines = [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    for row in rows:
        eager, ours = float(row["eager_s"]), float(row["nexfort_s"])
        figures = f"{eager * 1e3:.1f} | {ours * 1e3:.1f} | **{eager / ours:.2f}x**"
        far = " | ".join(f"{float(row[kind]):.4g}" if row[kind] else "-" for kind in ("distance", "noise_floor"))
        lines.append(f"| {row['card']} | {NAMES[row['workload']]} | {figures} | {far} | {_when(row)} |")
    return "\n".join(lines)


def prompts(rows: list[dict[str, str]]) -> str:
    """In Markdown. A ratio is of one run."""
    lines = [PROMPTS, "|---" * PROMPTS.count(" | ") + "|---|"]
    for row in rows:
        eager, ours = float(row["eager_s"]), float(row["nexfort_s"])
        memory = f"{row['gib_eager']} / {row['gib_nexfort']}"
        figures = f"{eager:.2f} | {ours:.2f} | {eager / ours:.2f}x | {memory}"
        lines.append(f"| {row['card']} | {NAMES[row['workload']]} | {row['what']} | {figures} | {_when(row)} |")
    return "\n".join(lines)


def vaes(file: Path = VAES) -> str:
    """In Markdown, the last row of each VAE and number of frames. A ratio is of one run."""
    with file.open(newline="", encoding="utf-8") as opened:
        last = {(row["workload"], row["what"], row["frames"]): row for row in csv.DictReader(opened)}
    lines = [VAE_HEAD, "|---" * VAE_HEAD.count(" | ") + "|---|"]
    for row in last.values():
        eager, ours = float(row["eager_s"]), float(row["nexfort_s"])
        many = f"{row['frames']} frames of " if row["frames"] != "1" else ""
        what = f"{row['what']} {many}{row['size']}"
        memory = f"{row['gib_eager']} / {row['gib_nexfort']}" if row["gib_eager"] else "-"
        figures = f"{eager:.3f} | {ours:.3f} | **{eager / ours:.2f}x** | {row['first_s'] or '-'} | {memory}"
        far = row["distance"] or "-"
        lines.append(f"| {row['card']} | {NAMES[row['workload']]} | {what} | {figures} | {far} | {_when(row)} |")
    return "\n".join(lines)


def _when(row: dict[str, str]) -> str:
    return f"{row['date']}, {row['commit']}"
