# SPDX-License-Identifier: Apache-2.0
"""What code asks its tensors, options and arguments for besides sizes is felt, in both orders and across processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import asked_questions
import pytest
import torch
from asked_questions import QUESTIONS, distances
from large_rows import few
from torch import nn

import nexfort_engine
from nexfort_engine.capture.tensor_questions import HAS_ATTRIBUTES, SETS_ATTRIBUTES
from nexfort_engine.modules.memory_format import normalised

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
NEAR = 1e-4
FAR = 1e-2
SOME = [*QUESTIONS][::4]
ORDERS = {"some": (SOME, 1), "every": (QUESTIONS, 1), "every backwards": (QUESTIONS, -1)}
EVERY = [(name, order) for name in QUESTIONS for order in (1, -1)]


@pytest.mark.parametrize(("name", "order"), EVERY)
def test_calls_with_other_answers_give_eager_s_results(name: str, order: int) -> None:
    found, wanted, _ = distances(name, order)
    assert max(float((one - wanted[0]).norm() / wanted[0].norm()) for one in wanted) > FAR, "the answer does not matter"
    assert max(found) < NEAR, found


@pytest.mark.parametrize(("names", "order"), few(ORDERS, ["some"]))
def test_another_process_takes_what_answers_as_its_own_calls(names: Any, order: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    here = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(map(str, (here.parent, here, here / "support")))
    variables = {**os.environ, "NEXFORT_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    for way in (order, -order):
        command = [sys.executable, asked_questions.__file__, str(way), *names]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert {name: apart for name, apart in found.items() if apart >= NEAR} == {}


def test_code_that_asks_nothing_has_one_artefact_however_a_tensor_lies() -> None:
    class Adds(asked_questions.Block):
        def ask(self, x: torch.Tensor, given: torch.Tensor, options: None) -> torch.Tensor:
            return given.sum()

        def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x + self.layer(x) * self.ask(x, given, None)

    net = asked_questions.Net(Adds).eval().requires_grad_(False)
    compiled, x = nexfort_engine.compile(net), torch.randn(2, 6, 8)
    numbers = torch.randn(4, dtype=torch.complex64)
    with torch.no_grad():
        for given in (numbers.imag, numbers.conj().imag, numbers.imag.clone(), numbers.conj().imag.clone()):
            torch.testing.assert_close(compiled(x, given=given), net(x, given=given))
    assert compiled.report.as_dict()["artefacts_compiled"] == 1 and not compiled.report.as_dict()["eager"]


def test_a_block_that_is_given_no_tensor_is_compiled() -> None:
    class Makes(asked_questions.Block):
        def forward(self, rows: int) -> torch.Tensor:  # type: ignore[override]
            return self.layer(self.table).repeat(rows, 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Makes() for _ in range(2))

        def forward(self, rows: int) -> torch.Tensor:
            return torch.cat([block(rows) for block in self.blocks])

    net = Net().eval().requires_grad_(False)
    compiled = nexfort_engine.compile(net)
    with torch.no_grad():
        torch.testing.assert_close(compiled(3), net(3))
    assert not compiled.report.as_dict()["eager"]


def test_a_view_that_negates_is_given_as_numbers() -> None:
    one = torch._neg_view(torch.randn(4))
    assert one.is_contiguous() and one.is_neg()
    assert not normalised(one).is_neg() and torch.equal(normalised(one), one)


@pytest.mark.parametrize("way", ["of what is given", "of a result", "an object"])
def test_attributes_of_tensors_that_no_artefact_holds_have_a_reason(way: str) -> None:
    class Sets(asked_questions.Block):
        def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            found = x + self.layer(x) * (2.0 if getattr(given, "mine", None) else 5.0)
            if way != "an object":
                (given if way == "of what is given" else found).noted = 1
            return found

    net = asked_questions.Net(Sets).eval().requires_grad_(False)
    compiled, x, given = nexfort_engine.compile(net), torch.randn(2, 6, 8), torch.ones(3)
    if way == "an object":
        given.mine = object()  # type: ignore[attr-defined]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, given=given), net(x, given=given))
    reasons = {row["reason"] for row in compiled.report.as_dict()["eager"] if row["region"].startswith("blocks")}
    assert reasons == {HAS_ATTRIBUTES.format("mine") if way == "an object" else SETS_ATTRIBUTES.format("noted")}
