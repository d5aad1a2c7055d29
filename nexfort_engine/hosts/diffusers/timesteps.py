# SPDX-License-Identifier: Apache-2.0
"""Timesteps at hand: schedulers that look a timestep up in a table are given its value without asking the GPU for it.

A pipeline keeps its timesteps on the GPU. DDIM and PNDM index a table on the CPU with one of them, so that each step
waits until the GPU has done all it was given, and the next one begins with an idle GPU. The values are known since the
run began: they are read once, and handed over in the place of the very tensors they are the values of. DDPM waits once
a step less, and still waits: it also looks for the timestep among the others.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

HOST = "cpu"  # the type of device whose numbers are read without waiting
_lock = threading.Lock()  # pipelines may share a scheduler


@contextmanager
def at_hand(scheduler: Any) -> Iterator[None]:
    """Inside the block `scheduler.step` gets timesteps that are rows of `scheduler.timesteps` as the CPU has them.

    Schedulers that count their steps look at no timestep after the first, and are left as they are.
    """
    step = getattr(scheduler, "step", None)
    if not callable(step) or hasattr(scheduler, "step_index") or not hasattr(scheduler, "__dict__"):
        yield
        return
    with _lock:
        told = vars(scheduler).get("step")
        if not isinstance(told, _Told):
            told = scheduler.step = _Told(scheduler, step, vars(scheduler).get("step"))
        told.users += 1
    try:
        yield
    finally:
        with _lock:
            told.users -= 1
            if not told.users and vars(scheduler).get("step") is told:
                if told.before is None:
                    del scheduler.step
                else:
                    scheduler.step = told.before


class _Told:
    """A scheduler's step, with the values of timesteps at hand. before: what stood in its place, if not the class's."""

    def __init__(self, scheduler: Any, step: Any, before: Any) -> None:
        functools.update_wrapper(self, step)  # pipelines look at its signature
        self.before, self.users = before, 0
        self._scheduler, self._step = scheduler, step
        self._read: tuple[Any, int, Any] = None, 0, None  # timesteps, their version, their values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(*map(self._value, args), **{name: self._value(one) for name, one in kwargs.items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of a copied scheduler, one for the copy; itself where a pipeline keeps a scheduler's attributes for later."""
        twin = memo.get(id(self._scheduler))
        if twin is None:
            return self
        step = type(twin).step.__get__(twin) if self.before is None else copy.deepcopy(self.before, memo)
        return _Told(twin, step, None if self.before is None else step)

    def _value(self, given: Any) -> Any:
        rows: Any = getattr(self._scheduler, "timesteps", None)
        row = _row_of(rows, given)
        if row is None:
            return given
        of, version, values = self._read
        if of is not rows or version != rows._version:
            values = rows.cpu()
            self._read = rows, rows._version, values
        return values[row]


def _row_of(rows: Any, given: Any) -> int | None:
    """Which of `rows`, whole numbers on another device than the CPU, a tensor is a view of."""
    if not all(isinstance(one, torch.Tensor) and one.device.type != HOST for one in (rows, given)):
        return None
    if rows.ndim != 1 or given.ndim or rows.dtype != given.dtype or rows.dtype.is_floating_point:
        return None
    if rows.is_inference() or not rows.stride(0):  # what changes in inference mode leaves no trace
        return None
    if rows.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
        return None
    row, rest = divmod(given.storage_offset() - rows.storage_offset(), rows.stride(0))
    return row if not rest and 0 <= row < len(rows) else None
