# SPDX-License-Identifier: Apache-2.0
"""Keeping: what artefacts prepare of a region's weights (weights/prepack_entry.py), kept from call to call where that
is right.

Right is what the host's word covers and the device has room for, and nothing that a step's graph makes for itself.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..reporting.report import named
from ..runtime.artifact import Binding
from ..system.cuda_graph_pool import is_capturing
from ..weights.lease import NO_STAND_INS, Lender, StandIns, layers_in
from ..weights.prepack_entry import Kept, room_for

if TYPE_CHECKING:
    from ..engine import Engine
    from ..runtime.forward_context import Session
    from .region import Region

log = logging.getLogger("nexfort")


def kept_of(region: Region, binding: Binding) -> Kept | None:
    """The prepared weights that are kept, if they are those of this call. What is kept of other weights goes.

    Handed out, because another thread may let go of them at any moment (`release`).
    """
    kept = binding.kept
    if kept is not None and not (region.engine.keeps and kept.holds(region.version(), region.slots.read())):
        binding.kept = kept = None  # before there are others: there may be no room for both
    return kept


def prepared(region: Region, binding: Binding, weights: list[torch.Tensor], session: Session) -> Kept | None:
    """The weights, prepared and kept if they can be; None where the call has to prepare them for itself alone."""
    version = region.version()
    if version is None or not region.engine.keeps or session.capturing:  # what is made now belongs to the graph
        return None
    device = weights[0].device
    if session.fetched and not region.engine.room(device):
        return None  # where not even the weights stay, there is no room for more
    if not region.engine.lowering.keeps and (_is_in_vain(region.engine, binding) or not region.engine.frees(device)):
        return None  # what is worth keeping in the place of the weights is not worth it beside them
    with region.engine.apart():
        tensors = _made(binding, weights)
        standing = stand_ins(region, binding, weights)
    at = None if region.parts is not None else sorted(binding.prepared_of | standing.keys())
    made = Kept.of(tensors, version, region.slots.read(), standing, at)
    # pages of weights that are asked for in each call all the same are no room
    if _has_room(region.engine, tensors, region.engine.room if standing else lambda _: 0):
        binding.kept = made
        session.spares |= bool(standing and region.due())
        region.engine.held_twice |= bool(standing)
    else:
        region.engine.report.note("prepacked weights are not kept: too little memory of the device is free")
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


def _has_room(engine: Engine, tensors: list[torch.Tensor], more: Callable[[torch.device], int]) -> bool:
    """Whether the device holds what was prepared, if need be without what models hold that do not run now."""
    return room_for(tensors, more) or (engine.others_give_way() and room_for(tensors, more))


def stand_ins(region: Region, binding: Binding, weights: list[torch.Tensor]) -> StandIns:
    """What lets a binding do without most of the weights that are lent, now or later, now that it has them prepared."""
    due, layers = region.due(), region.layers
    if layers is None or region.parts is not None:
        return NO_STAND_INS
    if not due and region.engine.frees(weights[0].device):
        due = layers.all
    found, own = layers.stand_ins(due, weights, binding.needed), region.slots.read()
    for other in region.bindings:  # one for all, or what one borrowed could not be had again by the next
        kept = other.kept
        if kept is not None and kept.stand_ins.keys() == found.keys() and kept.holds(region.version(), own):
            return kept.stand_ins
    return found


def spared(region: Region, used: Collection[int]) -> Collection[int]:
    """Places of weights that no artefact of those used (by id) has to be lent any more."""
    found = [set(kept.stand_ins) if (kept := b.kept) else set() for b in region.bindings if id(b) in used]
    return set.intersection(*found) if found else set()


def hold_once(engine: Engine) -> None:
    """Have the host give back what it holds for weights that are kept prepared, after a step that left both.

    Between steps, when nothing is on loan; a graph asks for what it reads, and finds out if that went.
    """
    if engine.lender is None or not (engine.held_twice or engine.lender.unsettled):
        return
    if is_capturing():  # giving back waits for the device, which no capture bears: after another step
        return
    if not engine.is_busy_elsewhere():  # another thread would read what goes
        _give_back(engine, engine.lender)


def _is_in_vain(engine: Engine, binding: Binding) -> bool:
    """Whether keeping was found to make no room, where the weights are now."""
    return binding.in_vain is not None and engine.lender is not None and binding.in_vain == engine.lender.layout


def _keep_what_pays(engine: Engine, lender: Lender) -> None:
    """Let go of what is kept in the place of weights that would stay all the same, as long as they lie so.

    Only once each region that can keep something does: what makes room does it together with what lies beside it.
    """
    layout, rows = lender.layout, list[tuple[Binding, list[nn.Module]]]()
    for region in engine.regions if layout is not None else ():
        preparing = [binding for binding in region.bindings if binding.prepares and not _is_in_vain(engine, binding)]
        held = [(binding, kept) for binding in preparing if (kept := kept_of(region, binding)) is not None]
        if preparing and not held:
            return
        for binding, kept in held:
            rows.append((binding, layers_in(region.module, [region.slots.slots[i] for i in kept.stand_ins])))
    answers = lender.pays([layers for _, layers in rows]) if rows else []
    for (binding, _), pays in zip(rows, answers, strict=True):
        if not pays:
            binding.kept, binding.in_vain = None, layout


def _give_back(engine: Engine, lender: Lender) -> None:
    engine.held_twice = False
    try:
        if not engine.lowering.keeps:
            _keep_what_pays(engine, lender)
    except Exception as error:  # of the host; all of it stays kept
        engine.report.note(f"what is kept of weights was not compared with what makes room for it ({named(error)})")
    found = [(region, binding) for region in engine.regions for binding in region.bindings]
    kept = [(region, it) for region, binding in found if (it := kept_of(region, binding)) is not None]
    layers = layers_in(engine.root, engine.spared([binding for _, binding in found if binding.kept is not None]))
    if lender.unsettled and engine.graphs is not None:
        engine.graphs.release()  # captured with weights at places where they will not be
    try:
        instead = [it.tensors for _, it in kept]
        given = lender.do_without(layers, instead) if layers or lender.unsettled else 0
    except Exception as error:  # of the host; the step has its result
        engine.report.note(f"memory of prepacked weights was not given back ({named(error)})")
        return
    if given:
        log.debug("Nexfort: %s: the host gave back %d MiB of weights kept prepared", engine.name, given >> 20)
        for region, it in kept:
            it.moved(region.slots.read())
    if kept and not engine.lowering.keeps and not engine.frees(kept[0][1].tensors[0].device):
        for _, binding in found:  # the weights stay after all, and this is not worth it beside them
            binding.kept = None
