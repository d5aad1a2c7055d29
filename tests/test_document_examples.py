# SPDX-License-Identifier: Apache-2.0
"""Examples of docs/python.md run, and public names say what they take, give and raise."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
from pages import ROOT, read

import nexfort_engine
from nexfort_engine.config import compile_config
from nexfort_engine.reporting import report

PAGE = read(ROOT / "docs" / "python.md")
EXAMPLE = re.compile(r"(<!-- not run[^>]*-->\n)?```python\n(.*?)```", re.DOTALL)
PUBLIC = [name for name in nexfort_engine.__all__ if callable(getattr(nexfort_engine, name))]


def test_the_examples_of_the_page_run() -> None:
    found = EXAMPLE.findall(PAGE)
    run = [code for kept, code in found if not kept]
    assert len(run) >= 2 and len(found) > len(run)
    names: dict[str, object] = {"print": lambda *_: None}
    for number, example in enumerate(run):
        exec(compile(example, f"docs/python.md, example {number}", "exec"), names)  # noqa: S102


def test_examples_that_are_not_run_can_be_read_as_code() -> None:
    for _, example in EXAMPLE.findall(PAGE):
        compile(example, "docs/python.md", "exec")


def test_the_page_has_every_key_of_a_report() -> None:
    keys = nexfort_engine.Report().as_dict()
    assert len(keys) > 10 and [key for key in keys if f"`{key}`" not in PAGE] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_explained(name: str) -> None:
    """Each parameter stands in the docstring, and so does what is raised; the page has the name."""
    found = getattr(nexfort_engine, name)
    source = Path(inspect.getfile(found)).relative_to(ROOT).as_posix()
    assert f"](../{source}) |" in next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    told = inspect.getdoc(found) or ""
    assert f"`{name}`" in PAGE or f"{name}(" in PAGE or f"import {name}" in PAGE or f"`{name.lower()}`" in PAGE
    if inspect.isclass(found):
        assert told
        return
    assert "Raises" in told
    taken = [one for one in inspect.signature(found).parameters if one not in ("module", "pipe")]
    assert [one for one in taken if not re.search(rf"\b{one}\b", told)] == []


@pytest.mark.parametrize("module", [compile_config, report], ids=lambda module: module.__name__)
def test_the_examples_of_docstrings_run(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert failed == 0 and tried > 0
