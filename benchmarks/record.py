# SPDX-License-Identifier: Apache-2.0
"""Run backbones the several ways, each in a process of its own, print one table and append it to results.csv.

    COMFYUI_PATH=... python -m benchmarks.record sdxl flux --ways fp32,eager,noise,core,cold,warm --csv results.csv

`cold` and `warm` are Nexfort with an empty cache directory and, in a second process, with the one that the first left.
What each switch of the config does is for benchmarks.ladder; this is for conditions that a whole run is under.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rows import COLUMNS, append_rows, child, commit, distance, row_of


def main() -> int:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbones", nargs="+")
    parser.add_argument("--ways", default="fp32,eager,noise,core,cold,warm")
    parser.add_argument("--options", default="", help="options of Nexfort as JSON")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--csv", default="", help="file to append to")
    parser.add_argument("--commit", default="", help="what was measured; default: git's HEAD")
    parser.add_argument("--log", default="", help="folder for the full output of each run")
    parser.add_argument("--sweep", default="")
    parser.add_argument("--dynamic-vram", action="store_true", help="with ComfyUI's dynamic VRAM on; the ways say so")
    parser.add_argument("--budget", type=float, default=0.0, help="GiB of the card that are left free; the ways say so")
    parser.add_argument("--lora", action="store_true", help="also print the seconds of steps after a strength changed")
    args = parser.parse_args()
    rows = []
    for backbone in args.backbones:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(backbone, args, Path(folder))
    if args.csv:
        append_rows(Path(args.csv), rows, COLUMNS)
    return 0 if all(row["ms"] for row in rows) else 1


def measure(backbone: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row for each way; a way that failed has no figures and its reason on standard error."""
    rows: list[dict[str, Any]] = []
    for way in args.ways.split(","):
        found = run(backbone, way, args, folder)
        report = found.get("report") or {}
        row = row_of(
            found,
            way=", ".join([way, *_conditions(args)]),
            backbone=backbone,
            commit=commit(args.commit),
            command=command_line(backbone, args),
            error_to_fp32=distance(folder / f"{way}.pt", folder / "fp32.pt"),
            error_to_eager=distance(folder / f"{way}.pt", folder / "eager.pt"),
        )
        rows.append(row)
        if found.get("lora_s"):
            rows.append(lora_row(row, found))
        shown = {k: row[k] for k in COLUMNS[4:] if row[k] != "" and k != "command"}
        more = ("sweep", "compiled_after_sweep", "lora_s", "compiled_by_lora")
        print(json.dumps(shown), *(f"{k}={found[k]}" for k in more if k in found), flush=True)
        for reason in report.get("eager", []) + report.get("variants", []) + report.get("notes", []):
            print("   ", reason, flush=True)
    return rows


def lora_row(row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """A row whose first step is the one after a LoRA's strength changed: the median, weights patched anew included."""
    kept = {name: row[name] for name in COLUMNS[:7]} | {name: row[name] for name in ("options", "command")}
    way = f"{row['way']}, LoRA's strength changed"
    compiled = found.get("compiled_by_lora", "")
    return dict.fromkeys(COLUMNS, "") | kept | {
        "way": way, "first_s": statistics.median(found["lora_s"]), "ms": row["ms"], "compiled": compiled,
    }  # fmt: skip


def _conditions(args: argparse.Namespace) -> list[str]:
    """Under what a way was run, where it is not a card that holds all."""
    found = ["dynamic VRAM"] if args.dynamic_vram else []
    return found + ([f"{args.budget:g} GiB"] if args.budget else [])


def run(backbone: str, way: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the process of one way measured."""
    real = "nexfort" if way in ("cold", "warm") else way
    flags = ["--steps", str(args.steps), *(["--dynamic-vram"] if args.dynamic_vram else [])]
    flags += ["--budget", str(args.budget)] if args.budget else []
    flags += ["--lora"] if args.lora else []
    if real == "nexfort":
        flags += ["--options", args.options]
        flags += ["--sweep", args.sweep] if args.sweep else []
    log = Path(args.log) / f"{backbone}_{way}.log" if args.log else None
    return child(backbone, real, flags, latent=folder / f"{way}.pt", caches=folder / real, log=log)


def command_line(backbone: str, args: argparse.Namespace) -> str:
    """The command that gives such rows again."""
    options = f" --options '{args.options}'" if args.options else ""
    options += " --dynamic-vram" if args.dynamic_vram else ""
    options += f" --budget {args.budget}" if args.budget else ""
    options += " --lora" if args.lora else ""
    return f"python -m benchmarks.record {backbone} --ways {args.ways} --steps {args.steps}{options}"


if __name__ == "__main__":
    sys.exit(main())
