# SPDX-License-Identifier: Apache-2.0
"""docs/design/features.md names every option, and files that are there; tools/feature_costs.py counts their lines.

The pages that tools/catalogue_pages.py writes are as it would write them. Each gain is one of benchmarks/history.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import by_path
import pytest

from nexfort_engine.config.option_catalogue import RETIRED
from nexfort_engine.config.options import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
catalogue = by_path.load("catalogue_pages", ROOT / "tools" / "catalogue_pages.py")
tool = by_path.load("feature_costs", ROOT / "tools" / "feature_costs.py")
TEXT = tool.PAGE.read_text(encoding="utf-8")
HISTORY = re.split(r"\n(?:\s*\n|(?=- ))", (ROOT / "benchmarks" / "history.md").read_text(encoding="utf-8"))
PARTS = re.compile(r"; (?![^(]*\))|, (?=cold )")  # history has cold first steps in an entry of their own
NOT_FIGURES = re.compile(r"\([^()]*\)|`[^`]*`|\b[A-Z]\w*[\d.-]+[\w.-]*|\d+x\d+|Wan 2\.1")
MODELS = re.compile(r"SDXL|SD2\.1|SD(?='s)|PixArt|Flux|Wan|VAE")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
WITHOUT_CODE = ("overrides.", "inductor.", "triton.fuse", "cuda.fuse")  # torch's own, or without an effect


def test_each_option_has_a_row() -> None:
    named = [option for option in OPTIONS if not option.startswith(WITHOUT_CODE) and option not in RETIRED]
    switches = " ".join(cells[1] for cells in tool.rows(TEXT))
    assert len(named) > 15
    assert [option for option in named if f"`{option}`" not in switches] == []


def test_gains_of_options_are_those_of_the_catalogue() -> None:
    assert tool.with_gains(TEXT) == TEXT, "run python3 tools/feature_costs.py"
    changed = TEXT.replace("H200", "H100")
    assert tool.with_gains(changed) not in (changed, TEXT)


def test_switches_are_as_the_catalogue_has_them() -> None:
    assert tool.with_switches(TEXT) == TEXT, "run python3 tools/feature_costs.py"
    assert "`quant.int8` (off)" in TEXT and "`fuse.int8_linear` |" in TEXT
    for wrong, right in (
        ("`fuse.int8_linear` |", "`fuse.int8_linear` (off) |"),
        ("`quant.int8` (off)", "`quant.int8`"),
    ):
        assert tool.with_switches(TEXT.replace(wrong, right)) == TEXT


def unproven(gain: str) -> list[str]:
    """The parts of a gain whose model and numbers no one entry of history has together."""

    def has(entry: str, part: str) -> bool:
        numbers = set(NUMBER.findall(NOT_FIGURES.sub("", part)))
        return numbers <= set(NUMBER.findall(entry)) and all(name in entry for name in MODELS.findall(part))

    return [part for part in PARTS.split(gain) if not any(has(entry, part) for entry in HISTORY)]


def test_each_gain_is_one_of_history() -> None:
    """Those of options too: the catalogue copies them."""
    found = {cells[0]: parts for cells in tool.rows(TEXT) if (parts := unproven(cells[2]))}
    assert found == {}, "benchmarks/history.md has no entry with these figures"
    assert unproven("SDXL 28.0 ms, 28.41 without; none (H200)") == ["SDXL 28.0 ms, 28.41 without"]
    assert unproven("Latte 28.0 ms, 28.4 without (H200, 2026-11-26)") == []
    assert unproven("Flux-dev 76.3 it/s, 68.5 without (H200, 2026-11-24)") != []


def test_the_pages_of_the_catalogue_are_as_they_would_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = catalogue.pages()
    for page, text in made.items():
        assert page.read_text(encoding="utf-8") == text, "run python3 tools/catalogue_pages.py"
    assert all(f"| `{name}` |" in made[ROOT / "docs" / "options.md"] for name in OPTIONS)
    monkeypatch.setattr(catalogue, "ROOT", tmp_path)
    (tmp_path / "docs" / "design").mkdir(parents=True)
    assert catalogue.main() == 0
    assert (tmp_path / "docs" / "options.md").read_text(encoding="utf-8") == made[ROOT / "docs" / "options.md"]


def test_each_row_has_a_gain_and_files_that_are_there() -> None:
    found = list(tool.rows(TEXT))
    assert len(found) > 40
    assert [cells[0] for cells in found if not cells[2]] == []
    missing = [file for cells in found for cell in cells[5:] for file in tool.files_of(cell) if not file.is_file()]
    assert missing == []


def test_lines_are_counted_and_nothing_else_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("one\n\ntwo\n")
    (tmp_path / "b").mkdir()
    for name in "cd":
        (tmp_path / "b" / f"{name}.py").write_text("three\n")
    text = "| f | `x` | 3 ms, 4 without | 0 | 7 | `a.py` `b/` without `b/d.py` | |\n| lines | 9 |\n"
    assert (
        tool.counted(text) == "| f | `x` | 3 ms, 4 without | 3 | 0 | `a.py` `b/` without `b/d.py` | |\n| lines | 9 |\n"
    )
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    tool.PAGE.write_text(text)
    assert tool.main() == 0 and "| 3 | 0 |" in tool.PAGE.read_text()
    (tmp_path / "a.py").unlink()
    with pytest.raises(FileNotFoundError):
        tool.counted(text)
