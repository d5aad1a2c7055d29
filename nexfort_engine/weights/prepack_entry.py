# SPDX-License-Identifier: Apache-2.0
"""Prepared weights: what a graph computes of its weights alone, taken out of it, computed once and kept.

A packed or joined weight is the same in every step. Taken out of the graph (graph/const_subgraph.py) it becomes a small
graph of its own, the preparation, whose results are inputs of the rest. The results are kept for as long as the host
can say that no weight changed (`Version`); where it cannot, or there is no room, the preparation runs on every call,
which is what the graph did before. So an artefact with a preparation is as safe as one without: it never sees an old
weight.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from .lease import NO_PLACEHOLDERS, Placeholders
from .subclass_unwrap import places

_RESERVE = 1 << 31  # bytes of the device that stay free when results are kept

Version = Hashable  # what the host says of its weights as a whole: while it is equal, none changed; None: it cannot say
_serials = itertools.count(1)
_asked_for: list[Callable[[torch.device], int]] = []  # bytes of a device that its user wants free, as hosts say


@dataclass
class PrepackEntry:
    """Prepared tensors of one module, and of what they were made. serial: no two have the same.

    placeholders: for leased weights, which need not be leased again while these are kept. at: places of the weights
    that these are made of or stand for; None for all.
    """

    tensors: list[torch.Tensor]
    version: Version
    made_of: list[weakref.ref[Any] | None]
    places: list[Any]
    placeholders: Placeholders
    at: list[int] | None = None
    serial: int = field(default_factory=lambda: next(_serials))

    @classmethod
    def of(
        cls,
        tensors: list[torch.Tensor],
        version: Version,
        weights: list[torch.Tensor],
        placeholders: Placeholders = NO_PLACEHOLDERS,
        at: list[int] | None = None,
    ) -> PrepackEntry:
        """weights: as the module holds them, wherever the numbers are."""
        weights = _at(weights, at)
        made_of: list[Any] = [weakref.ref(w) if w is not None else None for w in weights]
        return cls(tensors, version, made_of, places(weights), placeholders, at)

    def moved(self, weights: list[torch.Tensor]) -> None:
        """The weights, as the module holds them, lie elsewhere now and are the same."""
        self.places = places(_at(weights, self.at))

    def holds(self, version: Version, weights: list[torch.Tensor]) -> bool:
        """Whether they are what would be made now."""
        weights = _at(weights, self.at)
        if version is None or version != self.version or len(weights) != len(self.made_of):
            return False
        same = all((ref() if ref else None) is w for ref, w in zip(self.made_of, weights, strict=True))
        return same and places(weights) == self.places


def _at(weights: list[torch.Tensor], at: list[int] | None) -> list[torch.Tensor]:
    return weights if at is None else [weights[i] for i in at]


def leave_free(wanted: Callable[[torch.device], int]) -> None:
    """Keep nothing from now on where fewer bytes of the device than `wanted` says would stay free."""
    if wanted not in _asked_for:
        _asked_for.append(wanted)


def room_for(tensors: list[torch.Tensor], more: Callable[[torch.device], int]) -> bool:
    """Whether the device has room to keep what was just made on it, and some to spare.

    more: bytes of it that others would give up at once, besides what is free; asked only if those do not suffice.
    """
    device = tensors[0].device
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    left = free + max(0, cached)
    spare = max([_RESERVE, *(wanted(device) for wanted in _asked_for)])
    return left > spare or left + more(device) > spare
