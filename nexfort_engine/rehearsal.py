# SPDX-License-Identifier: Apache-2.0
"""Rehearsal: a step that runs as usual while it is noted what could not be captured in a CUDA graph.

With the allocator cudaMallocAsync a capture that fails ends the process: tensors that are freed on the way out belong
to a graph that never came to be, and their destructors throw. So what would make it fail is looked for beforehand: code
that waits for the GPU or copies between it and main memory, and Triton kernels of others, whose launcher refuses memory
that a graph will only own when it runs (the engine's own kernels are launched by address, flags.launched_by_address).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .flags import noted_triton_launches

_WAITS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_MASKS = (torch.bool, torch.uint8)


class Rehearsal(TorchDispatchMode):
    """Runs every operator and keeps the first reason why a capture would fail. reason: None while there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None

    def note(self, reason: str) -> None:
        """Keep a reason if it is the first."""
        self.reason = self.reason or reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.reason is None:
            name = func._schema.name.partition("::")[2]
            taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            # an index waits if it is a mask, whose result is as long as it has ones
            if _WAITS & set(func.tags) and (name != "index" or any(t.dtype in _MASKS for t in taken[1:])):
                self.note(f"its code waits for the GPU ({name})")
            given = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if len({t.device.type for t in (*taken, *given) if t.dim() > 0}) > 1:  # one number is passed by value
                self.note(f"its code copies between the GPU and main memory ({name})")
        return result


@contextmanager
def rehearsed() -> Iterator[Callable[[], str | None]]:
    """Rehearse what this thread runs inside the block; gives a function that tells the reason found so far."""
    rehearsal = Rehearsal()
    with (
        rehearsal,
        noted_triton_launches(lambda name: rehearsal.note(f"it launches a Triton kernel of others ({name})")),
    ):
        yield lambda: rehearsal.reason
