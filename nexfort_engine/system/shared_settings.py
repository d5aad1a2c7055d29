# SPDX-License-Identifier: Apache-2.0
"""Switches of the process that several threads may hold at once: cuDNN's, TF32's, those of compiling, of garbage and of
threads.

Set through `process_settings.py` and `yielding.py` only.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

RARE = 100  # collections of younger garbage for one of everything

_lock = threading.Lock()


class Held:
    """One process-wide flag held by any number of overlapping scopes; the latest still open decides."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._read, self._write = read, write
        self._open: dict[object, Any] = {}
        self._before: Any = None

    def enter(self, value: Any) -> object:
        ticket = object()
        with _lock:
            if not self._open:
                self._before = self._read()
            self._write(value)
            self._open[ticket] = value
        return ticket

    def leave(self, ticket: object) -> None:
        with _lock:
            del self._open[ticket]
            self._write(next(reversed(self._open.values())) if self._open else self._before)


def _read_cudnn() -> bool:
    import torch

    return torch.backends.cudnn.benchmark


def _write_cudnn(value: bool) -> None:
    import torch

    torch.backends.cudnn.benchmark = value


def _read_tf32() -> tuple[bool | None, str | None]:
    import torch

    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    try:
        return matmul.allow_tf32, precision
    except RuntimeError:  # the user set it through fp32_precision only, and the older switch cannot be read then
        return None, precision


def _write_tf32(value: bool | tuple[bool | None, str | None]) -> None:
    import torch

    matmul = torch.backends.cuda.matmul
    if isinstance(value, tuple):
        legacy, precision = value
        if legacy is not None:
            matmul.allow_tf32 = legacy
        if precision is not None:  # after the older switch, which would leave "ieee" where "none" was
            matmul.fp32_precision = precision
    else:
        matmul.allow_tf32 = value


def _read_fp16_sums() -> bool:
    import torch

    return torch.backends.cuda.matmul.allow_fp16_accumulation


def _write_fp16_sums(value: bool) -> None:
    import torch

    torch.backends.cuda.matmul.allow_fp16_accumulation = value


def _read_conv_tf32() -> bool | None:
    import torch

    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # as with products: the user set it through fp32_precision only
        return None


def _write_conv_tf32(value: bool | None) -> None:
    import torch

    if value is not None:
        torch.backends.cudnn.allow_tf32 = value


def _write_collection(value: bool) -> None:
    if value:
        gc.enable()
    else:
        gc.disable()


def _write_full_collections(value: bool | tuple[int, int, int]) -> None:
    """False: a hundred collections of younger garbage come before one of everything, where Python has ten.

    A tuple is what `gc.get_threshold` gave before. What was made meanwhile then counts as old, or the full collection
    that did not come would come at once. Objects that somebody froze stay frozen.
    """
    if isinstance(value, tuple):
        # how many are frozen is counted one by one: as long as a full collection, and asked only where one is due
        if gc.get_count()[2] > value[2] and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*value)
    else:
        young, middle, full = gc.get_threshold()
        gc.set_threshold(young, middle, max(full, RARE))


class _Uncompiled:
    """Whether what torch.compile made runs as it was written."""

    def __init__(self) -> None:
        self._stance: Any = None

    def read(self) -> bool:
        return self._stance is not None

    def write(self, value: bool) -> None:
        import torch

        if value and self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")
        elif not value and self._stance is not None:
            stance, self._stance = self._stance, None
            stance.__exit__(None, None, None)  # to what its user had set


_uncompiled = _Uncompiled()

HELD = {
    "collection": Held(gc.isenabled, _write_collection),
    "uncompiled": Held(_uncompiled.read, _uncompiled.write),
    "switch_interval": Held(sys.getswitchinterval, sys.setswitchinterval),
    "full_collections": Held(gc.get_threshold, _write_full_collections),
    "conv_benchmark": Held(_read_cudnn, _write_cudnn),
    "matmul_allow_tf32": Held(_read_tf32, _write_tf32),
    "matmul_allow_fp16_accumulation": Held(_read_fp16_sums, _write_fp16_sums),
    "conv_allow_tf32": Held(_read_conv_tf32, _write_conv_tf32),
}
