# SPDX-License-Identifier: Apache-2.0
"""Budget: what the engine may take of a device beside what eager code takes for the same call.

It is a share of eager's own peak, however large the card is: what is free there may be somebody else's a moment later.
Eager's peak is what was allocated, operator by operator, while the network ran as its user calls it (`Measured`). That
leaves out what an operator takes and gives back on its way, and is so never more than the true one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MORE = 0.05  # of eager's peak


def figures(device: torch.device) -> tuple[int, int] | None:
    """Bytes of a device that are allocated now, and that were in all so far; None where nobody counts them."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    index = device.index if device.index is not None else torch.cuda.current_device()
    found = torch._C._cuda_memoryStats(index)["allocated_bytes"]["all"]
    return int(found["current"]), int(found["allocated"])


def is_counted(device: torch.device) -> bool:
    """Whether it is known what is allocated on a device."""
    return figures(device) is not None


def allows(peak: int, eager: int) -> bool:
    """Whether a peak is within the budget of eager's."""
    return peak <= (1 + MORE) * eager


def beside(device: torch.device) -> int:
    """Bytes that may be kept beside what is allocated now, which is less than eager's peak; no bound if uncounted."""
    found = figures(device)
    return sys.maxsize if found is None else int(MORE * found[0])


def no_memory(error: BaseException) -> bool:
    """Whether the GPU has no memory left. A graph that is launched says so by another class of error."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)


class Measured(TorchDispatchMode):
    """What a network that runs inside the block takes of a device.

    base: bytes that were allocated before. least, most: its peak is no less, and no more; they differ by what operators
    take on their way.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.base, _ = self._read()
        self.least = self.most = self.base

    def twice(self) -> int:
        """The peak of the same at twice the batch, at most."""
        return self.base + 2 * (self.most - self.base)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        now, before = self._read()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            after, all_of_it = self._read()
            self.least = max(self.least, after)
            self.most = max(self.most, after, now + all_of_it - before)

    def _read(self) -> tuple[int, int]:
        found = figures(self._device)
        assert found is not None, "it is asked for where somebody counts"
        return found
