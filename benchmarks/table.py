# SPDX-License-Identifier: Apache-2.0
"""README's table, from results.csv: `python -m benchmarks.table` prints it, `--write` puts it into README.md.

For each backbone the newest figures that were taken together count; nothing is averaged or left out by hand.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured:", "<!-- end of measured -->"
NAMES = {
    "sdxl": "SDXL, batch 2",
    "flux": "Flux-dev, batch 1",
    "pixart": "PixArt-XL, batch 2",
    "sd_vae": "SD/SDXL VAE, a whole `VAE.decode`",
    "sd21": "SD2.1, batch 2",
    "wan": "Wan2.1-1.3B, batch 2",
}
HEAD = (
    "| GPU, torch, date | model | size | eager, ms | ComfyUI's TorchCompileModel, ms (first step, s) | Nexfort, ms | "
    "Nexfort's first step cold / warm, s | error to fp32: eager / Nexfort |"
)


def rows(file: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Backbone -> way -> its figures: of the newest commit with which all ways were run, and what it lacks from before.

    Machines of one kind differ, above all in their processors: figures are compared that were taken together.
    """
    with file.open(newline="") as stream:
        all_rows = list(csv.DictReader(stream))
    ways_of: dict[tuple[str, str], set[str]] = {}
    for row in all_rows:
        ways_of.setdefault((row["backbone"], row["commit"]), set()).add(row["way"])
    together = [key for key, ways in ways_of.items() if ways >= {"eager", "core", "cold", "warm"}]
    newest = dict(together)  # the file grows at its end
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in sorted(all_rows, key=lambda row: newest.get(row["backbone"]) == row["commit"]):  # those come last
        figures = found.setdefault(row["backbone"], {}).setdefault(row["way"], {})
        figures.update({name: value for name, value in row.items() if value})
    return found


def table(file: Path) -> str:
    """The table as Markdown."""
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for name, ways in rows(file).items():
        eager, core, cold, warm = (ways.get(way, {}) for way in ("eager", "core", "cold", "warm"))
        facts = warm or cold
        errors = [found.get("error_to_fp32") or "not measured" for found in (eager, facts)]
        cells = [
            f"{facts['gpu']}, {facts['torch'].split('+')[0]}, {facts['date']}",
            NAMES.get(name, name),
            facts["size"],
            eager.get("ms", ""),
            f"{core.get('ms', '')} ({core.get('first_s', '')})",
            f"**{facts['ms']}**",
            f"{cold.get('first_s', '')} / {warm.get('first_s', '')}",
            " / ".join(errors),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    text = table(ROOT / "benchmarks" / "results.csv")
    if not args.write:
        print(text)
        return 0
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    comment, _, rest = rest.partition("-->")
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}{comment}-->\n\n{text}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
