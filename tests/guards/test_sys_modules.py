# SPDX-License-Identifier: Apache-2.0
"""Code that looks for a module among all that are loaded, as einops looks for the library of a tensor."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from subjects import TOLERANCE, distance, graphs_as_they_are
from torch import nn

import nexfort_engine

MISSING, OTHER, UNASKED = "nexfort_test_missing", "nexfort_test_other", "nexfort_test_unasked"


def factor() -> float:
    for name, value in {"nexfort_test_missing": 3.0, "nexfort_test_other": 2.0}.items():
        if name in sys.modules:
            return value
    return 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x) * factor()


def test_it_depends_on_those_that_it_asks_for_and_on_no_other() -> None:
    torch.manual_seed(0)
    net, x = Net().eval().requires_grad_(False), torch.randn(2, 5, 8)
    with graphs_as_they_are(), pytest.MonkeyPatch.context() as patch:
        compiled = nexfort_engine.compile(net)
        before, plain = compiled(x), net(x)
        assert distance([before], [plain]) < TOLERANCE
        mark = compiled.report.mark()
        patch.setitem(sys.modules, UNASKED, types.ModuleType(UNASKED))
        assert torch.equal(compiled(x), before) and not compiled.report.since(mark)["artefacts"]
        for name in (OTHER, MISSING):
            patch.setitem(sys.modules, name, types.ModuleType(name))
            changed = net(x)
            assert distance([changed], [plain]) > 100 * TOLERANCE
            assert distance([compiled(x)], [changed]) < TOLERANCE
        patch.delitem(sys.modules, OTHER)
        patch.delitem(sys.modules, MISSING)
        assert torch.equal(compiled(x), before)
        told = compiled.report.as_dict()
        assert not told["eager"] and not [note for note in told["notes"] if "lasts only" in note], told
