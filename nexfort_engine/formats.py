# SPDX-License-Identifier: Apache-2.0
"""Memory formats: how the tensors of a call lie in memory, and how the artefacts of a region want them.

An artefact is made for one order of each tensor: contiguous ("c"), or channels innermost ("l": channels_last or
channels_last_3d). Tensors of another layout are brought to the first. Images are always brought to the second where
convolutions are lowered so: eager code leaves the same image in this order or that, as the layers before it happen to,
and each would want an artefact of its own. Artefacts leave images so too (passes/images.py): little is copied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Formats:
    """The memory formats of one region's calls.

    innermost: whether images lie with channels innermost on a type of device.
    """

    def __init__(self, module: nn.Module, innermost: Callable[[str], bool]) -> None:
        self._ask, self._innermost = innermost, dict[str, bool]()
        self._channels: set[int] = set()  # of the images that its layers take
        for sub in module.modules():
            if isinstance(sub, (nn.Conv2d, nn.ConvTranspose2d)):
                self._channels.add(sub.in_channels)
            elif isinstance(sub, nn.GroupNorm):
                self._channels.add(sub.num_channels)

    def of(self, tensor: torch.Tensor) -> str:
        """The format that artefacts want a tensor of a call in."""
        return "l" if self._is_image(tensor) else format_of(tensor)

    def laid(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in that format: itself, or a copy."""
        if self._is_image(tensor):
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor if tensor.is_contiguous() or format_of(tensor) == "l" else tensor.contiguous()

    def _is_image(self, tensor: torch.Tensor) -> bool:
        if tensor.ndim != 4 or tensor.shape[1] not in self._channels:
            return False
        where = tensor.device.type
        if where not in self._innermost:  # asked before every call: once is enough
            self._innermost[where] = self._ask(where)
        return self._innermost[where]


def format_of(tensor: torch.Tensor) -> str:
    """The format that a tensor is in: "c", which every other layout is brought to, or "l".

    "l" is channels_last or channels_last_3d of a tensor of rank 4 or 5 that is not contiguous as well.
    """
    if tensor.is_contiguous():
        return "c"
    ndim = tensor.ndim
    if ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "l"
    if ndim == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return "l"
    return "c"
