# SPDX-License-Identifier: Apache-2.0
"""Times of steps on disk: the last of each, bounded, fresh, of one's own files alone, whoever writes besides."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nexfort_engine.cache import speed_record
from nexfort_engine.cache.speed_record import DAYS, FILE, FOLDER, MOST, blank, read, write
from nexfort_engine.reporting.speed import HOW

MADE_ANEW = f" and is made anew; to compare again, {HOW}"


def rows(root: Path) -> dict[str, dict[str, Any]]:
    return read(root)[0]


def row(**given: Any) -> dict[str, Any]:
    now = time.time()
    return blank(compiled=0.5, compiled_at=now, eager=1.0, eager_at=now, source="verified", **given)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    assert rows(tmp_path) == {}
    mine = row(model="Flux", mode="O2", device="a card", sizes=[[1, 4, 8, 8]], recent=[[1.0, 0.5]])
    write(tmp_path, {"a": {**mine, "reason": "not kept"}}, {})
    assert rows(tmp_path) == {"a": mine}


def test_the_last_time_of_each_counts_and_counts_add_up(tmp_path: Path) -> None:
    ours = row(steps=3, pictures=1, saved=1.5)
    write(tmp_path, {"a": ours}, {"a": {"steps": 3}})
    theirs = {**ours, "compiled": 0.25, "compiled_at": ours["compiled_at"] + 5, "eager": 9.0, "eager_at": 1.0}
    write(tmp_path, {"a": theirs}, {"a": {"steps": 2, "pictures": 1, "saved": 0.5}})
    found = rows(tmp_path)["a"]
    assert (found["compiled"], found["eager"], found["source"]) == (0.25, 1.0, "verified")
    assert (found["steps"], found["pictures"], found["saved"]) == (5, 2, 2.0)


def test_processes_that_write_at_once_lose_nothing_of_each_other(tmp_path: Path) -> None:
    threads = [threading.Thread(target=write, args=(tmp_path, {str(n): row()}, {})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(rows(tmp_path)) == [str(n) for n in range(8)]


def test_what_is_old_goes_and_there_is_an_end_to_it(tmp_path: Path) -> None:
    old = time.time() - DAYS * 86400 - 10
    write(tmp_path, {"half": {**row(), "eager_at": old}, "all": {**row(), "eager_at": old, "compiled_at": old}}, {})
    found = rows(tmp_path)
    assert list(found) == ["half"] and found["half"]["eager"] is None and found["half"]["compiled"] == 0.5
    write(tmp_path, {str(n): {**row(), "compiled_at": time.time() + n} for n in range(MOST + 5)}, {})
    assert len(rows(tmp_path)) == MOST and "4" not in rows(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 2, "rows": {}}',
        '{"format": 1, "rows": {"a": {}}}',
        json.dumps({"format": 1, "rows": {"a": {**row(), "compiled": "fast"}}}),
        json.dumps({"format": 1, "rows": {"a": {**row(), "compiled": -1.0}}}),
        json.dumps({"format": 1, "rows": {"a": {**row(), "steps": True}}}),
        json.dumps({"format": 1, "rows": {"a": {**row(), "recent": [[1.0]]}}}),
        json.dumps({"format": 1, "rows": {"a": {**row(), "saved": float("nan")}}}),
    ],
)
def test_a_damaged_file_is_told_in_one_sentence_and_one_line_and_made_again(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {"a": row()}, {})
    (tmp_path / FOLDER / FILE).write_text(content)
    with caplog.at_level(logging.INFO, "nexfort"):
        for _ in range(2):
            assert read(tmp_path) == ({}, f"earlier times of steps are lost: {FILE} is damaged{MADE_ANEW}")
    assert [FILE in record.message for record in caplog.records] == [True]
    write(tmp_path, {"b": row()}, {})
    found, lost = read(tmp_path)
    assert list(found) == ["b"] and lost == ""


def test_a_damaged_row_costs_no_other(tmp_path: Path) -> None:
    sound = row(mode="O2")
    write(tmp_path, {"a": sound}, {})
    (tmp_path / FOLDER / FILE).write_text(json.dumps({"format": 1, "rows": {"a": sound, "b": {**row(), "made": "?"}}}))
    assert read(tmp_path) == ({"a": sound}, f"some earlier times of steps are lost: {FILE} is damaged{MADE_ANEW}")
    write(tmp_path, {"c": row()}, {})
    found, lost = read(tmp_path)
    assert list(found) == ["a", "c"] and lost == ""


@pytest.mark.skipif(os.name != "posix", reason="owners and kinds of files are POSIX's here")
def test_what_others_could_have_written_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"a": row()}, {})
    file = tmp_path / FOLDER / FILE
    file.chmod(0o666)
    with caplog.at_level(logging.INFO, "nexfort"):
        assert read(tmp_path) == ({}, f"earlier times of steps are lost: {FILE} is not yours alone{MADE_ANEW}")
    assert "0666" in caplog.records[0].message
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o600)
    assert rows(tmp_path) == {}


def test_what_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a": row()}, {})
    refused = {tmp_path / FOLDER / FILE: f"earlier times of steps are lost: {FILE} may not be read by you{MADE_ANEW}"}
    refused[tmp_path / FOLDER] = ""  # whoever writes there is told why
    own_stat, own_open = Path.stat, os.open
    for denied, said in refused.items():

        def check(path: Any, denied: Path = denied) -> None:
            if Path(path) == denied:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", lambda self, **how: (check(self), own_stat(self, **how))[1])
            patch.setattr(os, "open", lambda path, *rest, **how: (check(path), own_open(path, *rest, **how))[1])
            assert read(tmp_path) == ({}, said), denied
    assert list(read(tmp_path)[0]) == ["a"]


def test_a_place_that_takes_nothing_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(speed_record, "update", full)
    write(tmp_path, {"a": row()}, {})
    (tmp_path / "file").write_text("")
    write(tmp_path / "file", {"a": row()}, {})
    assert rows(tmp_path) == {} == rows(tmp_path / "file")
