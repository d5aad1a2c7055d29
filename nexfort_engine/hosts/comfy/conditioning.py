# SPDX-License-Identifier: Apache-2.0
"""Conditions that ComfyUI keeps in main memory and copies to the GPU in each step, the prompt above all: copied once.

A copy of more than a megabyte or two out of memory that is not pinned waits until the GPU has done all before it. So
the processor, which has a step's launches to prepare meanwhile, begins with them when the GPU has nothing left to do:
1.6 of 29 ms a step with a prompt of 3.9 MB (PixArt's and its opposite), 1.4 of 131 with Flux's of 8.4 MB. Steps of
SDXL, whose prompt has 1.3 MB, are queued one behind the other (H200, torch 2.11, 2026-11).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...cudagraphs.host_constants import Sent

_MOST_BYTES = 2**26  # of all that is kept of a network's conditions; the host copies what is beyond
_LATELY = 64  # calls: what none of them asked for makes room for others


_PROMPT = 3  # place of the prompt among the arguments of `_apply_model`

StepInvariant = dict[int, tuple[torch.Tensor, Hashable]]


@dataclass
class _Kept:
    """A condition that was copied, and the call that asked for it last. serial: no two have the same."""

    sent: Sent
    asked: int
    serial: int = field(default_factory=itertools.count(1).__next__)


class Conds:
    """What was copied, by the condition's name and where to: in main memory, and there."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[_Kept]] = {}
        self._calls = 0
        self._run: object = None  # held, or another would have its place
        self._runs = 0
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Keep nothing on the GPU."""
        with self._lock:
            self._kept.clear()

    def sent(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype | None = None,
        run: object = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any], StepInvariant]:
        """What one call is given, with the tensors on `device` that would be copied there: same bits, same dtype.

        They are those that ComfyUI's `_apply_model` copies, in lists by name too, and tensors of their own, which may
        be written to. Wrappers of others behind the engine's see them on the GPU.

        dtype: what `_apply_model` brings the prompt to, where nobody else sees it before that; so it comes here. run:
        an object that all steps of one picture have and no other. Third are these tensors by id, each with a name that
        only tensors of the same bits have, in any call of that run; none without one.
        """
        step_invariant: StepInvariant = {}
        if device.type == "mps":
            return args, kwargs, step_invariant  # has no float64, which the host makes float32 on the way

        def there(name: Hashable, value: Any, wanted: torch.dtype | None = None) -> Any:
            found = self._there(name, value, device, wanted)
            if found is None:
                return value
            copy = found.sent.there.clone()
            if run is not None:
                step_invariant[id(copy)] = copy, (found.serial, self._runs)
            return copy

        def each(name: str, value: Any) -> Any:
            if type(value) is list:
                return [there((name, place), one) for place, one in enumerate(value)]
            return there(name, value)

        with self._lock:
            self._calls += 1
            if run is not self._run:
                self._run, self._runs = run, self._runs + 1
            placed = tuple(there(i, value, dtype if i == _PROMPT else None) for i, value in enumerate(args))
            return placed, {name: each(name, value) for name, value in kwargs.items()}, step_invariant

    def _there(self, name: Hashable, value: Any, device: torch.device, dtype: torch.dtype | None) -> _Kept | None:
        """A value's copy; None where it is left to the host."""
        if not _is_copied(value, device):
            return None
        request, place = {"dtype": dtype or value.dtype}, (name, device)
        for one in self._kept.get(place, ()):
            if one.sent.answers(request, value):
                one.asked = self._calls
                return one
        self._forget()
        if self._bytes() + value.nbytes > _MOST_BYTES:
            return None
        sent = Sent(request, value.clone(), value.stride(), value.to(device, copy=True, **request))
        self._kept.setdefault(place, []).append(made := _Kept(sent, self._calls))
        return made

    def _forget(self) -> None:
        for name, kept in self._kept.items():
            self._kept[name] = [one for one in kept if one.asked > self._calls - _LATELY]

    def _bytes(self) -> int:
        return sum(one.sent.constant.nbytes for kept in self._kept.values() for one in kept)


def _is_copied(value: Any, device: torch.device) -> bool:
    """Whether the host would copy it to that device, and nothing but its numbers."""
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.device == device:
        return False
    return value.layout is torch.strided and not (value.requires_grad or value.is_quantized)
