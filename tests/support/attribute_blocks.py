# SPDX-License-Identifier: Apache-2.0
"""A block that reads attributes of many kinds. No test lives here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class Inner(nn.Module):
    """A part of a block: a weight, a buffer, a tensor that is neither, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))
        self.loose = torch.ones(4)
        self.eps, self.layer = 1e-5, 7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table + self.loose + self.eps


class Block(nn.Module):
    """A block that reads attributes of many kinds."""

    inherited = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.scales, self.settings = [1.0, [2.0]], {"gain": 1.0, "deep": {"more": 1.0}}
        self.config = SimpleNamespace(shift=1.0, nested=[1.0], inner=SimpleNamespace(value=1.0))
        self.act: Callable[..., Any] = nn.functional.gelu
        self.optional: Any = None
        self.unused = "nobody reads this"
        self._power = 1.0

    @property
    def power(self) -> float:
        return self._power * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.inner(x)) * self.scales[0] * self.scales[1][0] * self.settings["gain"]
        x = x * self.settings["deep"]["more"] + self.config.shift + self.config.nested[0] + self.config.inner.value
        x = x + self.power
        return x if self.optional is None else x + self.optional
