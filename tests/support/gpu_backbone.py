# SPDX-License-Identifier: Apache-2.0
"""A backbone for tests on a GPU, its inputs and when two results are near. No test lives here."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A block that reads an option, so that the option is among its guards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, shift: torch.Tensor, options: dict) -> torch.Tensor:
        y = self.down(nn.functional.gelu(self.up(self.norm(x) + shift[:, None])))
        return x - y if "flip" in options else x + y


class Backbone(nn.Module):
    """Code of its own between the regions, with an option and an attribute that it reads itself."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.gain = 1.0
        self.enter, self.time = nn.Linear(8, width), nn.Linear(1, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.leave = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, t: torch.Tensor, options: dict | None = None) -> torch.Tensor:
        options = {} if options is None else options
        shift = self.time(t[:, None]) * self.gain
        h = self.enter(x)
        for number, block in enumerate(self.blocks):
            options["number"] = number
            h = block(h, shift, options)
        h = h * options.get("strength", 1.0)
        return self.leave(h)


def inputs(batch: int, length: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, 8, generator=generator).cuda()
    return x, torch.rand(batch, generator=generator).cuda()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).norm() / b.norm()) < 2e-3  # float32 products may run in TF32 on either side
