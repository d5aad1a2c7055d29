# SPDX-License-Identifier: Apache-2.0
"""Blocks that are called with a member of an enumeration: one artefact for each member, on disk too."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from net_pairs import Net, Pair, unlowered, x  # noqa: F401  # a fixture
from torch import nn

T = torch.Tensor


class Stage(enum.Enum):
    FIRST, LATER = "first", (1, 2)


class Word(str, enum.Enum):
    LOUD = "loud"


class Bits(enum.Flag):
    A, B = 1, 2


Odd = enum.Enum("Odd", {"LIST": [1, 2]}, module=__name__)


class Staged(nn.Module):
    """A block that does something else in each stage; texts that are members are something else than texts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: T, stage: Any = Stage.FIRST) -> T:
        by = {Stage.FIRST: 1, Stage.LATER: 2}.get(stage, 3)
        if isinstance(stage, Word):
            by = 4
        return h + self.linear(h) * by


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(Net(part=Staged), tmp_path)


def test_each_member_has_an_artefact_and_keeps_it(pair: Pair, tmp_path: Path) -> None:
    for stage in (Stage.FIRST, Stage.LATER, Word.LOUD, "loud"):
        new = pair.agrees(x(), stage)
        assert new["artefacts_compiled"] and not new["eager"], stage
    for stage in ("loud", Word.LOUD, Stage.LATER, Stage.FIRST):
        assert not pair.agrees(x(3), stage)["artefacts"]
    again = Pair(Net(part=Staged), tmp_path)
    for stage in (Stage.LATER, "loud", Word.LOUD, Stage.FIRST):
        new = again.agrees(x(), stage)
        assert not new["artefacts_compiled"] and new["artefacts"] and not new["eager"], stage


@pytest.mark.parametrize(("stage", "reason"), [(Bits.A | Bits.B, "several members of"), (Odd.LIST, "no plain one")])
def test_what_has_no_name_of_its_own_runs_eager_with_the_reason(pair: Pair, stage: Any, reason: str) -> None:
    pair.agrees(x(), stage)
    assert reason in pair.reasons()


def test_a_member_of_another_class_of_the_same_name_is_another_one(pair: Pair) -> None:
    pair.agrees(x(), Stage.LATER)
    other = enum.Enum("Stage", {"FIRST": "first", "LATER": (1, 2)}, module=__name__)
    assert pair.agrees(x(), other.LATER)["eager"] and "not the class of that name" in pair.reasons()


def test_a_class_that_is_made_anew_is_seen(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.agrees(x(), Stage.LATER)
    before = Stage.LATER
    monkeypatch.setitem(globals(), "Stage", enum.Enum("Stage", {"FIRST": "first", "LATER": (1, 2)}, module=__name__))
    assert not pair.agrees(x(), Stage.LATER)["eager"]
    assert pair.agrees(x(), before)["eager"]
