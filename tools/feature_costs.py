# SPDX-License-Identifier: Apache-2.0
"""Counts what each feature costs, and writes it beside its gain: `python3 tools/feature_costs.py`.

The page is docs/design/features.md. A feature's row names its files of code and of tests; a folder stands for all
Python files below it, and `without` takes a file out. Empty lines do not count. Where the cell of the switch begins
with an option or a mode token, the gain is that of the catalogue, and so is whether an option is off. Others are
copied from `benchmarks/history.md`, and `tests/test_features.py` looks each up there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nexfort_engine.config.option_catalogue import MODE_GAINS, OFF, OPTION_ROWS  # noqa: E402  it need not be installed

PAGE = ROOT / "docs" / "design" / "features.md"
COLUMNS = 7  # feature, switch, gain, lines, lines of tests, code, tests
_SWITCH = re.compile(r"`([^`]+)`")
_STATE = re.compile(r"^(`[^`]+`)(?: \((?:on|off)\))?")
_NAMED = re.compile(r"(without )?`([^`]+)`")


def counted(text: str) -> str:
    """The page with its two columns of lines as they are now. Raises FileNotFoundError for a file that is gone."""
    return "\n".join(_changed(line, _counts) for line in text.split("\n"))


def with_gains(text: str) -> str:
    """The page with the gains of options and modes as the catalogue has them."""
    return "\n".join(_changed(line, _gain) for line in text.split("\n"))


def with_switches(text: str) -> str:
    """The page with "(off)" behind each option that begins a switch's cell and that the catalogue has off."""
    return "\n".join(_changed(line, _switch) for line in text.split("\n"))


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


def _changed(line: str, change: Callable[[list[str]], None]) -> str:
    cells = _cells(line)
    if len(cells) != COLUMNS or not cells[3].isdecimal():
        return line
    change(cells)
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _counts(cells: list[str]) -> None:
    cells[3:5] = [str(sum(map(_lines, files_of(cell)))) for cell in cells[5:]]


def _gain(cells: list[str]) -> None:
    named = _SWITCH.match(cells[1])
    if named is not None:
        name = named[1]
        cells[2] = OPTION_ROWS[name].gain if name in OPTION_ROWS else MODE_GAINS.get(name, cells[2])


def _switch(cells: list[str]) -> None:
    named = _SWITCH.match(cells[1])
    if named is not None and named[1] in OPTION_ROWS:
        state = " (off)" if OPTION_ROWS[named[1]].default == OFF else ""
        cells[1] = _STATE.sub(rf"\1{state}", cells[1])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def _lines(file: Path) -> int:
    return sum(1 for line in file.read_text(encoding="utf-8").splitlines() if line.strip())


def main() -> int:
    """The command."""
    before = PAGE.read_text(encoding="utf-8")
    after = with_switches(with_gains(counted(before)))
    PAGE.write_text(after, encoding="utf-8")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} {'is as it was' if after == before else 'was brought up to date'}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
