# SPDX-License-Identifier: Apache-2.0
"""Images that are joined while a CUDA graph is captured: row by row, as they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..modules.channels_last import _is_turned


class JoinedAsRows(TorchFunctionMode):
    """Inside the block images that lie so are concatenated as rows of channels, which they are: the same numbers.

    torch's kernel takes more than twice as long for images, because it divides by all their sizes to find a place.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.cat, torch.concat, torch.concatenate):
            joined = _joined(*args, **(kwargs or {}))
            if joined is not None:
                return joined
        return func(*args, **(kwargs or {}))


def _joined(tensors: Any, dim: Any = 0, **more: Any) -> torch.Tensor | None:
    """Images one behind the other by their channels; None for anything else."""
    if dim not in (1, -3) or more or not isinstance(tensors, (list, tuple)) or not all(map(_is_turned, tensors)):
        return None
    if any(one.dim() != 4 for one in tensors):
        return None
    kinds = {(type(one), one.dtype, one.device, one.shape[0], *one.shape[2:]) for one in tensors}
    if len(kinds) != 1:
        return None
    (kind, _, _, n, h, w), rows = kinds.pop(), [one.permute(0, 2, 3, 1).flatten(0, 2) for one in tensors]
    return torch.cat(rows, 1).view(n, h, w, -1).permute(0, 3, 1, 2) if kind is torch.Tensor else None
