# SPDX-License-Identifier: Apache-2.0
"""The table of kernels that are compiled ahead has every kernel of the engine; what fails is told in it.

tests/kernels compiles them. That the page holds the table is tested in test_document_figures.py.
"""

from __future__ import annotations

import ast
import csv
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import kernels_ahead
from benchmarks.kernels_ahead import ROOT, Row

KERNELS = ROOT / "nexfort_engine" / "kernels"


def parsed(folder: Path, pattern: str) -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(folder.glob(pattern)):
        yield file.stem, ast.parse(file.read_text(encoding="utf-8"))


def named(tree: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}


def read_only(tree: ast.Module) -> Iterator[str]:
    """Kernels in Triton's language that an operator always launches another of gluon_kernel.py for."""
    imports = (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module == "gluon_kernel")
    gluon = {name.name for one in imports for name in one.names}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "launch":
            kernel, _, _, _, *others = call.args
            if others and ast.unparse(others[0]) in gluon:
                yield ast.unparse(kernel).rpartition(".")[2]


def of_the_engine() -> set[str]:
    """The kernels that run on cards, as rows name them: functions of Triton or Gluon that no other one calls."""
    found = set()
    for folder in (one for one in KERNELS.iterdir() if one.is_dir()):
        functions = [
            (file, one)
            for file, tree in parsed(folder, "*kernel*.py")
            for one in tree.body
            if isinstance(one, ast.FunctionDef) and any(".jit" in ast.unparse(each) for each in one.decorator_list)
        ]
        parts = {name for _, one in functions for name in named(one)}
        parts |= {name for _, tree in parsed(folder, "*op.py") for name in read_only(tree)}
        found |= {f"{folder.name}.{file}.{one.name}" for file, one in functions if one.name not in parts}
    return found


def test_every_kernel_of_the_engine_is_compiled_and_has_its_rows() -> None:
    pytest.importorskip("triton", reason="kernels are Triton's")
    cases = list(kernels_ahead.cases())
    assert {kernels_ahead.name_of(case.kernel) for case in cases} == of_the_engine(), "tests/kernels/compiled_*.py"
    wanted = {(kernels_ahead.name_of(case.kernel), kernels_ahead.card_of(case)) for case in cases}
    rows = {(row["kernel"], row["card"]) for row in kernels_ahead.read()}
    assert rows == wanted, "python -m benchmarks.kernels_ahead"


def test_the_page_says_that_no_newer_triton_called_them_on_a_gpu() -> None:
    """As long as no row of a run on a GPU has a torch that brings one: 2.11 has Triton 3.6."""
    rows = [one for name in ("results", "prompt_clock") for one in read_csv(name)]
    assert rows
    page = (ROOT / "docs" / "design" / "kernels_and_cards.md").read_text(encoding="utf-8")
    said = "No kernel was called on a GPU with Triton 3.7 or newer" in " ".join(page.split())
    assert said == all(one["torch"].startswith("2.11.") for one in rows)


def read_csv(name: str) -> list[Row]:
    with open(ROOT / "benchmarks" / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_kernels_are_found_in_the_engines_files() -> None:
    found = of_the_engine()
    assert len(found) > 10
    assert {"scaled_linear.triton_kernel.multiply", "scaled_linear.gluon_kernel.multiply_in_groups"} <= found
    assert "conv3x3.triton_kernel.convolve" not in found, "Inductor reads it, and calls one in Gluon"


def row(version: str, card: str = "sm_90", kernel: str = "op.triton_kernel.one", reason: str = "") -> Row:
    shared = {"torch": "2.11.0+cpu", "date": "2026-11-28", "forms": "3", "failed": "1" if reason else "0"}
    return {"kernel": kernel, "card": card, "triton": version, "reason": reason, **shared}


def test_a_cell_has_the_tritons_that_compile_a_kernel() -> None:
    rows = [row(version) for version in ("3.8.0", "3.9.1", "3.10.0")]
    rows += [row("3.8.0", "sm_100"), row("3.10.0", "sm_100"), row("3.9.1", "sm_100", reason="no <room> | left")]
    rows += [row("3.6.0", "sm_120"), row("3.9.1", "sm_120")]
    rows += [row("3.9.1", "gfx942", "op.gluon_kernel.two", "KeyError: 'hip'")]
    head, _, two, one, *rest = kernels_ahead.table(rows).splitlines()
    assert head == "| operator, kernel | language | sm_90 | sm_100 | sm_120 | gfx942 |"
    assert one == "| `op`, `one` | Triton | 3.8 to 3.10 | 3.8, 3.10* | 3.6, 3.9 | - |", "a range leaves none out"
    assert two == "| `op`, `two` | Gluon | - | - | - | none* |"
    assert "| 3.8.0 | 2.11.0 | 2026-11-28 | 6 of 6 |" in rest
    assert "| 3.9.1 | 2.11.0 | 2026-11-28 | 10 of 12 |" in rest
    assert "| `one`, sm_100 | 3.9.1 | 1 of 3 | no &lt;room> \\| left |" in rest


def test_new_rows_take_the_place_of_those_of_the_same_triton() -> None:
    before = [row("3.6.0"), row("3.6.0", kernel="op.triton_kernel.gone"), row("3.9.0")]
    some = kernels_ahead.replaced(before, [row("3.6.1")], everything=False)
    assert [(one["kernel"][17:], one["triton"]) for one in some] == [
        ("gone", "3.6.0"),
        ("one", "3.6.1"),
        ("one", "3.9.0"),
    ]
    every = kernels_ahead.replaced(before, [row("3.6.1")], everything=True)
    assert [one["triton"] for one in every] == ["3.6.1", "3.9.0"]


def test_a_form_that_fails_is_told_and_ends_nothing() -> None:
    def raising() -> Any:
        raise ValueError("out of\n  shared memory")

    def doubtful() -> Any:
        raise AssertionError

    def case(compiled: Any) -> Any:
        return SimpleNamespace(compiled=compiled)

    assert kernels_ahead.why_not(case(raising)) == "ValueError: out of shared memory"
    assert kernels_ahead.why_not(case(doubtful)) == "AssertionError: raise AssertionError"
    killed = kernels_ahead.why_not(case(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    assert killed == "the compiler ended with SIGKILL"
    assert kernels_ahead.why_not(case(lambda: None)) == ""
