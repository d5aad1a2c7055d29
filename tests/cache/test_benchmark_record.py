# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks on disk: the last ones, only what is a result, and one sentence where they cannot be read."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest

from nexfort_engine.cache import benchmark_record
from nexfort_engine.cache.benchmark_record import FILE, MOST, add, is_result, read
from nexfort_engine.cache.speed_record import FOLDER


def result(**given: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"workflow": "w", "mode": "O2", "size": "8x8", "device": "a card", "at": 5.0, "steps": 8}
    return {**known, "runs": [[False, 2.0], [True, 1.0]], **given}


def test_the_last_results_are_kept(tmp_path: Path) -> None:
    assert read(tmp_path) == ([], "")
    for number in range(MOST + 2):
        assert add(tmp_path, result(at=float(number)))
    rows, lost = read(tmp_path)
    assert [row["at"] for row in rows] == [float(number) for number in range(2, MOST + 2)] and lost == ""


WRONG = {
    "no runs": {"runs": []},
    "one kind": {"runs": [[True, 1.0], [True, 2.0]]},
    "no time": {"runs": [[True, 0.0], [False, 1.0]]},
    "no number": {"runs": [[True, math.nan], [False, 1.0]]},
    "no flag": {"runs": [[1, 1.0], [False, 1.0]]},
    "long": {"mode": "x" * 200},
    "no text": {"size": 5},
    "no steps": {"steps": 0},
    "half a step": {"steps": 1.5},
    "more": {"more": 1},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_no_result_is_none(wrong: dict[str, Any]) -> None:
    assert is_result(result()) and not is_result(result(**wrong))


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1, "rows": [{}]}', '{"format": 2, "rows": []}'])
def test_a_damaged_file_is_told_in_one_sentence_and_made_again(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, result())
    (tmp_path / FOLDER / FILE).write_text(content)
    with caplog.at_level(logging.INFO, "nexfort"):
        for _ in range(2):  # as often as somebody opens the report
            rows, lost = read(tmp_path)
            assert rows == [] and lost.startswith(f"Earlier benchmarks cannot be read: {FILE} is damaged.")
    assert [FILE in record.message for record in caplog.records] == [True]
    assert add(tmp_path, result()) and read(tmp_path) == ([result()], "")


def test_a_damaged_result_costs_no_other(tmp_path: Path) -> None:
    rows = [result(at=1.0), result(steps=0), result(at=2.0)]
    add(tmp_path, result())
    file = tmp_path / FOLDER / FILE
    file.write_text(json.dumps({"format": 1, "rows": rows}))
    lost = f"Some earlier benchmarks cannot be read: {FILE} is damaged. The next benchmark makes it anew."
    assert read(tmp_path) == ([rows[0], rows[2]], lost)
    assert add(tmp_path, result(at=3.0)) and read(tmp_path) == ([rows[0], rows[2], result(at=3.0)], "")


@pytest.mark.skipif(os.name != "posix", reason="owners and kinds of files are POSIX's here")
def test_what_others_could_have_written_is_not_read(tmp_path: Path) -> None:
    add(tmp_path, result())
    (tmp_path / FOLDER / FILE).chmod(0o666)
    rows, lost = read(tmp_path)
    assert rows == [] and lost.startswith(f"Earlier benchmarks cannot be read: {FILE} is not yours alone.")


def test_a_place_that_takes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(benchmark_record, "update", full)
    assert not add(tmp_path, result())
