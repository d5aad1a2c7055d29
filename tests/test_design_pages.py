# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/design name packages, files and attributes as the code has them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from recorded_locks import ROOT
from test_project import ENGINE, PACKAGES, sources

PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
OVERVIEW = (ROOT / "docs" / "design" / "overview.md").read_text(encoding="utf-8")
OURS = re.compile(r"_?nexfort_[a-z_]+")
# What is no attribute of an object: a package, a module of ComfyUI's for `warm`.
NO_ATTRIBUTES = {"nexfort_engine", "nexfort_warm"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_of_a_page_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:\w+/)+\w+\.\w+|nexfort_engine/(?:\w+/)*)`", text))
    assert [file for file in files if not any((root / file).exists() for root in (ROOT, ENGINE))] == []


# Of torch, ComfyUI, packs and diffusers, which the engine meets under other names or not by name.
OF_OTHERS = {"nn.MultiheadAttention", "optimized_attention", "_conv_forward", "from_pretrained"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_a_page_stand_in_the_code(page: Path) -> None:
    """A name that was renamed or removed is one of the code no more."""
    known = set(
        re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources(ENGINE, ROOT / "nodes")))
    )
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text)) - OF_OTHERS
    assert [name for name in named if "/" not in name and name.rstrip(".").split(".")[-1] not in known] == []


def test_the_overview_has_the_packages_in_their_order() -> None:
    picture = re.findall(r"\w+", OVERVIEW.partition("## Packages")[2].split("```")[1])
    assert picture == list(PACKAGES)
    rows = [line for line in OVERVIEW.splitlines() if line.startswith("| `")]
    missing = [name for name in PACKAGES if not any(f"`{name}/`" in row or f"`{name}.py`" in row for row in rows)]
    assert missing == []


def attributes(path: Path) -> set[str]:
    """Names of ours that a file uses as attributes, or has as texts that are no name of a context variable."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    variables = {
        id(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ContextVar" and node.args
    }
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found |= {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in variables
    }
    return {name for name in found if OURS.fullmatch(name)} - NO_ATTRIBUTES


def test_the_overview_names_what_is_put_on_objects_of_others() -> None:
    found = set[str]().union(*map(attributes, sources(ENGINE, ROOT / "nodes")))
    assert len(found) > 8
    assert [name for name in found if f"`{name}`" not in OVERVIEW] == []
    named = set(re.findall(r"`(_?nexfort_[a-z_]+)`", OVERVIEW)) - NO_ATTRIBUTES
    assert named - found == set(), "gone"
