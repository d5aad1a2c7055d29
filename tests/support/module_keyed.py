# SPDX-License-Identifier: Apache-2.0
"""A network that keeps frames in one mapping by the modules that they belong to. No test lives here.

`python module_keyed.py FOLDER` runs it compiled, with artefacts in the folder, and prints JSON of what that did.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from net_pairs import Pair
from restarted import counting, digest
from torch import nn

T = torch.Tensor
Kept = dict[Any, Any]


class Causal(nn.Conv1d):
    """A convolution that goes on from the last frames of the chunk before: they are in a mapping, by itself."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 3)

    def forward(self, h: T, kept: Kept | None = None) -> T:
        kept = {} if kept is None else kept
        before = kept.pop(self, None)
        h = torch.cat([h[:, :, :1].repeat(1, 1, 2) if before is None else before, h], 2)
        kept[self] = h[:, :, -2:]
        return super().forward(h)


class Block(nn.Module):
    """Two such convolutions; the second one may fail."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Causal(width), Causal(width)
        self.fails = False

    def forward(self, h: T, kept: Kept) -> T:
        first = self.first(h, kept)
        if self.fails:
            raise ValueError("in the middle of a block")
        return h + self.second(torch.tanh(first), kept)


class Video(nn.Module):
    """Chunks of two frames through blocks that keep frames in one mapping. seen: what these held in the end."""

    def __init__(self, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(8) for _ in range(3)])
        self.seen: list[Kept] = []

    def forward(self, x: T) -> T:
        kept: Kept = {}
        self.seen.append(kept)
        found = []
        for chunk in x.split(2, 2):
            for block in self.blocks:
                chunk = block(chunk, kept)
            found.append(chunk)
        return torch.cat(found, 2)


def video(frames: int, batch: int = 1, seed: int = 1) -> T:
    return torch.randn(batch, 8, frames, generator=torch.Generator().manual_seed(seed))


def main(folder: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with counting() as counted:
        pair = Pair(Video(), Path(folder))
        pair.agrees(video(8))
        with torch.no_grad():
            found = pair.compiled(video(6, batch=2))
    told = pair.report.as_dict()
    print(
        json.dumps(
            {
                "compiled": told["artefacts_compiled"],
                "eager": told["eager"],
                **counted.as_dict(),
                "result": digest([found]),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
