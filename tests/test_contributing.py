# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md names every file that the twelve usual changes touch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST = 5
CHANGES = (
    *("a pass", "a kernel for another card", "a host", "a stale result", "an option", "a part of a cache key"),
    *("a widget", "a language", "a benchmark", "the memory budget", "a quantised tensor type", "a new torch"),
)
ROWS = dict(
    re.findall(r"^\| (an? [^|]+|the [^|]+) \| ([^|]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
)


def paths(files: str) -> list[str]:
    """What a row names as files and folders."""
    named = re.findall(r"`([^`]+)`", files)
    return [name for name in named if name.endswith(("/", ".py", ".md", ".txt", ".json", ".csv"))]


def touched(files: str) -> int:
    """How many files a row has changed by hand: those that it names, and says of what they are. Not its asides."""
    by_hand = re.sub(r" \([^)]*\)|; then run .*", "", files)
    return len(paths(by_hand)) + len(re.findall(r"\bthe (?:file|test) (?:that|of)\b", by_hand))


def _is_there(name: str) -> bool:
    """Whether a path is there, in the engine or the project; of one with a name of the reader's own its folder."""
    known = name.partition("<")[0].rpartition("/")[0] if "<" in name else name
    return any((root / known).exists() for root in (ROOT / "nexfort_engine", ROOT))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_has_a_row_whose_files_are_there(change: str) -> None:
    (files,) = [files for name, files in ROWS.items() if name.startswith(change)]
    found = paths(files)
    assert found
    assert [name for name in found if not _is_there(name)] == []


@pytest.mark.parametrize("change", [change for change in CHANGES if change != "a widget"])
def test_a_change_touches_five_files_at_most(change: str) -> None:
    (files,) = [files for name, files in ROWS.items() if name.startswith(change)]
    assert 1 <= touched(files) <= MOST


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ("`a.py`, `b.py` and `c/` (or `d.py`); `e.md`", 4),
        ("the row of `a.md`, the file that the row names, the test of that file", 3),
        ("`a.csv` for this, `b.json` and each other's; then run `python -m c` and `d.py`", 2),
    ],
)
def test_files_are_counted_however_they_are_strung_together(files: str, count: int) -> None:
    assert touched(files) == count


def test_there_are_twelve() -> None:
    assert len(ROWS) == len(CHANGES) == 12
