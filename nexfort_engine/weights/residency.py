# SPDX-License-Identifier: Apache-2.0
"""Residency: where the weights of a whole network are for the length of a step, whoever keeps them.

A whole step can be replayed only while every weight stays at its address. Weights that the network itself holds do so
by themselves. Those that a host keeps elsewhere do if what was leased last can be had again for asking; they are then
held until the step is issued, in one go rather than region by region.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..modules.tree import Seen, Slot, WeightSlots
from .lease import Layers, NotLeased, WeightProvider


class Residency:
    """The weights of one network.

    root: the network. provider: the host's, if it may keep weights elsewhere. released_weights: those that a step does
    not need where they are kept, since it has them prepared; the host is not asked for them.
    """

    def __init__(
        self, root: nn.Module, provider: WeightProvider | None, released_weights: Collection[Slot] = ()
    ) -> None:
        besides = provider.copies if provider is not None else frozenset()
        self._slots = WeightSlots(root, besides)
        self._layers = Layers(provider, root, self._slots.names) if provider is not None else None
        mine = {(id(table), name) for table, name in released_weights}
        self._released_weights = [i for i, (table, name) in enumerate(self._slots.slots) if (id(table), name) in mine]
        self._seen = Seen()
        self._leased = False  # whether those held last are the host's

    @contextmanager
    def held(self, device: torch.device) -> Iterator[list[torch.Tensor] | None]:
        """All weights at their addresses, until the block ends; None where some would have to be fetched first.

        Says where they are, and not yet that nothing else is to be done with them: that is `sound`.
        """
        weights, layers = self._slots.read(), self._layers
        self._leased = layers is not None and layers.kept
        if layers is None or not self._leased:
            yield weights
            return
        kept = layers.still(device)
        if kept is None:
            yield None
            return
        try:
            yield kept.given
        finally:
            kept.lease.release()

    def sound(self) -> bool:
        """Whether the weights that were held are those which the network's layers would use, as they are."""
        due = self._due(self._slots.read())
        if due is None or self._layers is None:
            return due is not None
        is_leased = bool(due) and self._layers.kept
        if is_leased == self._leased and (is_leased or not due):
            return True
        self._layers.forget()  # what was held is not what would be used
        return False

    def settle(self, device: torch.device) -> bool:
        """Whether the weights stay where they are, now that a step has run on them. Asks the host for what it keeps.

        Not for a network of which only a part fits: all the rest would be fetched for nothing.
        """
        weights = self._slots.read()
        due = self._due(weights)
        if due is None or self._layers is None or not due:
            return due is not None
        try:
            _, lease = self._layers.acquire(due, weights, device, {i: weights[i] for i in self._released_weights})
        except (NotLeased, torch.OutOfMemoryError):  # a picture is not lost for want of a graph
            return False
        lease.release()
        return self._layers.kept

    def _due(self, weights: list[Any]) -> list[Any] | None:
        """The layers that are on lease; None where one is of a kind that the host does not lease, or not now."""
        layers = self._layers
        if layers is None:
            return []
        if not self._seen.again(weights):
            self._seen = Seen(weights)
            layers.forget()
        try:
            due = layers.due()
        except NotLeased:
            return None
        return None if due and layers.strangers() else due
