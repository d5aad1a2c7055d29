# SPDX-License-Identifier: Apache-2.0
"""Names of model files for what the cache holds: the last used first, bounded, of one's own file alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from nexfort_engine.cache.model_names import EACH, FILE, FOLDER, MOST, note, read


def test_names_are_kept_by_backbone_the_last_used_first(tmp_path: Path) -> None:
    assert read(tmp_path) == ({}, {})
    for name in ("a.safetensors", "b.safetensors", "a.safetensors"):
        note(tmp_path, ["k", "l"], name)
    assert read(tmp_path) == ({key: ["a.safetensors", "b.safetensors"] for key in ("k", "l")}, {})


def test_the_node_that_compiled_it_is_known(tmp_path: Path) -> None:
    note(tmp_path, ["k"], "a.safetensors", "NexfortCompileVAE")
    note(tmp_path, ["l"], "a.safetensors")
    assert read(tmp_path)[1] == {"k": "NexfortCompileVAE"}
    note(tmp_path, ["k"], "b.safetensors", "NexfortCompileModel")
    assert read(tmp_path) == (
        {"l": ["a.safetensors"], "k": ["b.safetensors", "a.safetensors"]},
        {"k": "NexfortCompileModel"},
    )


def test_there_is_an_end_to_them(tmp_path: Path) -> None:
    for number in range(EACH + 2):
        note(tmp_path, ["k"], f"{number}.safetensors")
    assert len(read(tmp_path)[0]["k"]) == EACH
    note(tmp_path, [str(number) for number in range(MOST)], "a.safetensors")
    assert len(read(tmp_path)[0]) == MOST and "k" not in read(tmp_path)[0]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1, "names": {"k": [1]}}', '{"format": 2, "names": {}}'])
def test_a_damaged_file_says_nothing_and_is_made_again(tmp_path: Path, content: str) -> None:
    note(tmp_path, ["k"], "a.safetensors")
    (tmp_path / FOLDER / FILE).write_text(content)
    assert read(tmp_path) == ({}, {})
    note(tmp_path, ["k"], "b.safetensors")
    assert read(tmp_path) == ({"k": ["b.safetensors"]}, {})


def test_what_others_could_have_written_says_nothing(tmp_path: Path) -> None:
    note(tmp_path, ["k"], "a.safetensors")
    (tmp_path / FOLDER / FILE).chmod(0o666)
    assert read(tmp_path) == ({}, {})
