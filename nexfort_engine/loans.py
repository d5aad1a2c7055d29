# SPDX-License-Identifier: Apache-2.0
"""Loans: weights that a host keeps elsewhere, as tensors for the length of one call.

A host may leave weights in main memory, keep them in another dtype, or patch them on the way in. It does so with code
of its own in each layer. A region whose layers need that borrows the finished tensors just before its code runs, so
that one artefact serves the resident block and the offloaded one. What the layers' code looks at to decide is hidden
from the capture (shadow.py): it always sees a resident layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn


class NotLent(Exception):
    """The host does not give this layer's weights away now. The text is the reason."""


class Lender(Protocol):
    """What a host gives an engine to borrow from."""

    @property
    def hidden(self) -> Mapping[str, Any]:
        """What a resident layer shows to code that decides."""

    @property
    def signs(self) -> tuple[str, ...]:
        """Attributes of which at least one is set in a layer, or its class, that is not resident."""

    def lends(self, layer: nn.Module) -> bool:
        """Whether the layer's weights can be borrowed: it is of a kind whose code is known."""

    def due(self, layer: nn.Module) -> bool:
        """Whether the layer's own code would now do more than use its weights. Raises NotLent."""

    def dtype(self) -> torch.dtype | None:
        """What weights are cast to, None if they stay what they are."""

    def lend(self, layer: nn.Module, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
        """The layer's weights by name on a device. They stay what they are while other layers are lent."""


class Layers:
    """The layers of one block that a host may lend, and where their weights stand in the block's list."""

    def __init__(self, lender: Lender, module: nn.Module, names: list[str]) -> None:
        self.lender = lender
        places = {name: i for i, name in enumerate(names)}
        self._all: list[tuple[nn.Module, dict[str, int]]] = []
        for path, sub in module.named_modules():
            if lender.lends(sub):
                own = {name: places[f"{path}.{name}" if path else name] for name in _weights_of(sub)}
                self._all.append((sub, own))
        self._signs = [(layer.__dict__, name) for layer, _ in self._all for name in lender.signs]
        self._by_class = any(getattr(type(layer), name, None) for layer, _ in self._all for name in lender.signs)

    def hidden(self) -> dict[int, Mapping[str, Any]]:
        """id(layer) -> the attributes that a capture is shown in the place of its own."""
        return {id(layer): self.lender.hidden for layer, _ in self._all}

    def resident(self) -> bool:
        """Whether no layer has to be borrowed. Asked on every call: flat, and without a call for each layer."""
        return not self._by_class and not any([own.get(name) for own, name in self._signs])

    def due(self) -> list[tuple[nn.Module, dict[str, int]]]:
        """The layers that have to be borrowed now. Raises NotLent."""
        if self.resident():
            return []
        due = self.lender.due
        return [row for row in self._all if due(row[0])]

    def borrow(self, due: list[Any], weights: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The block's weights with those of the layers `due` on a device."""
        found, dtype = list(weights), self.lender.dtype()
        for layer, places in due:
            tensors = self.lender.lend(layer, device, dtype)
            for name, i in places.items():
                found[i] = tensors[name]
        return found

    def examples(self, weights: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The block's weights as they would be borrowed, without their data."""
        found, dtype = list(weights), self.lender.dtype()
        for _, places in self.due():
            for i in places.values():
                found[i] = torch.empty_like(weights[i], dtype=dtype or weights[i].dtype, device=device)
        return found


def _weights_of(layer: nn.Module) -> list[str]:
    return [name for name, value in layer._parameters.items() if value is not None]
