# SPDX-License-Identifier: Apache-2.0
"""Loans: weights that a host keeps elsewhere, as tensors for the length of one call.

A host may leave weights in main memory, keep them in another dtype, or patch them on the way in. It does so with code
of its own in each layer. A region whose layers need that borrows the finished tensors just before the call and gives
them back after it, so that one artefact serves the resident block and the offloaded one. What the layers' code looks at
to decide is hidden from the capture (shadow.py): it always sees a resident layer.
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

    def lends(self, layer: nn.Module) -> bool:
        """Whether the layer's weights can be borrowed: it is of a kind whose code is known."""

    def due(self, layer: nn.Module) -> bool:
        """Whether the layer's own code would now do more than use its weights."""

    def dtype(self) -> torch.dtype | None:
        """What weights are cast to, None if they stay what they are."""

    def lend(self, layer: nn.Module, device: torch.device, dtype: torch.dtype | None) -> tuple[dict[str, Any], Any]:
        """The layer's weights by name on a device, and a ticket to give them back with. Raises NotLent.

        They stay what they are until the ticket is given back, also while other layers are lent.
        """

    def take_back(self, layer: nn.Module, ticket: Any) -> None:
        """They are not used any more."""


class Layers:
    """The layers of one block that a host may lend, and where their weights stand in the block's list."""

    def __init__(self, lender: Lender, module: nn.Module, names: list[str]) -> None:
        self.lender = lender
        places = {name: i for i, name in enumerate(names)}
        self.all: list[tuple[nn.Module, dict[str, int]]] = []
        self.foreign: list[nn.Module] = []
        for path, sub in module.named_modules():
            if lender.lends(sub):
                own = {name: places[f"{path}.{name}" if path else name] for name in _weights_of(sub)}
                self.all.append((sub, own))

    def hidden(self) -> dict[int, Mapping[str, Any]]:
        """id(layer) -> the attributes that a capture is shown in the place of its own."""
        return {id(layer): self.lender.hidden for layer, _ in self.all}

    def due(self) -> list[tuple[nn.Module, dict[str, int]]]:
        """The layers that have to be borrowed now."""
        due = self.lender.due
        return [row for row in self.all if due(row[0])]

    def borrow(self, due: list[Any], weights: list[torch.Tensor], device: torch.device) -> Loan:
        """The block's weights with those of the layers `due` on a device."""
        loan = Loan(self.lender, list(weights))
        dtype = self.lender.dtype()
        try:
            for layer, places in due:
                tensors, ticket = self.lender.lend(layer, device, dtype)
                loan.tickets.append((layer, ticket))
                for name, i in places.items():
                    loan.weights[i] = tensors[name]
        except BaseException:
            loan.end()
            raise
        return loan

    def examples(self, weights: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The block's weights as they would be borrowed, without their data."""
        found, dtype = list(weights), self.lender.dtype()
        for _, places in self.due():
            for i in places.values():
                found[i] = torch.empty_like(weights[i], dtype=dtype or weights[i].dtype, device=device)
        return found


class Loan:
    """Borrowed weights; `end` gives them back."""

    def __init__(self, lender: Lender, weights: list[torch.Tensor]) -> None:
        self.lender, self.weights = lender, weights
        self.tickets: list[tuple[nn.Module, Any]] = []

    def end(self) -> None:
        """Give everything back."""
        while self.tickets:
            self.lender.take_back(*self.tickets.pop())


def _weights_of(layer: nn.Module) -> list[str]:
    return [name for name, value in layer._parameters.items() if value is not None]
