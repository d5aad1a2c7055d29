# SPDX-License-Identifier: Apache-2.0
"""Offloading: weights lie in main memory while the device holds what was prepared of them (prepack_entry.py).

A host that takes no memory back by itself would hold a model twice, as it is and prepared. So weights that no artefact
reads any more are copied to main memory, on a thread and beside the steps; once all of them are there, they leave the
device between two steps (`Offload.without`). What is kept and as large as one of them moves into its place, or the
device's memory would be left in pieces. Their layers are marked (`AWAY`), by which the host's weight provider knows
that they have to be leased. Whoever runs a layer's own code, be it a block that runs eager or a clone without Nexfort,
finds its weights where they were: its forward takes them back first (`take_back`).

Weights may be changed in their place without a word. Some numbers of each are compared before they leave, and whenever
the host asks for it (`Offload.edits`).
"""

from __future__ import annotations

import logging
import threading
import types
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from ..reporting.report import named
from ..reporting.resource_shortages import begun
from .subclass_unwrap import places

log = logging.getLogger("nexfort")

AWAY = "_nexfort_away"  # in the attribute table of a layer whose weights are in main memory
LEAST = 32 << 20  # bytes: fewer are not worth a thread and a graph that is captured again
_MOST_TIMES = 8  # that the same weights are copied: where they are wanted back each time, they had better stay
_MOST_COMPARED = 256  # numbers of a weight
_MAIN = torch.device("cpu")
_NONE = torch.empty(0, dtype=torch.int64)
_AS_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_lock = threading.RLock()


class Home(Protocol):
    """What the host has to do with weights that leave and come back."""

    def has(self, layer: nn.Module) -> bool:
        """Whether the host itself keeps a layer's weights elsewhere by now."""

    def make_room(self, device: torch.device, size: int) -> None:
        """Weights of so many bytes are to come back to a device."""

    def moved(self, size: int) -> None:
        """They came, or left where it is less than zero."""


class Away:
    """The mark of a layer: where its weights come back to, and whose they are. In what is pickled there is none."""

    def __init__(self, device: torch.device, home: Home) -> None:
        self.device, self.home = device, home

    def __deepcopy__(self, _memo: Any) -> Away:
        return self

    def __reduce__(self) -> Any:
        return _nowhere, ()


def _nowhere() -> None:
    return None


def is_away(layer: nn.Module) -> bool:
    """Whether a layer's weights left the device, and nobody has taken them back."""
    return layer.__dict__.get(AWAY) is not None


def take_back(layer: nn.Module) -> None:
    """Have a layer's weights where they were before they left, unless the host moved them since.

    Raises torch.OutOfMemoryError; they are away then as before.
    """
    with _lock:
        away: Away | None = layer.__dict__.get(AWAY)
        if away is not None:
            gone = [w for w in _weights_of(layer).values() if w.device.type == _MAIN.type]
            if gone and not away.home.has(layer):
                size = sum(weight.nbytes for weight in gone)
                away.home.make_room(away.device, size)
                for weight in gone:
                    weight.data = weight.data.to(away.device, copy=True)
                away.home.moved(size)
            del layer.__dict__[AWAY]
        if _is_ours(layer.__dict__.get("forward")):
            del layer.__dict__["forward"]


def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A layer's forward while its weights are away. A method of this name is the class's own once it was pickled."""
    take_back(layer)
    return type(layer).forward(layer, *args, **kwargs)


forward.nexfort_shim = forward.__code__  # type: ignore[attr-defined]


def _is_ours(found: Any) -> bool:
    return getattr(found, "__func__", None) is forward


class Offload:
    """What leaves a device of the weights of one network."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._copies: _Copies | None = None
        self._version: Hashable = None  # of the weights that these are about
        self._times = 0
        self._stay = False
        self._gone: list[tuple[nn.Module, torch.Tensor]] = []  # layers, and numbers of their weights as they left
        self.edits = 0  # how often weights that are away were found to be other ones

    @property
    def ready(self) -> bool:
        """Whether weights were copied, so that they may leave."""
        return self._copies is not None and self._copies.done.is_set()

    def stays(self, version: Hashable) -> bool:
        """Whether weights of this version were found to stay where they are: also where they change all the time."""
        return (self._stay and version == self._version) or self.edits > _MOST_TIMES

    def begun(self, version: Hashable) -> bool:
        """Whether weights of this version were copied, or are being."""
        return self._times > 0 and version == self._version

    def without(self, layers: list[nn.Module], version: Hashable, kept: Iterable[list[torch.Tensor]] = ()) -> int:
        """Have the weights of these layers leave: begin to copy them or, once that was done, let go of them.

        version: what the host says of all weights; copies of others are dropped. kept: tensors for which others with
        the same numbers are put into the lists, where a place is left that is as large. Returns the bytes that weights
        took that left just now.
        """
        if version != self._version:
            self.forget()
            self._version, self._times, self._stay = version, 0, False
        copies = self._copies
        if copies is not None and not copies.done.is_set():
            return 0
        left_behind = copies.let_go(layers, self._home) if copies is not None else []
        if copies is not None:
            self._stay |= copies.failed
            self.edits += copies.changed
        self.forget()
        if left_behind:
            _move_into(left_behind, kept)
            self._gone = [(layer, _compared([layer])) for layer in layers if is_away(layer)]
            given = sum(place.nbytes for place in left_behind)
            self._home.moved(-given)
            return given
        if copies is not None and copies.changed:
            return 0  # these are weights of another version, as the host says from now on
        left = [layer for layer in layers if not is_away(layer)]
        enough = sum(weight.nbytes for layer in left for weight in _weights_of(layer).values()) >= LEAST
        self._stay |= self._times >= _MOST_TIMES or not (enough or len(left) < len(layers))
        if enough and not self.stays(version):
            self._times += 1
            self._copies = _Copies(left)
        return 0

    def poll_versions(self) -> None:
        """Count weights that are away and were changed in their place as an edit."""
        self._gone = [(layer, numbers) for layer, numbers in self._gone if is_away(layer)]
        if any(not torch.equal(_compared([layer]), numbers) for layer, numbers in self._gone):
            self.edits += 1
            self._gone.clear()

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
    """Weights of some layers, copied to main memory on a thread."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.done, self.dropped, self.failed, self.changed = threading.Event(), False, False, False
        self._layers, self._before = layers, [_compared([layer]) for layer in layers]
        self._weights = [_weights_of(layer) for layer in layers]
        self._places = [places([*weights.values()]) for weights in self._weights]
        self._device = next(iter(self._weights[0].values())).device
        self._made: list[dict[str, torch.Tensor]] = []
        written = None  # by whoever put the weights there
        if self._device.type == "cuda":
            written = torch.cuda.Event()
            written.record(torch.cuda.current_stream(self._device))
        if (reason := begun("nexfort-offload", self._copy, written)) is not None:
            self._not_made(reason)

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
        except Exception as error:  # of memory
            self._not_made(named(error))
        finally:
            self.done.set()

    def _not_made(self, reason: str) -> None:
        """The weights stay where they are."""
        log.warning("Nexfort: weights could not be copied to main memory: %s", reason)
        self.failed = True
        self._made.clear()
        self.done.set()

    def let_go(self, layers: list[nn.Module], home: Home) -> list[torch.Tensor]:
        """Put the copies in the places of weights that are still there, of those of these layers; gives the others."""
        wanted, rows = set(map(id, layers)), []
        copied = zip(self._layers, self._weights, self._places, self._before, self._made, strict=False)
        for layer, weights, there, before, made in copied:
            now = _weights_of(layer)
            same = now.keys() == weights.keys() and all(now[name] is weight for name, weight in weights.items())
            if id(layer) in wanted and same and places([*now.values()]) == there and "forward" not in layer.__dict__:
                rows.append((layer, weights, before, made))
        before, current = torch.cat([_NONE, *[row[2] for row in rows]]), _compared([row[0] for row in rows])
        copied_numbers = _numbers([row[3] for row in rows])
        self.changed = not torch.equal(current, before) or not torch.equal(current, copied_numbers)
        if self.changed:
            return []  # somebody wrote to them meanwhile
        left_behind = []
        for layer, weights, _, made in rows:
            with _lock:
                for name, weight in weights.items():
                    left_behind.append(weight.detach())
                    weight.data = made[name]
                layer.__dict__[AWAY] = Away(self._device, home)
                layer.__dict__["forward"] = types.MethodType(forward, layer)
        return left_behind


def _move_into(left_behind: list[torch.Tensor], kept: Iterable[list[torch.Tensor]]) -> None:
    """Move tensors of lists into the memory of others of their size and device that nobody else has any more."""
    free = defaultdict(list)
    for place in left_behind:
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


def _compared(layers: list[nn.Module]) -> torch.Tensor:
    """Some numbers of the weights of layers."""
    return _numbers([_weights_of(layer) for layer in layers])


@torch.inference_mode()  # as weights may be, of which nobody else could look at the bits
def _numbers(rows: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Bits of some of the numbers of weights, evenly spread in memory, as int64 in main memory."""
    found = []
    for weight in (weight for row in rows for weight in row.values()):
        step = max(1, weight.numel() // _MOST_COMPARED)
        spread = weight.detach().as_strided((weight.numel() // step,), (step,))
        found.append(spread.view(_AS_BITS[weight.element_size()]).to(torch.int64))
    return torch.cat(found).to(_MAIN) if found else _NONE


def _weights_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in layer._parameters.items() if value is not None}
