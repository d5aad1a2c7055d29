# SPDX-License-Identifier: Apache-2.0
"""docs/design/staleness_map.md names everything that the code remembers from one call to the next."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from recorded_locks import ROOT, assigned, statements
from test_project import ENGINE, name_of, sources

PAGE = ROOT / "docs" / "design" / "staleness_map.md"
FUNCTIONS = ("once_a_class", "functools.cache", "functools.lru_cache")
HOLDERS = (
    "Recent",
    "WeakValueDictionary",
    "weakref.WeakKeyDictionary",
    "weakref.WeakValueDictionary",
    "weakref.WeakSet",
)
CODE = sources(ENGINE, ROOT / "nodes")


def remembered(path: Path) -> set[str]:
    """The last names of what a file keeps: functions whose results are kept, and variables that hold recent things."""
    found = {name.rpartition(".")[2] for name, _ in assigned(path, HOLDERS)}
    for node, _, _ in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            called = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
            found |= {node.name} if set(called) & set(FUNCTIONS) else set()
    return found


def test_each_cache_of_the_code_is_on_the_page() -> None:
    rows = [row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("|")]
    found = {(path, name) for path in CODE for name in remembered(path)}
    assert len(found) > 40, "caches are found"
    assert [
        f"{name} of {name_of(path)}" for path, name in found if not any(_names(row, name, path) for row in rows)
    ] == []


def _names(row: str, name: str, path: Path) -> bool:
    """Whether a row names what is kept, and its file or a folder that this lies in."""
    words = re.findall(r"[\w.]+", " ".join(re.findall(r"`([^`]*)`", row)))
    places = {f"`{name_of(path)}`", *(f"`{folder.as_posix()}/`" for folder in path.relative_to(ROOT).parents)}
    return any(word.rpartition(".")[2] == name for word in words) and any(place in row for place in places)


def test_the_files_of_the_page_are_there() -> None:
    files = set(re.findall(r"`((?:nexfort_engine|nodes|tests)/[\w/.]*)`", PAGE.read_text(encoding="utf-8")))
    assert len(files) > 30
    assert [file for file in files if not (ROOT / file).exists()] == []
