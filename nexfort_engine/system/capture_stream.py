# SPDX-License-Identifier: Apache-2.0
"""Streams that an engine has to itself, for steps that can be captured on no other.

Some libraries keep a workspace for each stream (the stream-K matmuls of comfy_kitchen). They allocate it where the
first call on a stream is under way, and free it for a larger one where a later call needs more. No allocation is
permitted in a capture, so that a step has to run on a stream before it is captured there. A graph reads the workspace
at its address: after another step has run on its stream, a graph is not to be replayed.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .cuda_driver import library

log = logging.getLogger("nexfort")

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream
_lock = threading.Lock()
_free: dict[int, list[torch.cuda.ExternalStream]] = {}  # by device: streams whose graphs are gone


class CaptureStream:
    """A stream that nobody else has, until this object goes."""

    def __init__(self, stream: torch.cuda.ExternalStream, device: int) -> None:
        self.stream, self._device = stream, device

    @contextmanager
    def active(self) -> Iterator[None]:
        """What this thread launches inside the block runs on the stream, after and before what runs outside it.

        Memory that is allocated inside the block may be read outside it: the stream's next block waits for the caller's
        stream, and memory of a stream is only used anew on that stream.
        """
        outside = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outside.wait_stream(self.stream)

    def __del__(self) -> None:
        # no lock: a list's append is atomic, and garbage may be collected while the lock is held
        _free.setdefault(self._device, []).append(self.stream)


def capture_stream(device: torch.device) -> CaptureStream | None:
    """A stream of a device, or None where the driver cannot be asked for one."""
    driver = library()
    if device.type != "cuda" or driver is None or torch.version.cuda is None:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if free := _free.get(index):
            return CaptureStream(free.pop(), index)
    with torch.cuda.device(index):
        torch.cuda.current_stream().query()  # the device's context is current in this thread from here on
        handle = ctypes.c_void_p()
        failed = driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
    if failed or handle.value is None:
        log.debug("Nexfort: the driver gave no stream: cuStreamCreate gave %d", failed)
        return None
    return CaptureStream(torch.cuda.ExternalStream(handle.value, device=index), index)
