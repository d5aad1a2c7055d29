# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights are made of others in every call, and a host that says when they change. No test lives here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDE = 256  # a weight of it squared is large enough to be prepared


class Normed(nn.Module):
    """A layer whose weight is made of two on every call, beside one that is used as it is, and a literal tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.direction, self.length = nn.Parameter(torch.randn(WIDE, WIDE)), nn.Parameter(torch.rand(WIDE, 1) + 0.5)
        self.out, self.norm = nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE)
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.length * self.direction / self.direction.norm(dim=1, keepdim=True)
        h = nn.functional.linear(x, weight) + nn.functional.linear(x, weight.t()) * torch.tensor([0.5] * WIDE)
        return self.norm(self.out(h)) * (1 + self.norm.weight)


class Both(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed(seed) for seed in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def x(rows: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, rows, WIDE, generator=torch.Generator().manual_seed(seed))


class Host:
    """A weight provider that leases nothing, and says what its weights are."""

    signs, copies, hidden, reports_versions, has_pending_release = (), frozenset(), {}, True, False

    def __init__(self) -> None:
        self.said: Any = "one"

    def weights_version(self) -> Any:
        return self.said

    def room(self, _: torch.device) -> int:
        return 0

    def can_lease(self, _: nn.Module) -> bool:
        return False

    layout = None

    def stop_releasing(self) -> None: ...

    def poll_versions(self, run: object) -> None: ...

    def can_release(self, _: torch.device) -> bool:
        return False
