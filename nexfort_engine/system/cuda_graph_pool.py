# SPDX-License-Identifier: Apache-2.0
"""Graph memory: what CUDA graphs hold of the device, and how it comes back.

With torch's own allocator graphs of one engine share a pool, which goes with the last of them; a capture into one whose
graphs are gone fails if somebody still has a tensor of it. With cudaMallocAsync the driver keeps it for graphs to come
until it is trimmed; and there a tensor that a capture made must go while that is captured, or its destructor ends the
process.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .cuda_driver import trim_graph_memory
from .process_settings import without_collection

log = logging.getLogger("nexfort")

_DESCRIPTORS = 1024  # bytes for the descriptors of one program; a kernel has as many programs as multiprocessors
_lock = threading.RLock()  # garbage that is collected while it is held may be the memory of other graphs
_capturing = 0  # captures that are under way in this process: nothing is trimmed meanwhile
_left: set[int] = set()  # devices whose graphs went while something was captured


class GraphMemory:
    """The memory of one engine's graphs."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._older: list[Any] = []  # pools of graphs that were captured before a capture failed
        self._spoilt = False  # a capture into the pool failed
        self._graphs: list[weakref.ref[Any]] = []  # those that were captured into it
        self._device: int | None = None  # where something was captured since the last time it was given back
        self._scratch: dict[int, torch.Tensor] = {}  # by device

    def scratch(self) -> torch.Tensor:
        """Memory of the current device for what kernels write for themselves to read. Ask for it before a capture.

        No graph owns it. The graphs of one engine share it: they are launched one after another.
        """
        device = torch.cuda.current_device()
        if device not in self._scratch:
            programs = torch.cuda.get_device_properties(device).multi_processor_count
            where = torch.device("cuda", device)
            self._scratch[device] = torch.empty(programs * _DESCRIPTORS, dtype=torch.uint8, device=where)
        return self._scratch[device]

    @contextmanager
    def captured(self, graph: Any, stream: Any = None) -> Iterator[None]:
        """What this thread launches inside the block goes into the graph, on the current device.

        stream: a torch.cuda.Stream to capture on; None: the one of torch.
        """
        global _capturing
        self._graphs = [ref for ref in self._graphs if ref() is not None]
        if not self._graphs or self._spoilt:
            self._older = [*self._older, self._pool] if self._graphs else []
            self._pool, self._spoilt = torch.cuda.graph_pool_handle(), False
        self._graphs.append(weakref.ref(graph))
        self._device = torch.cuda.current_device()
        with _lock:
            _capturing += 1
        try:
            # what is collected may be another engine's graph, and ending one ends a capture that is under way
            recording = torch.cuda.graph(graph, self._pool, stream=stream, capture_error_mode="thread_local")
            with torch.cuda.stream(recording.capture_stream):
                # cuBLAS keeps memory for each stream: taken first in a capture it would be that graph's
                torch.cuda.current_blas_handle()
            with without_collection(), recording:
                yield
        except BaseException:
            self._graphs.pop()  # it holds no pool, whoever holds on to it
            self._spoilt = True
            _end_recording(self._device, self._pool)
            raise
        finally:
            with _lock:
                _capturing -= 1
                left = set(_left) if not _capturing else set()
                _left.difference_update(left)
            for device in left:
                _trim(device)

    def give_back(self) -> None:
        """The graphs are gone: let the device have their memory."""
        self._pool, self._older, self._graphs, self._scratch = None, [], [], {}
        device, self._device = self._device, None
        if device is None or not fragile():
            return
        with _lock:
            if _capturing:
                _left.add(device)
                return
        _trim(device)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.give_back()


def _end_recording(device: int, pool: Any) -> None:
    """Have the allocator take no more memory for a capture that an error has ended.

    The end of such a capture raises before torch tells its allocator so, which then refuses other captures into the
    pool. On torch 2.11 it was seen to refuse one more even so, so that the next capture has a pool of its own.
    """
    while True:
        try:
            torch._C._cuda_endAllocateToPool(device, pool)
        except RuntimeError:
            return  # torch has told it
        torch._C._cuda_releasePool(device, pool)


def pool_bytes(memory: Any) -> int:
    """Bytes of the device that one engine's graphs hold. 0 with cudaMallocAsync, where they share it."""
    pool = getattr(memory, "_pool", None)
    if pool is None or fragile():
        return 0
    pools = {tuple(one) for one in (pool, *memory._older)}
    segments = torch.cuda.memory_snapshot()
    return sum(one["total_size"] for one in segments if tuple(one.get("segment_pool_id", ())) in pools)


def is_capturing() -> bool:
    """Whether some thread of this process captures now."""
    return _capturing > 0


def fragile() -> bool:
    """Whether the allocator is one with which a capture that fails ends the process."""
    return torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def without_frames(error: BaseException) -> BaseException:
    """The error, with nothing held on to by the frames it came through, nor by those of what it was raised over."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
    return error


def _trim(device: int) -> None:
    """Memory that is kept for nothing is no reason to fail."""
    try:
        torch.cuda.synchronize(device)  # a graph that still runs keeps its memory
        trim_graph_memory(device)
    except RuntimeError as error:
        log.warning("Nexfort: memory of CUDA graphs on device %d was not given back: %s", device, error)
