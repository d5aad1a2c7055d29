# SPDX-License-Identifier: Apache-2.0
"""The catalogue: one row for each option and pass, an order that keeps what passes ask for, and no torch to read it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import nexfort_engine
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.config.option_catalogue import (
    LEGACY_NO_EFFECT,
    MODE_GAINS,
    OFF,
    ON,
    OPTION_ROWS,
    RETIRED,
    STANDARD,
    TORCH,
)
from nexfort_engine.config.options import KEYS, OPTIONS, TOKENS
from nexfort_engine.config.pass_catalogue import NEEDS, PASSES, PassSpec
from nexfort_engine.passes import registry

ENGINE = Path(nexfort_engine.__file__).parent
NOT_PASSES = ("registry", "attention_match", "epilogue_match", "prologue_match", "scaled_mm_match")
GIVEN = {one.name for one in PASSES}
# options that are no passes, each with the file that reads it
READ_BY = {
    "compile.background": "config/compile_config.py",
    "cuda.fill_kernels": "cudagraphs/step_graphs.py",
    "inductor.optimize_linear_epilogue": "config/compile_config.py",
    "triton.cudagraphs": "config/compile_config.py",
}


def misplaced(passes: Sequence[PassSpec]) -> list[str]:
    """Each relation that an order of passes breaks."""
    places = {one.name: place for place, one in enumerate(passes)}
    return [f"{one.name} before {name}" for one in passes for name in one.after if places[name] >= places[one.name]]


def test_each_pass_has_one_row_and_the_order_keeps_what_it_asks_for() -> None:
    assert len(GIVEN) == len(PASSES)
    assert misplaced(PASSES) == []
    assert all(reason for one in PASSES for reason in one.after.values())
    assert len(misplaced(PASSES[::-1])) == sum(len(one.after) for one in PASSES) > 10


def test_rewrites_are_the_functions_of_the_passes_folder() -> None:
    files = {one.rewrite.partition(":")[0] for one in PASSES if one.rewrite}
    assert files == {file.stem for file in (ENGINE / "passes").glob("[!_]*.py")} - {*NOT_PASSES}
    assert list(registry.REWRITES) == [one.name for one in PASSES if one.rewrite]
    assert all(map(callable, registry.REWRITES.values()))
    named = {one.rewrite for one in PASSES if one.rewrite}
    assert len(named) == len(registry.REWRITES), "two passes with one rewrite"


def test_lowering_reads_each_switch_that_has_no_rewrite() -> None:
    tree = ast.parse((ENGINE / "lowering" / "inductor.py").read_text(encoding="utf-8"))
    read = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert {one.name for one in PASSES if not one.rewrite} <= read
    # and no switch is read anywhere that has no row
    for file in ENGINE.rglob("*.py"):
        found = set(re.findall(r'"nexfort\.(\w+)"', file.read_text(encoding="utf-8")))
        assert found - GIVEN <= {"modes", "status", "pace", "card"}, file


def test_each_pass_is_switched_by_what_a_user_can_say() -> None:
    for one in PASSES:
        assert one.option in OPTION_ROWS or one.option in TOKENS or one.option in KEYS, one.name
        assert not one.needs or one.needs in NEEDS
        assert one.on is not None or one.option in OPTION_ROWS, one.name


def test_each_option_has_a_row_and_each_row_is_an_option_that_somebody_reads() -> None:
    assert (*OPTION_ROWS, *LEGACY_NO_EFFECT, *RETIRED) == OPTIONS and len(set(OPTIONS)) == len(OPTIONS)
    of_passes = {one.option for one in PASSES} & set(OPTION_ROWS)
    held = {name for name, row in OPTION_ROWS.items() if row.held}
    assert of_passes | held | set(READ_BY) == set(OPTION_ROWS)
    assert not (of_passes & set(READ_BY) or held & set(READ_BY))
    for name, file in READ_BY.items():
        assert f'"{name}"' in (ENGINE / file).read_text(encoding="utf-8"), name
    assert set(MODE_GAINS) <= set(TOKENS)


def test_rows_say_all_that_the_page_has() -> None:
    for name, row in OPTION_ROWS.items():
        assert row.name == name and row.default in (ON, OFF, STANDARD, TORCH)
        assert row.effect.endswith(".") and row.gain and re.fullmatch(r"\d+\.\d+\.\d+", row.since)
        assert bool(row.devices) is not any(one.option == name for one in PASSES), f"{name}: devices are in one place"
        assert "|" not in row.effect + row.cost + row.gain + row.devices
    rungs = [row.rung for row in OPTION_ROWS.values() if row.rung]
    assert len(set(rungs)) == len(rungs) > 15


@pytest.mark.parametrize("name", OPTION_ROWS)
def test_a_default_is_what_a_config_has_where_nobody_says(name: str) -> None:
    expected = OPTION_ROWS[name].default in (ON, STANDARD)
    for mode, on in (("O2", expected), ("jit", OPTION_ROWS[name].default == ON)):
        assert CompileConfig.parse(mode).is_on(name) is on
        for said in (True, False):
            assert CompileConfig.parse({"mode": mode, "options": {name: said}}).is_on(name) is said


def test_a_new_row_is_an_option_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is derived from the rows follows them."""
    fast = next(one for one in PASSES if one.name == "rotary")
    added = replace(fast, name="another", rewrite="")
    monkeypatch.setattr("nexfort_engine.config.compile_config.PASSES", (*PASSES, added))
    for device, on in (("cuda", True), ("cpu", False)):
        assert CompileConfig().lowering_options(device)["nexfort.another"] is on
    assert CompileConfig.parse("jit").lowering_options("cuda")["nexfort.another"] is False


def test_options_without_effect_say_so_and_change_no_artefact() -> None:
    removed = {name: f"it was removed, because {why}" for name, why in RETIRED.items()}
    for name, what in {**LEGACY_NO_EFFECT, **removed}.items():
        for value in (True, False):
            config = CompileConfig.parse({"options": {name: value}})
            (row,) = config.inactive()
            assert row["token"] == name and row["reason"].startswith(what)
            assert config.lowering_key() == CompileConfig().lowering_key()


def test_the_catalogue_is_read_without_torch() -> None:
    code = (
        "import sys, nexfort_engine.config.pass_catalogue, nexfort_engine.config.options; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ENGINE.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
