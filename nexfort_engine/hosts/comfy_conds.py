# SPDX-License-Identifier: Apache-2.0
"""Conditions that ComfyUI keeps in main memory and copies to the GPU in each step, the prompt above all: copied once.

A copy of more than a megabyte or two out of memory that is not pinned waits until the GPU has done all before it. So
the processor, which has a step's launches to prepare meanwhile, begins with them when the GPU has nothing left to do:
1.6 of 29 ms a step with a prompt of 3.9 MB (PixArt's and its opposite), 1.4 of 131 with Flux's of 8.4 MB. Steps of
SDXL, whose prompt has 1.3 MB, are queued one behind the other (H200, torch 2.11, 2026-11).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ..constants import bits

_MOST_BYTES = 2**26  # of all values of one condition
_MOST = 8  # of them: a prompt and its opposite, if not in one batch, and some areas


class Conds:
    """What was copied, by the condition's name and where to: the latest values, in main memory and there."""

    def __init__(self) -> None:
        self._sent: dict[Hashable, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def clear(self) -> None:
        """Keep nothing on the GPU."""
        self._sent.clear()

    def sent(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What one call is given, with the tensors on `device` that would be copied there: same bits, same dtype.

        Each is a tensor of its own, which may be written to. Lists are conditions of several tensors.
        """
        placed = tuple(self._there(place, value, device) for place, value in enumerate(args))
        return placed, {name: self._there(name, value, device) for name, value in kwargs.items()}

    def _there(self, name: str | int, value: Any, device: torch.device) -> Any:
        if type(value) is list:
            return [self._there(name, one, device) for one in value]
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.device == device:
            return value
        if value.layout is not torch.strided or value.nbytes > _MOST_BYTES:
            return value
        kept = self._sent.setdefault((name, device), [])
        for place, (own, there) in enumerate(kept):
            if _same(own, value):
                kept.append(kept.pop(place))
                return there.clone()
        there = value.detach().to(device, copy=True)
        kept.append((value.detach().clone(), there))
        while len(kept) > _MOST or sum(own.nbytes for own, _ in kept) > _MOST_BYTES:
            del kept[0]
        return there.clone()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
