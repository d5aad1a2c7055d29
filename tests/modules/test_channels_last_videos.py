# SPDX-License-Identifier: Apache-2.0
"""Videos, and images in lists, lie with channels innermost as images do; what a list holds is the very tensor.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import images_anywhere
import pytest
import torch
from images_anywhere import compiled
from torch import nn
from torch.nn import functional

from nexfort_engine.cudagraphs import channels_last_cat

pytestmark = pytest.mark.usefixtures("threads")
_graphs = images_anywhere.graphs  # a fixture


class Frames(nn.Module):
    """A block of videos that convolves each frame, as an upsampling does, and hands on what it sees of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = x.transpose(1, 2).flatten(0, 1)
        return self.conv(frames).unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


class Volumes(nn.Module):
    """A block of videos that convolves over time as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x) + self.conv(x)


class Videos(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(3, 8, 1)
        self.blocks = nn.ModuleList([kind() for kind in (Volumes, Frames, Volumes, Frames, Volumes)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return h


def test_what_is_seen_of_images_lies_in_a_plan_as_behind_an_artefact(tmp_path: Path) -> None:
    net = Videos()
    ours, engine = compiled(net, tmp_path)
    for sizes in ((2, 3, 4, 8, 12), (1, 3, 5, 6, 6)):
        x = torch.randn(sizes)
        assert torch.allclose(ours(x), net(x), rtol=1e-4, atol=1e-4)
    report = engine.report.as_dict()
    assert not report["eager"] and not report["variants"] and not report["notes"]


class Exchanges(nn.Module):
    """A block that gives what lies in a list, and puts its own image there."""

    def __init__(self, look: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.look = nn.Conv2d(8, 8, 3, padding=1), look

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        before = self.look(kept[0])
        kept[1] = self.conv(x)
        return before


class Exchanging(nn.Module):
    """What its blocks give is written to between them: the list sees it."""

    def __init__(self, look: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Exchanges(look) for _ in range(3)])
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [x * 2, x]
        for block in self.blocks:
            block(x, kept).mul_(3)
            x = x + kept[1]
        self.seen.append(kept[0])
        return x + kept[0]


@pytest.mark.parametrize("look", [lambda one: one, lambda one: one[:, :, 1:]], ids=["itself", "a view"])
def test_what_a_block_gives_of_a_list_is_the_very_tensor(
    look: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    net = Exchanging(look)
    ours, engine = compiled(net, tmp_path)
    for sizes in ((2, 8, 8, 12), (1, 8, 6, 6)):
        x = torch.randn(sizes)
        assert torch.allclose(ours(x), net(x), rtol=1e-4, atol=1e-4)
        assert torch.equal(*net.seen[-2:])
    assert engine.report.as_dict()["artefacts_compiled"] and not engine.report.as_dict()["eager"]


def test_videos_are_joined_as_torch_joins_them() -> None:
    one, other = (
        torch.randn(2, 8, 3, 4, 5).bfloat16().contiguous(memory_format=torch.channels_last_3d) for _ in range(2)
    )
    with channels_last_cat.JoinedAsRows():
        for dim in (1, -3, -4, 2):
            found = torch.cat([one, other], dim)
            assert torch.equal(found, torch.cat([one.contiguous(), other.contiguous()], dim))
