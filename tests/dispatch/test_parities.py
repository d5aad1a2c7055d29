# SPDX-License-Identifier: Apache-2.0
"""Blocks whose code asks whether a size is even, such as the frames of a video: an artefact for each answer.

Captured graphs run as they are here (subjects.py).
"""

from __future__ import annotations

from pathlib import Path

import torch
from net_pairs import Net, Pair, unlowered, x  # noqa: F401  # a fixture
from torch import nn

T = torch.Tensor


class Halves(nn.Module):
    """Rows in pairs, of which an odd one stays alone; those of the third dimension too where `both` is set."""

    both = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: T) -> T:
        found = self.linear(h)
        if h.shape[1] % 2 == 1:
            return h + torch.cat([found[:, :1], found[:, 1:] * 2], 1)
        if self.both and h.shape[0] % 2 == 1:
            return h + found * 3
        return h + found.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)


class Both(Halves):
    both = True


class Quarters(Halves):
    """Takes so many rows as are left of four."""

    def forward(self, h: T) -> T:
        return h + self.linear(h) * (1 + h.shape[1] % 4 * (h.shape[1] % 4 == 3))


def calls(pair: Pair, *sizes: tuple[int, int]) -> list[int]:
    """How many artefacts each of some calls made; none of them ran eager."""
    made = []
    for batch, length in sizes:
        new = pair.agrees(x(batch, length))
        assert not new["eager"], (batch, length)
        made.append(new["artefacts_compiled"])
    return made


def test_the_other_parity_gets_one_artefact_of_its_own(tmp_path: Path) -> None:
    pair = Pair(Net(part=Halves), tmp_path)
    assert calls(pair, (2, 3), (2, 4), (2, 2)) == [2, 1, 0]
    assert calls(pair, (3, 8), (2, 5), (1, 6), (1, 9)) == [0] * 4
    again = Pair(Net(part=Halves), tmp_path)
    assert calls(again, (2, 4), (3, 5), (1, 3)) == [0] * 3


def test_one_that_is_for_two_alone_leaves_room_for_the_others(tmp_path: Path) -> None:
    pair = Pair(Net(part=Halves), tmp_path)
    assert calls(pair, (2, 3), (2, 2), (2, 4)) == [2, 1, 1]
    assert calls(pair, (3, 8), (2, 2), (1, 6), (1, 9)) == [0] * 4


def test_two_parities_have_no_more_than_their_combinations(tmp_path: Path) -> None:
    pair = Pair(Net(part=Both), tmp_path)
    sizes = [(2, 3), (3, 3), (2, 4), (3, 4)]
    made = calls(pair, *sizes)
    assert made[0] == 2 and sum(made) <= 2 + 3
    assert not sum(calls(pair, *[(batch + 2, length + 2) for batch, length in sizes]))


def test_what_stands_between_blocks_gets_none(tmp_path: Path) -> None:
    net = Net()
    net.head = Halves(8)
    pair = Pair(net, tmp_path)
    assert calls(pair, (2, 3)) == [2]
    new = pair.agrees(x(2, 4))
    assert not new["artefacts"] and {row["region"] for row in new["eager"]} == {"head"}
    assert "for other sizes: the relation" in pair.reasons()


def test_other_remainders_are_no_parities(tmp_path: Path) -> None:
    pair = Pair(Net(part=Quarters), tmp_path)
    assert calls(pair, (2, 4)) == [2]
    new = pair.agrees(x(2, 7))
    assert not new["artefacts"] and "for other sizes" in pair.reasons()
