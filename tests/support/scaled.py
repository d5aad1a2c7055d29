# SPDX-License-Identifier: Apache-2.0
"""Tensor subclasses as packs for quantised weights make them, and a block whose layer holds one. No test lives here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Opaque(torch.Tensor):
    """Small integers times a scale. `unit` belongs to neither. It does not say what it is made of."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor, unit: int = 1) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, device=whole.device)

    def __init__(self, whole: torch.Tensor, scale: torch.Tensor, unit: int = 1) -> None:
        self.whole, self.scale, self.unit = whole, scale, unit

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Any:
        """A tensor in eight bits."""
        scale = tensor.abs().amax() / 127
        return cls((tensor / scale).round().to(torch.int8), scale)

    def plain(self) -> torch.Tensor:
        """What it stands for."""
        return self.whole.to(self.scale.dtype) * self.scale * self.unit

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.linear.default:  # one operator that it has code of its own for
            x, weight = args[0], args[1]
            out = torch.nn.functional.linear(x, weight.whole.to(x.dtype)) * (weight.scale * weight.unit)
            return out if len(args) < 3 else out + args[2]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale, args[0].unit)
        in_full = [a.plain() if isinstance(a, Opaque) else a for a in args]
        return func(*in_full, **(kwargs or {}))


class Scaled(Opaque):
    """The same with torch's protocol for tensors that are made of others."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["whole", "scale"], {"unit": self.unit}

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Any], words: Any, _size: Any, _stride: Any) -> Scaled:
        return Scaled(parts["whole"], parts["scale"], words["unit"])


class Layer(nn.Module):
    """A layer with such a weight, of which it also adds the mean."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(weight.shape[0], generator=_drawn(1)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias) + (self.weight * 2.0).mean()


def weight(seed: int = 0) -> torch.Tensor:
    """A matrix to be scaled."""
    return torch.randn(8, 8, generator=_drawn(seed))


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
