# SPDX-License-Identifier: Apache-2.0
"""How long compiles took, on disk: by the work, the last ones, bounded, of one's own files alone."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from nexfort_engine.cache import compile_times
from nexfort_engine.cache.compile_times import EACH, FILE, MOST, MOST_BLOCKS, name_of, note, read
from nexfort_engine.cache.speed_record import FOLDER

ENDS = [1.0, 2.5, 3.0]


def test_the_last_compiles_of_each_work_are_kept(tmp_path: Path) -> None:
    assert read(tmp_path) == {}
    for number in range(EACH + 2):
        note(tmp_path, "a", [1.0 + number, 9.0])
    note(tmp_path, "b", ENDS)
    assert read(tmp_path) == {"a": [[1.0 + number, 9.0] for number in range(2, EACH + 2)], "b": [ENDS]}


def test_a_name_says_family_mode_device_and_kinds_of_blocks() -> None:
    assert name_of("Flux", "O2", "cuda", ["Single", "Double", "Single"]) == "Flux O2 cuda: Double, Single"
    assert len(name_of("Flux", "O2", "cuda", map(str, range(1000)))) <= 300


def test_there_is_an_end_to_it(tmp_path: Path) -> None:
    for number in range(MOST + 3):
        note(tmp_path, str(number), ENDS)
    assert list(read(tmp_path)) == [str(number) for number in range(3, MOST + 3)]
    note(tmp_path, "large", [float(number + 1) for number in range(MOST_BLOCKS + 1)])
    assert "large" not in read(tmp_path)


@pytest.mark.parametrize("ends", [[], [1.0], [2.0, 1.0], [0.0, 1.0], [1.0, float("nan")]])
def test_what_is_no_compile_is_not_kept(tmp_path: Path, ends: list[float]) -> None:
    note(tmp_path, "a", ends)
    assert read(tmp_path) == {}


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", '{"format": 1}', '{"format": 2, "compiles": {"a": [[1, 2]]}}', '{"format": 1, "compiles": []}'),
        *(json.dumps({"format": 1, "compiles": {"a": bad}}) for bad in (1, [1], [[2, 1]], [[True, 2]], [["1", "2"]])),
    ],
)
def test_a_damaged_file_is_ignored_and_made_again(tmp_path: Path, content: str) -> None:
    note(tmp_path, "a", ENDS)
    (tmp_path / FOLDER / FILE).write_text(content)
    assert read(tmp_path) == {}
    note(tmp_path, "b", ENDS)
    assert read(tmp_path) == {"b": [ENDS]}


@pytest.mark.skipif(os.name != "posix", reason="owners and kinds of files are POSIX's here")
def test_what_others_could_have_written_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    note(tmp_path, "a", ENDS)
    (tmp_path / FOLDER / FILE).chmod(0o666)
    with caplog.at_level(logging.INFO, "nexfort"):
        assert read(tmp_path) == {}
    assert "0666" in caplog.records[0].message


def test_a_place_that_takes_nothing_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compile_times, "update", full)
    note(tmp_path, "a", ENDS)
    (tmp_path / "file").write_text("")
    assert read(tmp_path) == {} == read(tmp_path / "file")
