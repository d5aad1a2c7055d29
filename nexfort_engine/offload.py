# SPDX-License-Identifier: Apache-2.0
"""Offloading: weights lie in main memory while the device holds what was prepared of them (prepared.py).

A host that takes no memory back by itself would hold a model twice, as it is and prepared. So weights that no artefact
reads any more are copied to main memory, on a thread and beside the steps; once all of them are there, they leave the
device between two steps (`Offload.without`). What is kept and as large as one of them moves into its place, or the
device's memory would be left in pieces. Their layers are marked (`AWAY`), by which the host's lender knows that they
have to be lent. Whoever runs a layer's own code, be it a block that runs eager or a clone without Nexfort, finds its
weights where they were: its forward takes them back first (`take_back`).
"""

from __future__ import annotations

import logging
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .report import named

log = logging.getLogger("nexfort")

AWAY = "_nexfort_away"  # in the attribute table of a layer whose weights are in main memory
LEAST = 32 << 20  # bytes: fewer are not worth a thread and a graph that is captured again
_MOST_TIMES = 8  # that the same weights are copied: where they are wanted back each time, they had better stay
_MAIN = torch.device("cpu")
_lock = threading.RLock()


@dataclass(frozen=True, eq=False)
class Away:
    """Where the weights of a layer come back to. offloaded: whether the host itself keeps them elsewhere by now."""

    device: torch.device
    offloaded: Callable[[nn.Module], bool]


def is_away(layer: nn.Module) -> bool:
    """Whether a layer's weights left the device, and nobody has taken them back."""
    return AWAY in layer.__dict__


def take_back(layer: nn.Module) -> bool:
    """Have a layer's weights where they were before they left, unless the host moved them since. Whether they moved.

    Raises torch.OutOfMemoryError; they are away then as before.
    """
    with _lock:
        away = layer.__dict__.get(AWAY)
        if away is None:
            return False
        moved = False
        for weight in _weights_of(layer).values():
            if weight.device.type == _MAIN.type and not away.offloaded(layer):
                weight.data = weight.data.to(away.device, copy=True)
                moved = True
        del layer.__dict__[AWAY]
        if getattr(layer.__dict__.get("forward"), "nexfort_shim", False):
            del layer.__dict__["forward"]
        return moved


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    take_back(layer)
    return type(layer).forward(layer, *args, **kwargs)


_forward.nexfort_shim = True  # type: ignore[attr-defined]


class Offload:
    """What leaves a device of the weights of one network.

    offloaded: whether the host itself keeps a layer's weights elsewhere.
    """

    def __init__(self, offloaded: Callable[[nn.Module], bool]) -> None:
        self._offloaded = offloaded
        self._copies: _Copies | None = None
        self._version: Hashable = None
        self._times = 0

    @property
    def ready(self) -> bool:
        """Whether weights were copied, so that they may leave."""
        return self._copies is not None and self._copies.done.is_set()

    def without(self, layers: list[nn.Module], version: Hashable, kept: Iterable[list[torch.Tensor]] = ()) -> int:
        """Have the weights of these layers leave: begin to copy them or, once that was done, let go of them.

        version: what the host says of all weights; copies of others are dropped. kept: tensors for which others with
        the same numbers are put into the lists, where a place is left that is as large. Returns the bytes that weights
        took that left just now.
        """
        copies, given = self._copies, 0
        if copies is not None and copies.version == version:
            if not copies.done.is_set():
                return 0
            left_behind = copies.let_go(layers, self._offloaded)
            given = sum(place.nbytes for place in left_behind)
            _move_into(left_behind, kept)
        self.forget()
        left = [layer for layer in layers if not is_away(layer)]
        if version != self._version:
            self._version, self._times = version, 0
        if not given and self._times < _MOST_TIMES and sum(map(_size_of, left)) >= LEAST:
            self._times += 1
            self._copies = _Copies(left, version)
        return given

    def forget(self) -> None:
        """Let nothing leave that is being copied."""
        if self._copies is not None:
            self._copies.dropped = True
            self._copies = None

    def join(self, timeout: float | None = None) -> None:
        """Wait until what is being copied is there, at most so many seconds."""
        if self._copies is not None:
            self._copies.done.wait(timeout)


class _Copies:
    """Weights of some layers, copied to main memory on a thread. version: of the weights as they were then."""

    def __init__(self, layers: list[nn.Module], version: Hashable) -> None:
        self.version, self.done, self.dropped = version, threading.Event(), False
        self._layers = layers
        self._weights = [_weights_of(layer) for layer in layers]
        self._places = [_places(weights) for weights in self._weights]
        self._device = next(iter(self._weights[0].values())).device
        self._made: list[dict[str, torch.Tensor]] = []
        written = None  # by whoever put the weights there
        if self._device.type == "cuda":
            written = torch.cuda.Event()
            written.record(torch.cuda.current_stream(self._device))
        threading.Thread(target=self._copy, args=(written,), name="nexfort-offload", daemon=True).start()

    def _copy(self, written: torch.cuda.Event | None) -> None:
        try:
            stream = torch.cuda.Stream(self._device) if written is not None else None
            if stream is not None and written is not None:
                stream.wait_event(written)
            with torch.no_grad(), torch.cuda.stream(stream):  # a stream that is None changes nothing
                for weights in self._weights:
                    if self.dropped:
                        break
                    self._made.append({name: weight.detach().to(_MAIN, copy=True) for name, weight in weights.items()})
        except Exception as error:  # of memory; the weights stay where they are
            log.warning("Nexfort: weights could not be copied to main memory: %s", named(error))
            self._made.clear()
        finally:
            self.done.set()

    def let_go(self, layers: list[nn.Module], offloaded: Callable[[nn.Module], bool]) -> list[torch.Tensor]:
        """Put the copies in the places of weights that are still there, of those of these layers; gives the others."""
        wanted, given = set(map(id, layers)), list[torch.Tensor]()
        for layer, weights, places, made in zip(self._layers, self._weights, self._places, self._made, strict=False):
            own = layer.__dict__
            now = _weights_of(layer)
            same = now.keys() == weights.keys() and all(now[name] is weight for name, weight in weights.items())
            if id(layer) not in wanted or not same or _places(now) != places or "forward" in own:
                continue
            with _lock:
                for name, weight in weights.items():
                    given.append(weight.detach())
                    weight.data = made[name]
                own[AWAY] = Away(self._device, offloaded)
                own["forward"] = types.MethodType(_forward, layer)
        return given


def _move_into(places: list[torch.Tensor], kept: Iterable[list[torch.Tensor]]) -> None:
    """Move tensors of lists into the memory of others of their size and device that nobody else has any more."""
    free = defaultdict(list)
    for place in places:
        if _is_alone(place):
            free[place.nbytes, place.device].append(place.untyped_storage())
    for tensors in kept:
        for number, tensor in enumerate(tensors):
            there = free.get((tensor.nbytes, tensor.device))
            if there and _is_alone(tensor):
                moved = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                moved.set_(there.pop(), 0, tensor.shape, tensor.stride())  # type: ignore[call-overload]
                tensors[number] = moved.copy_(tensor)


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor has all of a piece of memory, and nobody else has any of it."""
    users = getattr(torch._C, "_storage_Use_Count", None)  # itself and the object that is asked for
    memory = tensor.untyped_storage()
    return users is not None and memory.nbytes() == tensor.nbytes and users(memory._cdata) <= 2


def _weights_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in layer._parameters.items() if value is not None}


def _size_of(layer: nn.Module) -> int:
    return sum(weight.nbytes for weight in _weights_of(layer).values())


def _places(weights: dict[str, torch.Tensor]) -> list[int]:
    return [weight.data_ptr() for weight in weights.values()]
