# SPDX-License-Identifier: Apache-2.0
"""The one source of figures in documents: `python -m benchmarks.figures --write` fills marked blocks from the CSVs.

A block begins with `<!-- figures: NAME -->` and ends with `<!-- end of figures -->`, in any Markdown file of the
project. Without `--write` the command names blocks that differ from the CSVs, and ends with 1 where there is one.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import chart, clock_table, kernels_ahead, ladder_table, old_table, ratios

ROOT = ratios.ROOT
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)
BLOCKS: dict[str, Callable[[], str]] = {
    "ratios": lambda: f"{ratios.table()}\n\n{ratios.taken()}",
    "steps": lambda: clock_table.table(clock_table.newest()),
    "prompts": lambda: clock_table.prompts(clock_table.newest(steps=False)),
    "vaes": clock_table.vaes,
    "low-precision": ratios.low_precision,
    "kernels": lambda: kernels_ahead.table(kernels_ahead.read()),
    "ladder": lambda: ladder_table.table(ladder_table.newest(ratios.read())),
    "old-engine": lambda: old_table.table(old_table.read(old_table.PUBLISHED), old_table.read(old_table.RESULTS)),
}


def pages() -> Iterator[Path]:
    """Every Markdown file of the project."""
    for place, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("build", "demo-output")]
        yield from (Path(place, name) for name in sorted(files) if name.endswith(".md"))


def written(text: str) -> str:
    """A page with its blocks as the CSVs have them. Raises ValueError for a block of an unknown name."""

    def fill(block: re.Match[str]) -> str:
        begin, name, _, end = block.groups()
        if name not in BLOCKS:
            raise ValueError(f"there are no figures {name!r}; expected one of {', '.join(BLOCKS)}")
        return f"{begin}\n{BLOCKS[name]()}\n\n{end}"

    return BLOCK.sub(fill, text)


def main(argv: list[str] | None = None) -> int:
    """Compare or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="fill the blocks, and draw the chart")
    write = parser.parse_args(argv).write
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            stale.append(page)
            if write:
                page.write_text(new, encoding="utf-8")
    drawn = chart.chart(ratios.RESULTS)
    if not chart.PICTURE.exists() or chart.PICTURE.read_text(encoding="utf-8") != drawn:
        stale.append(chart.PICTURE)
        if write:
            chart.PICTURE.write_text(drawn, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'written' if write else 'differs from the CSVs'}")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
