# SPDX-License-Identifier: Apache-2.0
"""One combination of sizes: what its steps take in without looking, and their CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..guards.call_spec import Flat, Leaves, unflatten
from ..guards.name_guards import Dependence
from ..guards.option_guards import checker
from ..guards.option_recorder import BOOKKEEPING, ReadSet
from ..runtime.artifact import Binding
from ..runtime.forward_context import StepTrace
from ..weights.prepack_entry import Version
from ..weights.residency import Residency
from .host_constants import Sent
from .invariant_cache import StepInvariants
from .module_fingerprint import ModuleFingerprint
from .step_call import StepCall, empty_as

NOWHERE = torch.device("meta")


@dataclass(frozen=True)
class Observed:
    """What was seen of a step that ran region by region.

    reads: of its options. codes: that ran. residence: of the weights that it needs where they are. kept: its bindings'
    prepared weights by serial number, as they were before `residence` was made. sent: the constants that it copied to
    the GPU. invariants: what it made of inputs that last.
    """

    trace: StepTrace
    reads: ReadSet
    codes: set[Any]
    residency: Residency
    kept: list[int]
    sent: list[Sent]
    invariants: StepInvariants | None


@dataclass
class StepGraph:
    """First what its calls read, then its graph."""

    check: Callable[[list[Any]], bool]
    bindings: list[tuple[Binding, Callable[[list[Any]], bool], list[float]]]
    residency: Residency  # of the weights that the step needs where they are kept
    pointers: list[Any]
    fingerprint: ModuleFingerprint
    metas: list[Any]  # of the weights
    output: Any
    outputs: list[torch.Tensor]  # as long as there is no graph they only say what will be there
    sent: list[Sent]  # constants that its code copies to the GPU, which the graph reads there
    graph: Any = None
    slots: list[torch.Tensor] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # its bindings' prepared weights, by serial number
    replayed: bool = False  # and the result counted
    version: Version = None  # of the weights that they were made of
    invariants: StepInvariants | None = None  # what is made of inputs that last
    names: Dependence | None = None  # what the network's own code reaches by name

    def captured(self, graph: Any, slots: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """It has a graph from now on, with inputs in `slots` and results in `outputs`."""
        self.graph, self.slots, self.outputs = graph, slots, outputs

    def note_replay(self) -> None:
        """A result of the graph counted."""
        self.replayed = True

    def forget(self) -> None:
        """It has no graph any more; the next step of its kind is captured without being observed again."""
        self.graph, self.slots = None, []
        self.outputs = empty_as(self.outputs, NOWHERE)

    def is_prepared(self) -> bool:
        """Whether the prepared weights that it reads are still there."""
        return self.kept == serials_of(binding for binding, *_ in self.bindings)

    def is_kept(self, version: Callable[[], Version]) -> bool:
        """Whether these are made of the weights as they are, too. version: what the host says of them now."""
        if not self.is_prepared():
            return False
        if any(self.kept):
            return self.version == version()
        # where the host could not say then, and can now, they may be kept at last
        return not self.kept or self.version is not None or version() is None

    def holds(self, flat: Flat, weights: list[torch.Tensor]) -> bool:
        """Whether options, modules and weights of a call are what the graph took in."""
        if self.names is not None and not self.names.holds():
            return False
        if not self.residency.sound() or not self.fingerprint.unchanged() or metas_of(weights) != self.metas:
            return False
        maps = flat.mappings[:1] * 4
        return all(
            check(maps) and binding.unchanged() and binding.strengths() == strengths
            for binding, check, strengths in self.bindings
        )

    def replay(self, call: StepCall) -> Any:
        """What the graph gives for a call."""
        lasting = self.invariants.slots if self.invariants is not None else {}
        if self.invariants is not None:
            self.invariants.renew(call.tensors, call.made_of)
        for place, (slot, tensor) in enumerate(zip(self.slots, call.tensors, strict=True)):
            if place not in lasting and slot.data_ptr() != tensor.data_ptr():
                slot.copy_(tensor)
        self.graph.replay()
        return unflatten(self.output, Leaves([t.clone() for t in self.outputs]))


def region_checks(trace: StepTrace, flat: Flat) -> list[Any]:
    """For every binding that ran: what guards on options can be asked of the backbone's own, and its strengths.

    What the network itself writes into its options on the way follows from its inputs, and is not there yet when
    a step begins: guards that do not hold then are about such keys.
    """
    maps = flat.mappings[:1] * 4
    found = []
    for binding in {id(b): b for b in trace.used}.values():
        rows = [r for r in binding.artefact.guards if r[0] != "order" and r[1][-1:] and r[1][-1] not in BOOKKEEPING]
        rows = [r for r in rows if maps and checker([r])(maps)]
        found.append((binding, checker(rows), binding.strengths()))
    return found


def serials_of(bindings: Iterable[Binding]) -> list[int]:
    """The serial numbers of the prepared weights that some bindings keep; 0 where one keeps none."""
    each = {id(b): b for b in bindings if b.prepares}.values()
    return [kept.serial if (kept := b.kept) is not None else 0 for b in each]


def in_places(tensors: list[torch.Tensor], invariants: StepInvariants | None) -> list[torch.Tensor]:
    """A call's tensors, with copies that last in the places of those that do."""
    slots = invariants.slots if invariants is not None else {}
    return [slots.get(place, tensor) for place, tensor in enumerate(tensors)]


def metas_of(weights: list[torch.Tensor]) -> list[Any]:
    """What of each weight a graph has taken in besides its place."""
    return [(w.dtype, w.shape, w.stride()) if w is not None else None for w in weights]
