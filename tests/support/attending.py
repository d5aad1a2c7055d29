# SPDX-License-Identifier: Apache-2.0
"""A block that attends to a prompt. No test lives here."""

from __future__ import annotations

import torch
from torch import nn

T = torch.Tensor
WIDE, TEXT = 256, 20  # a weight of WIDE squared is large enough to be worth a part; so many tokens are a prompt


class Attending(nn.Module):
    """A block that attends to a prompt and is told a time."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(4))
        self.norm, self.time = nn.RMSNorm(WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: T, prompt: T, time: T) -> T:
        x = x + self.time(time)[:, None]
        scores = self.q(x) @ self.norm(self.k(prompt)).transpose(1, 2)
        return x + self.out(torch.softmax(scores / 16, -1) @ self.v(prompt))


def inputs(tokens: int = 6, text: int = TEXT) -> list[T]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(*size, WIDE, generator=generator) for size in ((2, tokens), (2, text), (2,))]
