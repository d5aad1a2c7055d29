# SPDX-License-Identifier: Apache-2.0
"""Capture check: a step that runs as usual while it is noted what could not be captured in a CUDA graph.

With the allocator cudaMallocAsync a capture that fails ends the process: tensors that are freed on the way out belong
to a graph that never came to be, and their destructors throw. So what would make it fail is looked for beforehand: code
that waits for the GPU or copies between it and main memory (constants apart, host_constants.py), and Triton kernels of
others, whose launcher refuses memory that a graph will only own when it runs (the engine's own kernels are launched by
address, system/kernel_launches.py).
Not seen is what does not go through an operator: `torch.cuda.synchronize()` in the network's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..system.kernel_launches import noted_triton_launches
from .host_constants import MASKS, Remembering, tensors_in

_WAITS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
_COPIES = ("_to_copy", "copy_", "copy", "lift_fresh", "lift_fresh_copy")
_KNOWN = ("aten", "prims", "prim", "inductor", "profiler", "nexfort")  # namespaces of operators that keep no workspace


class CaptureCheck(Remembering):
    """Inside the block every operator runs, and the first reason why a capture would fail is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign = False  # an operator of others ran, which may allocate at its first call on a stream
        self._noting = ExitStack()

    def __enter__(self) -> CaptureCheck:
        self._noting.enter_context(
            noted_triton_launches(lambda name: self.note(f"it launches a Triton kernel of others ({name})"))
        )
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._noting.close()

    @contextmanager
    def around(self, artefact: Any, answered: Callable[[], int] = int) -> Iterator[None]:
        """As everywhere; of operators that are not watched again is known whether they are of others."""
        before, self.foreign = self.foreign, False
        with super().around(artefact, answered):
            yield
        if self.foreign:
            artefact.note_foreign()
        self.foreign = before or artefact.foreign

    def ran(self, func: Any, taken: list[torch.Tensor], result: Any) -> None:
        """Note what a capture would not bear of an operator that ran."""
        if not isinstance(func, torch._ops.OpOverload):
            self.note(f"it uses the operator {func}, of which nothing is known")
            return
        self.foreign |= func.namespace not in _KNOWN
        if self.reason is None:
            self._look(func, taken, tensors_in(result))

    def _look(self, func: Any, taken: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        name = func._schema.name.partition("::")[2]
        # an index waits if it is a mask: what it takes is as much as the mask has ones
        masked = name in _INDEXED and any(t.dtype in MASKS for t in taken[1:])
        if masked or (name not in _INDEXED and _WAITS & set(func.tags)):
            self.note(f"its code waits for the GPU ({name})")
        # arithmetic takes a tensor of one number by value, a copy does not
        seen = (*taken, *given) if name in (*_COPIES, *_INDEXED) else [t for t in (*taken, *given) if t.dim() > 0]
        if len({t.device.type for t in seen}) > 1:
            self.note(f"its code copies between the GPU and main memory ({name})")
