# SPDX-License-Identifier: Apache-2.0
"""MemoryReclaim: what one engine holds of the device between steps, and how memory gets back to who needs it.

An engine gives back what it can make again: CUDA graphs and prepared weights. The host gives back weights that are kept
prepared, after a step that left both.
"""

from __future__ import annotations

import contextlib
import logging

from torch import nn

from ..cudagraphs.step_graphs import StepGraphs
from ..reporting.report import named
from ..runtime.artifact import Binding
from ..runtime.engine_state import EngineState
from ..runtime.forward_context import ForwardContext
from ..system.cuda_graph_pool import is_capturing
from ..system.live_objects import LiveObjects
from ..weights.lease import WeightProvider, layers_in
from .prepack_cache import has_prepack_failed, prepack_for
from .region_table import RegionTable

log = logging.getLogger("nexfort")

_alive: LiveObjects[MemoryReclaim] = LiveObjects()


class MemoryReclaim:
    """The memory of one engine."""

    def __init__(self, state: EngineState, table: RegionTable, graphs: StepGraphs | None) -> None:
        self._state, self._table, self._graphs = state, table, graphs
        self._steps: set[ForwardContext] = set()  # that are under way
        _alive.add(self)

    def step_begins(self, session: ForwardContext) -> None:
        """A step is under way, which reads what is held."""
        self._steps.add(session)

    def step_ended(self, session: ForwardContext) -> None:
        """It is not any more."""
        self._steps.discard(session)

    def release(self) -> bool:
        """Give back what is held of the device between steps, to be made again when wanted. Whether there was any."""
        if self._state.provider is not None:
            self._state.provider.stop_releasing()
        graphs = self._graphs is not None and bool(self._graphs.release())
        return self._table.release() or graphs

    def forget_all(self) -> None:
        """As `release`; the regions forget their artefacts as well."""
        self.release()
        self._table.forget_all()

    def others_give_way(self) -> bool:
        """Have engines that are in no step now give back what they hold. Whether one held anything."""
        return any([other.give_way() for other in _alive.listed() if other is not self])

    def give_way(self) -> bool:
        """As `release`, unless a step is under way, which may be a graph that reads what is held."""
        with self._graphs.idle() if self._graphs is not None else contextlib.nullcontext(True) as is_idle:
            return is_idle and self.release()

    def hold_once(self) -> None:
        """Have the host give back what it holds for weights that are kept prepared, after a step that left both.

        Between steps, when nothing is on lease; a graph asks for what it reads, and finds out if that went.
        """
        state = self._state
        if state.provider is None or not (state.held_twice or state.provider.has_pending_release):
            return
        if is_capturing():  # giving back waits for the device, which no capture bears: after another step
            return
        if not self._is_busy_elsewhere():  # another thread would read what goes
            self._give_back(state.provider)

    def _is_busy_elsewhere(self) -> bool:
        """Whether the backbone is in another step than this thread's, of whichever engine."""
        others = [other for other in _alive.listed() if other._state.root is self._state.root and other is not self]
        return len(self._steps) > 1 or any(other._steps for other in others)

    def _give_back(self, provider: WeightProvider) -> None:
        state = self._state
        state.hold_twice(False)
        try:
            if not state.lowering.keeps:
                self._keep_what_pays(provider)
        except Exception as error:  # of the host; all of it stays kept
            state.report.note(f"what is kept of weights was not compared with what makes room for it ({named(error)})")
        found = [(region, binding) for region in self._table.regions for binding in region.bindings]
        kept = [(region, it) for region, binding in found if (it := prepack_for(region, binding)) is not None]
        without = self._table.released_weights([binding for _, binding in found if binding.kept is not None])
        layers = layers_in(state.root, without)
        if provider.has_pending_release and self._graphs is not None:
            self._graphs.release()  # captured with weights at places where they will not be
        try:
            instead = [it.tensors for _, it in kept]
            given = provider.release(layers, instead) if layers or provider.has_pending_release else 0
        except Exception as error:  # of the host; the step has its result
            state.report.note(f"memory of prepacked weights was not given back ({named(error)})")
            return
        if given:
            log.debug("Nexfort: %s: the host gave back %d MiB of weights kept prepared", state.name, given >> 20)
            for region, it in kept:
                it.moved(region.weights.slots.read())
        if kept and not state.lowering.keeps and not state.can_release(kept[0][1].tensors[0].device):
            for _, binding in found:  # the weights stay after all, and this is not worth it beside them
                binding.let_go()

    def _keep_what_pays(self, provider: WeightProvider) -> None:
        """Let go of what is kept in the place of weights that would stay all the same, as long as they lie so.

        Only once each region that can keep something does: what makes room does it together with what lies beside it.
        """
        layout, rows = provider.layout, list[tuple[Binding, list[nn.Module]]]()
        for region in self._table.regions if layout is not None else ():
            preparing = [one for one in region.bindings if one.prepares and not has_prepack_failed(self._state, one)]
            held = [(binding, kept) for binding in preparing if (kept := prepack_for(region, binding)) is not None]
            if preparing and not held:
                return
            for binding, kept in held:
                places = [region.weights.slots.slots[i] for i in kept.placeholders]
                rows.append((binding, layers_in(region.module, places)))
        answers = provider.is_release_profitable([layers for _, layers in rows]) if rows else []
        for (binding, _), pays in zip(rows, answers, strict=True):
            if not pays:
                binding.rule_out(layout)
