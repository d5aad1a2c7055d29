# SPDX-License-Identifier: Apache-2.0
"""Which rows of the prompt clock stand in the tables."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import clock_table
from benchmarks.prompt_clock import COLUMNS


@pytest.mark.parametrize(
    ("floors", "stays"),
    [(("0.1", ""), 0), (("", "0.1"), 1), (("0.1", "0.2"), 1), (("", ""), 1), (("0.1", "", "0.2"), 2)],
)
def test_a_step_with_a_noise_floor_is_not_followed_by_one_without(
    floors: tuple[str, ...], stays: int, tmp_path: Path
) -> None:
    file = tmp_path / "clock.csv"
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, COLUMNS, restval="")
        writer.writeheader()
        for what in ("step", "new seed"):
            for at, floor in enumerate(floors):
                writer.writerow({"workload": "sdxl", "what": what, "commit": str(at), "noise_floor": floor})
    assert [row["commit"] for row in clock_table.newest(file)] == [str(stays)]
    assert [row["commit"] for row in clock_table.newest(file, steps=False)] == [str(len(floors) - 1)]
