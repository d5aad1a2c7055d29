# SPDX-License-Identifier: Apache-2.0
"""Keeping: what artefacts prepare of a region's weights (weights/prepack_entry.py), kept from call to call where that
is right.

Right is what the host's word covers and the device has room for, and nothing that a step's graph makes for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Protocol

import torch

from ..runtime.artifact import Binding
from ..runtime.engine_state import EngineState
from ..runtime.forward_context import ForwardContext
from ..weights.lease import NO_PLACEHOLDERS, Placeholders
from ..weights.prepack_entry import PrepackEntry, room_for
from .region_weights import RegionWeights


class Prepares(Protocol):
    """A region, as far as it has weights that are kept prepared."""

    state: EngineState
    weights: RegionWeights
    bindings: list[Binding]
    make_room: Callable[[], bool]


def prepack_for(region: Prepares, binding: Binding) -> PrepackEntry | None:
    """The prepared weights that are kept, if they are those of this call. What is kept of other weights goes.

    Handed out, because another thread may let go of them at any moment (`release`).
    """
    kept, held = binding.kept, region.weights
    if kept is None or (region.state.keeps and kept.holds(held.version(), held.slots.read())):
        return kept
    binding.let_go()  # before there are others: there may be no room for both
    return None


def prepack(
    region: Prepares, binding: Binding, weights: list[torch.Tensor], session: ForwardContext
) -> PrepackEntry | None:
    """The weights, prepared and kept if they can be; None where the call has to prepare them for itself alone."""
    state, held, version = region.state, region.weights, region.weights.version()
    if version is None or not state.keeps or session.observation.capturing:  # what is made now belongs to the graph
        return None
    device = weights[0].device
    if session.trace.fetched and not state.room(device):
        return None  # where not even the weights stay, there is no room for more
    if not state.lowering.keeps and (has_prepack_failed(state, binding) or not state.can_release(device)):
        return None  # what is worth keeping in the place of the weights is not worth it beside them
    with state.hooks.apart():
        tensors = _made(binding, weights)
        standing = placeholders_for(region, binding, weights)
    at = None if held.parts is not None else sorted(binding.prepared_of | standing.keys())
    made = PrepackEntry.of(tensors, version, held.slots.read(), standing, at)
    # pages of weights that are asked for in each call all the same are no room
    if _has_room(region, tensors, state.room if standing else lambda _: 0):
        binding.keep(made)
        if standing and held.due():
            session.trace.note_released_weights()
        if standing:
            state.hold_twice()
    else:
        state.report.note("prepacked weights are not kept: too little memory of the device is free")
    return made


def _made(binding: Binding, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a binding prepares, in memory that no step computes in.

    An allocator has segments for each stream and gives back whole ones. Made on the stream of a step, which goes on
    beside it, tensors that stay would lie in segments that layers compute in, and these stayed with them.
    """
    device = weights[0].device
    if device.type != "cuda":
        return binding.prepare(weights)
    here, aside = torch.cuda.current_stream(device), _stream(device)
    aside.wait_stream(here)
    try:
        with torch.cuda.stream(aside):
            tensors = binding.prepare(weights)
    finally:
        here.wait_stream(aside)  # what reads the weights is done before they go back, also where there was no memory
    for tensor in tensors:
        tensor.record_stream(here)  # where they are read: their memory is nobody else's before that is done
    return tensors


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _has_room(region: Prepares, tensors: list[torch.Tensor], more: Callable[[torch.device], int]) -> bool:
    """Whether the device holds what was prepared, if need be without what models hold that do not run now."""
    return room_for(tensors, more) or (region.make_room() and room_for(tensors, more))


def placeholders_for(region: Prepares, binding: Binding, weights: list[torch.Tensor]) -> Placeholders:
    """What lets a binding do without most of the weights that are leased, now or later, since it has them prepared."""
    held, due, layers = region.weights, region.weights.due(), region.weights.layers
    if layers is None or held.parts is not None:
        return NO_PLACEHOLDERS
    if not due and region.state.can_release(weights[0].device):
        due = layers.all
    found, own = layers.placeholders_for(due, weights, binding.needed), held.slots.read()
    for other in region.bindings:  # one for all, or what one leased could not be had again by the next
        kept = other.kept
        if kept is not None and kept.placeholders.keys() == found.keys() and kept.holds(held.version(), own):
            return kept.placeholders
    return found


def released_weights(region: Prepares, used: Collection[int]) -> Collection[int]:
    """Places of weights that no artefact of those used (by id) has to be leased any more."""
    found = [set(kept.placeholders) if (kept := b.kept) else set() for b in region.bindings if id(b) in used]
    return set.intersection(*found) if found else set()


def has_prepack_failed(state: EngineState, binding: Binding) -> bool:
    """Whether keeping was found to make no room, where the weights are now."""
    return (
        binding.prepack_failed is not None
        and state.provider is not None
        and binding.prepack_failed == state.provider.layout
    )
