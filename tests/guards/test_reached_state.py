# SPDX-License-Identifier: Apache-2.0
"""State beside a block that its code reads: what changes in it is felt, and so is the way back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import reached_state
import torch
from large_rows import few
from reached_state import CHANGES, Block, apart, given, made

import nexfort_engine

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
NEAR = 1e-4
FAR = 1e-2


@pytest.mark.parametrize("kind", CHANGES)
@torch.no_grad()
def test_a_change_is_felt_and_so_is_the_way_back(kind: type[Block]) -> None:
    net, (change, back) = made(kind), CHANGES[kind]
    compiled, before = nexfort_engine.compile(net), made(kind)(given(5))
    assert apart(compiled(given(5)), before) < NEAR
    try:
        change(net)
        changed = net(given(5))
        assert apart(changed, before) > FAR, "the change does not matter to the network"
        for rows in (5, 7):
            assert apart(compiled(given(rows)), net(given(rows))) < NEAR
    finally:
        back(net)
    assert apart(net(given(5)), before) < NEAR and apart(compiled(given(5)), before) < NEAR


def _in_another(folder: Path, states: str, names: list[str]) -> None:
    here = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(map(str, (here.parent, here, here / "support")))
    variables = {**os.environ, "NEXFORT_CACHE_DIR": str(folder), "PYTHONPATH": path}
    command = [sys.executable, str(here / "support" / "reached_state.py"), states, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, rows in json.loads(done.stdout.splitlines()[-1]).items():
        assert max(rows) < NEAR, (name, states, rows)


@pytest.mark.parametrize(("first", "second"), few([("plain", "changed,plain"), ("changed", "plain,changed")], 1))
def test_another_process_takes_what_is_for_its_own_state(first: str, second: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    names = [kind.__name__ for kind in CHANGES if kind is not reached_state.OfClass]
    for states in (first, second):
        _in_another(tmp_path, states, names)


def test_weights_of_a_module_outside_are_told_of() -> None:
    compiled = nexfort_engine.compile(made(reached_state.OfOutside))
    with torch.no_grad():
        compiled(given(5))
    reasons = " ".join(row["reason"] for row in compiled.report.as_dict()["eager"])
    assert "uses weights of a module outside of it" in reasons
