# SPDX-License-Identifier: Apache-2.0
"""Blocks whose code loops over a size, such as the frames of a video: an artefact for each of a few, then eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from net_pairs import Net, Pair, unlowered, x  # noqa: F401  # a fixture
from torch import nn

from nexfort_engine.compilation.builder import MOST_SIZES

T = torch.Tensor
BACKGROUND = {"options": {"compile.background": True}}


class ByFrame(nn.Module):
    """Takes rows one by one, the second dimension's; the first is free."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: T) -> T:
        return torch.stack([frame + self.linear(frame) * (1 + i) for i, frame in enumerate(h.unbind(1))], 1)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(Net(part=ByFrame), tmp_path, BACKGROUND)


def made(pair: Pair, frames: int) -> int:
    """How many artefacts a call has had made beside it, and which the next call runs."""
    before = pair.report.as_dict()["artefacts_compiled"]
    pair.agrees(x(2, frames))
    background = pair.engine.builder.background
    assert background is not None and background.join(60)
    pair.agrees(x(2, frames))
    return pair.report.as_dict()["artefacts_compiled"] - before


def test_each_of_a_few_sizes_has_one_and_others_run_eager_with_the_reason(pair: Pair, tmp_path: Path) -> None:
    assert [made(pair, frames) for frames in range(2, 2 + MOST_SIZES)] == [2, *[1] * (MOST_SIZES - 1)]
    assert not pair.report.as_dict()["eager"]
    assert not made(pair, 9) and "it was compiled for other sizes: size 9 of dimension 1" in pair.reasons()
    for frames in range(1 + MOST_SIZES, 1, -1):
        new = pair.agrees(x(3, frames))
        assert not new["artefacts"] and not new["eager"], "a batch is free, and what was made serves on"
    again = Pair(Net(part=ByFrame), tmp_path)
    for frames in (4, 2, 3):
        assert not again.agrees(x(2, frames))["artefacts_compiled"]


def test_where_steps_wait_for_the_compiler_no_other_size_does(tmp_path: Path) -> None:
    pair = Pair(Net(part=ByFrame), tmp_path)
    assert not pair.agrees(x(2, 3))["eager"]
    new = pair.agrees(x(2, 4))
    assert not new["artefacts"] and "for other sizes" in pair.reasons()


def test_what_stands_between_blocks_gets_none(tmp_path: Path) -> None:
    net = Net()
    net.head = ByFrame(8)
    pair = Pair(net, tmp_path, BACKGROUND)
    assert made(pair, 3) == 2 and not pair.report.as_dict()["eager"]
    assert not made(pair, 5)
    assert {row["region"] for row in pair.report.as_dict()["eager"]} == {"head"}
