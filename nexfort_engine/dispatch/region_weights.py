# SPDX-License-Identifier: Apache-2.0
"""RegionWeights: the weights of one region as its module has them now, and what artefacts may take of them.

Looked at for each call, and inspected only where something differs. Where the host keeps weights elsewhere, they are
leased for the call.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..cudagraphs.host_constants import unwatched
from ..guards.option_recorder import Refused
from ..modules.boundaries import boundaries
from ..modules.tree import Hidden, Seen, WeightSlots, structure
from ..runtime.artifact import Artefact
from ..runtime.devices import device_of, weight_problem
from ..runtime.engine_state import EngineState
from ..weights.lease import NO_PLACEHOLDERS, Layers, NotLeased, Placeholders, WeightLease
from ..weights.subclass_unwrap import Parts

_DTYPE = attrgetter("dtype")  # `map` over it takes less than a comprehension, and there are dozens of weights


class Ineligible(Exception):
    """The block cannot run an artefact now. The text is the reason."""


class RegionWeights:
    """The weights of one region. slots: where they are. parts: how weights come apart that are not plain."""

    def __init__(self, state: EngineState, module: nn.Module, changed: Callable[[], None]) -> None:
        """changed: called where the module is not what it was, so that no artefact that is known may run."""
        self._state, self._module, self._changed = state, module, changed
        self.boundaries = boundaries(module)  # what carries code of others takes its weights itself
        self.slots = WeightSlots(module, state.besides, self.boundaries)
        self._classes = list(map(type, module.modules()))
        self.parts: Parts | None = None
        self._seen = Seen()
        self._dtypes: list[torch.dtype] = []
        self._device: torch.device | None = None
        self._structure: list[Any] | None = None
        self._problem: str | None = None
        self._layers: Layers | None = None
        self._due: list[Any] = []
        self._sound: WeightLease | None = None  # as artefacts want it, with the other weights as they are
        self._leased: dict[int, torch.dtype] = {}  # place among the weights -> dtype that it has on lease
        self._unpacked: frozenset[int] = frozenset()  # places of those that are plain tensors on lease only

    @property
    def layers(self) -> Layers | None:
        """The layers whose weights the host may lease; None without such a host."""
        if self._layers is None and self._state.provider is not None:
            self._layers = Layers(self._state.provider, self._module, self.slots.names, self.boundaries)
        return self._layers

    def due(self) -> list[Any]:
        """The layers whose weights have to be leased now. Raises Ineligible where no artefact may see them."""
        layers = self.layers
        try:
            due = layers.due() if layers is not None else []
        except NotLeased as reason:
            raise Ineligible(str(reason)) from None
        if not due and not self._leased and not self._unpacked:
            return due
        raw = self.slots.read()
        changed = not self._seen.again(raw) or list(map(_DTYPE, raw)) != self._dtypes
        if changed or due is not self._due:
            self._sound = None
            leased = layers.dtypes(due, raw) if layers is not None else {}
            unpacked = layers.unpacked(due) if layers is not None else frozenset()
            self._due, again = due, unpacked != self._unpacked
            if leased != self._leased or again:
                self._leased, self._unpacked, self._structure = leased, unpacked, None
                self._changed()
            if again and not changed:
                self._inspect(raw)
        if changed and due and layers is not None:
            layers.forget()
            self._inspect(raw)
        return due

    def acquire(
        self, due: list[Any], tensors: list[torch.Tensor], placeholders: Placeholders = NO_PLACEHOLDERS
    ) -> tuple[list[torch.Tensor], WeightLease]:
        """The block's weights for a call with these tensors, those of the layers `due` on lease. Raises Ineligible."""
        raw, layers = self.slots.read(), self.layers
        assert layers is not None, "layers are due"
        device = device_of(t.device for t in itertools.chain(tensors, raw))
        kept = layers.reacquire(due, device, placeholders)
        if kept is not None and kept.lease is self._sound:
            return kept.given, kept.lease
        try:
            if kept is None:
                with unwatched():  # what is fetched for this step is no code of the step's
                    weights, lease = layers.acquire(due, raw, device, placeholders)
            else:
                weights, lease = kept.given, kept.lease
        except NotLeased as reason:
            raise Ineligible(str(reason)) from None
        plain = self.parts.take(weights) if self.parts is not None else weights
        problem = weight_problem(plain) if plain is not None else "a weight comes back from the host as another kind"
        if problem is not None or plain is None:
            lease.release()
            raise Ineligible(problem)
        self._sound = lease if plain is weights else None
        return plain, lease

    @contextlib.contextmanager
    def resident(self, tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The block's weights, those on lease included, for a call with these tensors. Raises Ineligible."""
        due = self.due()
        weights, lease = self.acquire(due, tensors) if due else (self.read(), None)
        try:
            yield weights
        finally:
            if lease is not None:
                lease.release()

    def hidden(self) -> Hidden:
        """What a copy of the block shows in the place of its own attributes, so that it is taken for resident."""
        return self.layers.hidden() if self.layers is not None else {}

    def read(self) -> list[torch.Tensor]:
        """The tensors of the block as they are now, checked. Raises Ineligible where no artefact may see them."""
        weights = self.slots.read()
        if (
            not self._seen.again(weights)
            or list(map(_DTYPE, weights)) != self._dtypes
            or (weights and (weights[0].device != self._device or weights[-1].device != self._device))
        ):
            self._inspect(weights)
            weights = self.slots.read()
        if self._problem is not None:
            raise Ineligible(self._problem)
        return weights if self.parts is None else self._apart(weights)

    def are_others(self) -> bool:
        """Whether weights got other sizes or strides in their place, as by `weight.data = ...`; no call looks at it."""
        before = self.structure()
        self._inspect(self.slots.read())
        return self.structure() != before

    def _apart(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The plain tensors that the weights hold. Raises Ineligible."""
        for _ in range(2):
            plain = self.parts.take(weights) if self.parts is not None else weights
            if plain is not None:
                return plain
            self._inspect(weights)  # a weight was changed in its place: another scale or layout
            if self._problem is not None:
                raise Ineligible(self._problem)
        raise Ineligible("a weight that is not a plain tensor changes while it is looked at")

    def _inspect(self, weights: list[torch.Tensor]) -> None:
        if self._has_others():
            weights = self.slots.read()
        taken = self._as_taken(weights)
        try:
            self.parts = Parts.of(taken)
            plain = self.parts.take(taken) if self.parts is not None else taken
            self._problem = weight_problem(plain) if plain is not None else None
        except Refused as reason:
            self.parts, self._problem = None, str(reason)
        before = self._structure
        self._structure = None
        if self._problem is None or self._state.provider is not None:
            self._seen, self._dtypes = Seen(weights), [w.dtype for w in weights]
            self._device = weights[0].device if weights else None
            if before is not None and self.structure() != before:
                self._changed()

    def _as_taken(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The weights with a plain tensor in the place of each that is one on lease only."""
        if not self._unpacked:
            return weights
        return [_stand_in(w) if i in self._unpacked else w for i, w in enumerate(weights)]

    def renew(self) -> None:
        """Find the weights anew: a submodule may have been exchanged, and the new one has tables of its own."""
        if self._has_others():
            self._inspect(self.slots.read())

    def _has_others(self) -> bool:
        """Whether the weights lie elsewhere than before, or a module has got another class.

        Then they are found there, and what was known is not asked. An artefact that is known for a submodule that comes
        back would be given the weights of the one that left.
        """
        found, same = self._now()
        if same:
            return False
        self.slots, self.boundaries, self._classes = found
        self._layers = None
        self._changed()
        return True

    def _now(self) -> tuple[tuple[WeightSlots, tuple[str, ...], list[type]], bool]:
        """Where the weights lie now, and whether that is known."""
        called, classes = boundaries(self._module), list(map(type, self._module.modules()))
        slots = WeightSlots(self._module, self._state.besides, called)
        same = [(id(table), name) for table, name in slots.slots] == [(id(t), n) for t, n in self.slots.slots]
        return (slots, called, classes), same and (called, classes) == (self.boundaries, self._classes)

    def are_as(self, structure: Any) -> bool:
        """Whether what is known of the weights is so, and still true. Nothing is changed: steps may run meanwhile."""
        return self._now()[1] and bool(self.structure() == structure)

    def structure(self) -> list[Any]:
        """Classes and weights of the block's tree, and the strides of weights that are not contiguous."""
        if self._structure is None:
            weights = self._as_taken(self.slots.read())
            plain = (self.parts.take(weights) if self.parts is not None else None) or weights
            strides = [list(w.stride()) if not w.is_contiguous() else 0 for w in plain]
            weights_of = structure(self._module, self._leased, self._state.besides, self.boundaries)
            self._structure = [weights_of, strides, *([["boundaries", *self.boundaries]] if self.boundaries else [])]
            if self.parts is not None:
                self._structure.append(self.parts.text)
        return self._structure

    # -- what the host says of them ----------------------------------------------------------------------

    def version(self) -> Any:
        """The host's word for its weights, unless a layer changes them by code of which the host says nothing."""
        return self._state.version() if self._layers is None or self._layers.is_covered else None

    def are_covered(self, artefact: Artefact) -> bool:
        """Whether the host says when anything changes that an artefact reads: not of buffers, nor of strengths."""
        own = self.slots.parameters
        lasting = own if self.parts is None else self.parts.each(own)
        return not artefact.strengths and all(lasting[place] for place in artefact.weights)

    def forget_leases(self) -> None:
        """Let go of what was leased last, which holds on to what stood in for weights."""
        if self._layers is not None:
            self._layers.forget()
            self._sound = None


def _stand_in(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(weight.shape), dtype=weight.dtype, device="meta")
