# SPDX-License-Identifier: Apache-2.0
"""Small conditions of a prompt that ComfyUI keeps in main memory and copies to the GPU in each step: copied once here.

Flux's guidance and PixArt's sizes of the picture are such, and so are latents of reference. A copy out of memory that
is not pinned waits until the GPU has done all before it. So the processor, which has a step's launches to prepare
meanwhile, begins with them when the GPU has nothing left to do: 2 ms of each step of PixArt and 1.5 of Flux's (H200).
"""

from __future__ import annotations

from typing import Any

import torch

from ..constants import bits

_MOST_BYTES = 2**22  # of one tensor; comparing so much takes a tenth of what the wait does
_MOST = 8  # values of one condition: a prompt and its opposite, if not in one batch, and some areas


class Conds:
    """What was copied, by the condition's name and where to: the latest values, in main memory and there."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def clear(self) -> None:
        """Keep nothing on the GPU."""
        self._sent.clear()

    def sent(self, given: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """The conditions of one call with those on `device` that it would be copied to: the same bits, the same dtype.

        Each is a tensor of its own, which may be written to. Lists are conditions of several tensors.
        """
        return {name: self._there(name, value, device) for name, value in given.items()}

    def _there(self, name: str, value: Any, device: torch.device) -> Any:
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
        del kept[:-_MOST]
        return there.clone()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
