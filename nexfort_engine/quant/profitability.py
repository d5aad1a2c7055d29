# SPDX-License-Identifier: Apache-2.0
"""Which layers are worth packing for the sake of speed: each product saves time, bringing its input to fp8 takes some.

How many rows a layer is given only a call says: `Watch` notes it. Layers of one block that are given the same tensor
(query, key and value) share what narrowing it costs. Weightonly types are no matter of this: they save memory.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from .cost_model import Card, casting, narrowing, saves
from .plan import blocks_of, linear_layers, unfit
from .quant_types import QuantType

ROWS = 2048  # presumed where no call was seen: those of the larger products of a picture of 1024x1024 with guidance
_NEVER_RUN = "the call that was looked at does not run it"
# what reads whole numbers as they lie; any other reader of a result is taken to cast it on its way
_READERS = {torch.nn.functional.scaled_dot_product_attention, torch.bmm, torch.baddbmm, torch.matmul}


@dataclass(frozen=True)
class Seen:
    """What a layer was called with. rows: of its input. source: a number for that tensor in that block.

    read_whole: attention reads the result as it is, so that a cast of it would be a pass of its own.
    """

    rows: int
    source: int
    read_whole: bool = False


class Watch(TorchFunctionMode):
    """While entered, notes what the linear layers of some networks are called with. Its hooks stay: give it copies."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._seen: dict[str, dict[str, Seen]] = {}
        self._read: set[tuple[str, str]] = set()
        self._sources: dict[tuple[str, str, int], tuple[weakref.ref[torch.Tensor], int]] = {}
        self._numbers = itertools.count()
        # the address of a storage is not given away as long as somebody has such a reference, its memory is
        self._results: dict[StorageWeakRef, tuple[str, str]] = {}
        for name, net in networks.items():
            blocks = blocks_of(net)
            for path, layer in linear_layers(net):
                within = max((block for block in blocks if path.startswith(block)), key=len, default="")
                self._watch(layer, (name, path), within)

    def _watch(self, layer: nn.Linear, place: tuple[str, str], within: str) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._called(place, within, args[0] if args else kwargs["input"])

        def after(_: nn.Module, __: Any, result: torch.Tensor) -> None:
            self._results[StorageWeakRef(result.untyped_storage())] = place

        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after)

    def _called(self, place: tuple[str, str], within: str, x: torch.Tensor) -> None:
        name, path = place
        known = self._sources.get((name, within, id(x)))
        if known is None or known[0]() is not x:  # another tensor may get the id of one that is gone
            known = self._sources[name, within, id(x)] = weakref.ref(x), next(self._numbers)
        rows, layers = x.numel() // max(1, x.shape[-1]), self._seen.setdefault(name, {})
        if path not in layers or rows < layers[path].rows:  # of several calls the one that pays least
            layers[path] = Seen(rows, known[1])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let every function be what it is; of those that read whole numbers, note whose."""
        if func in _READERS:
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, torch.Tensor):
                    place = self._results.get(StorageWeakRef(value.untyped_storage()))
                    self._read.update([place] if place is not None else [])
        return func(*args, **(kwargs or {}))

    def seen(self, name: str) -> dict[str, Seen] | None:
        """Layer -> what it was called with, of one network; None if it was not called."""
        if name not in self._seen:
            return None
        return {path: Seen(s.rows, s.source, (name, path) in self._read) for path, s in self._seen[name].items()}


def only_what_pays(
    net: nn.Module,
    kind: QuantType,
    chosen: Mapping[str, str | None],
    seen: Mapping[str, Seen] | None,
    card: Card,
) -> dict[str, str | None]:
    """`chosen`, as a Chooser gives it, with a reason for each layer that would take as long packed, or longer.

    seen: as `Watch` gives it; None: every layer is presumed to see ROWS rows of its own.
    """
    found, shared = dict(chosen), dict[int, list[tuple[str, nn.Linear]]]()
    for number, (path, layer) in enumerate(linear_layers(net)):
        if found[path] is not None or unfit(layer, kind) is not None:
            continue
        if seen is not None and path not in seen:
            found[path] = _NEVER_RUN
            continue
        shared.setdefault(number if seen is None else seen[path].source, []).append((path, layer))
    for layers in shared.values():
        rows, inner = seen[layers[0][0]].rows if seen is not None else ROWS, layers[0][1].in_features
        saved = {path: _saved(layer, rows, seen is not None and seen[path].read_whole, card) for path, layer in layers}
        for path in saved.keys() - _paying(saved, rows, inner, card):
            found[path] = _reason(dict(layers)[path], rows, known=seen is not None)
    return found


def _paying(saved: Mapping[str, float], rows: int, inner: int, card: Card) -> set[str]:
    """Of layers that share an input, those that are packed: all that gain by it, if together they pay for it."""
    one_more = narrowing(rows, inner, card, 2) - narrowing(rows, inner, card, 1)
    gaining = {path for path, seconds in saved.items() if seconds > one_more}
    pay = sum(saved[path] for path in gaining) > narrowing(rows, inner, card, len(gaining))
    return gaining if pay else set()


def _saved(layer: nn.Linear, rows: int, read_whole: bool, card: Card) -> float:
    """Seconds, but for its input."""
    found = saves(rows, layer.in_features, layer.out_features, card)
    if read_whole and layer.weight.dtype != torch.bfloat16:  # which a product in fp8 gives
        found -= casting(rows, layer.out_features, card)
    return found


def _reason(layer: nn.Linear, rows: int, *, known: bool) -> str:
    size = f"{layer.out_features}x{layer.in_features}"
    if known:
        return f"{rows} row{'s' * (rows != 1)} times {size} would take as long or longer"
    return f"its rows are not known, and {rows} times {size} would take as long or longer"
