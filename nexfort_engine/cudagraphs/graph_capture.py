# SPDX-License-Identifier: Apache-2.0
"""A CUDA graph of what some code launches, in the memory that an engine's graphs share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ..system.capture_stream import CaptureStream
from ..system.cuda_graph_pool import GraphMemory, fragile, without_frames
from ..system.kernel_launches import launched_by_address
from .memset_nodes import editable, fills_as_kernels


def captured(
    memory: GraphMemory, run: Callable[[], Any], *, fills: bool, stream: CaptureStream | None = None
) -> tuple[Any, Any]:
    """A graph of what is launched by `run`, and what that returns. fills: memory is filled by kernels, where it can.

    stream: one that nothing else runs on while the graph lives; None: the stream that torch captures on. Raises what
    `run` raised: the end of a capture that an error has ended raises another one, which says nothing.
    """
    edited = fills and editable()
    graph, result, problem = torch.cuda.CUDAGraph(**({"keep_graph": True} if edited else {})), None, None
    try:
        # what cudaMallocAsync gives for a graph is not yet memory to those who ask the driver
        by_address = launched_by_address(memory.scratch()) if fragile() else nullcontext()
        with by_address, memory.captured(graph, stream and stream.stream):
            try:
                result = run()
            except BaseException as error:
                # what was made belongs to the graph: it has to go while that is captured, a cancel included
                problem = without_frames(error)
    except Exception:
        if problem is None:
            raise
    if problem is not None:
        raise problem
    if edited:
        fills_as_kernels(graph.raw_cuda_graph())
        graph.instantiate()
    return graph, result
