# SPDX-License-Identifier: Apache-2.0
"""Counts what each feature costs, and writes the counts into docs/design/features.md: `python3 tools/feature_costs.py`.

A feature's row names its files of code and of tests; a folder stands for all Python files below it, and `without` takes
a file out. Empty lines do not count. The gains on the page are copied from the changelog by hand, and stay as they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "design" / "features.md"
COLUMNS = 7  # feature, switch, gain, lines, lines of tests, code, tests
_NAMED = re.compile(r"(without )?`([^`]+)`")


def counted(text: str) -> str:
    """The page with its two columns of lines as they are now. Raises FileNotFoundError for a file that is gone."""
    return "\n".join(_counted_row(line) for line in text.split("\n"))


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each feature's row."""
    for line in text.split("\n"):
        cells = _cells(line)
        if len(cells) == COLUMNS and cells[3].isdecimal():
            yield cells


def files_of(cell: str) -> list[Path]:
    """The files that a cell names."""
    found: set[Path] = set()
    for without, name in _NAMED.findall(cell):
        place = ROOT / name
        named = set(place.rglob("*.py")) if name.endswith("/") else {place}
        found = found - named if without else found | named
    return sorted(found)


def _counted_row(line: str) -> str:
    cells = _cells(line)
    if len(cells) != COLUMNS or not cells[3].isdecimal():
        return line
    cells[3:5] = [str(sum(map(_lines, files_of(cell)))) for cell in cells[5:]]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def _lines(file: Path) -> int:
    return sum(1 for line in file.read_text(encoding="utf-8").splitlines() if line.strip())


def main() -> int:
    """The command."""
    before = PAGE.read_text(encoding="utf-8")
    after = counted(before)
    PAGE.write_text(after, encoding="utf-8")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} {'is as it was' if after == before else 'was brought up to date'}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
