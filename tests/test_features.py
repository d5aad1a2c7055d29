# SPDX-License-Identifier: Apache-2.0
"""docs/design/features.md names every option, and files that are there; tools/feature_costs.py counts their lines.

The pages that tools/catalogue_pages.py writes are as it would write them.
"""

from __future__ import annotations

from pathlib import Path

import by_path
import pytest

from nexfort_engine.config.options import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
catalogue = by_path.load("catalogue_pages", ROOT / "tools" / "catalogue_pages.py")
tool = by_path.load("feature_costs", ROOT / "tools" / "feature_costs.py")
TEXT = tool.PAGE.read_text(encoding="utf-8")
WITHOUT_CODE = ("overrides.", "inductor.", "triton.fuse", "cuda.fuse")  # torch's own, or without an effect


def test_each_option_has_a_row() -> None:
    named = [option for option in OPTIONS if not option.startswith(WITHOUT_CODE)]
    switches = " ".join(cells[1] for cells in tool.rows(TEXT))
    assert len(named) > 15
    assert [option for option in named if f"`{option}`" not in switches] == []


def test_gains_of_options_are_those_of_the_catalogue() -> None:
    assert tool.with_gains(TEXT) == TEXT, "run python3 tools/feature_costs.py"
    changed = TEXT.replace("H200", "H100")
    assert tool.with_gains(changed) not in (changed, TEXT)


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
