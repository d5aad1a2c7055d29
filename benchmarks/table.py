# SPDX-License-Identifier: Apache-2.0
"""README's tables, from results.csv: `python -m benchmarks.table` prints them, `--write` puts them into README.md.

For each backbone the newest figures that were taken together count; nothing is averaged or left out by hand. The second
table is that of the last ladder (benchmarks.ladder) on each backbone; the picture beside them is benchmarks.chart's.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from benchmarks import ladder_table
from benchmarks.rows import newest_with

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results.csv"
BEGIN, END = "<!-- measured:", "<!-- end of measured -->"
LADDER, LADDER_END = "<!-- ladder:", "<!-- end of ladder -->"
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


def read(file: Path) -> list[dict[str, str]]:
    """All rows; a column that a row was written without is empty."""
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream, restval=""))


def usual(file: Path) -> list[dict[str, str]]:
    """The rows with figures of what a user gets: without options of its own."""
    return [row for row in read(file) if row["ms"] and not row["options"]]


def together(all_rows: list[dict[str, str]]) -> dict[str, str]:
    """Backbone -> the newest commit with which all ways were run; a backbone of which there is none is not in it."""
    return newest_with(all_rows, {"eager", "core", "cold", "warm"})


def rows(file: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Backbone -> way -> its figures: those that were taken together, and what these lack from before."""
    all_rows = usual(file)
    newest = together(all_rows)
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


def ladder(file: Path) -> str:
    """The last ladder of each backbone as Markdown; one line where there is none yet."""
    found = ladder_table.newest(read(file))
    return ladder_table.table(found) if found else "No ladder was taken yet: `python -m benchmarks.ladder` takes one."


def put(page: str, begin: str, end: str, text: str) -> str:
    """A page with `text` between two marks of it; what the first mark says stays."""
    before, found, rest = page.partition(begin)
    comment, _, rest = rest.partition("-->")
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no {begin} ... --> and after it {end}; expected both, put them back")
    return f"{before}{begin}{comment}-->\n\n{text}\n\n{end}{after}"


def written(page: str, file: Path) -> str:
    """A README with the tables of a file in their places."""
    return put(put(page, BEGIN, END, table(file)), LADDER, LADDER_END, ladder(file))


def main() -> int:
    """Print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    args = parser.parse_args()
    if not args.write:
        print(table(RESULTS), ladder(RESULTS), sep="\n\n")
        return 0
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
