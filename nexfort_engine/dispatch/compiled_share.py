# SPDX-License-Identifier: Apache-2.0
"""Worth: whether enough of a network runs compiled to pay for what an engine costs in each call.

A network most of whose weights lie in blocks that no artefact can stand for gains nothing, and each call of such a
block is looked at for nothing. For that kind of call the engine steps aside: the call is the plain forward again. A
plan shows it before anything is captured; otherwise the first step that ran as it will from now on does. Before that,
blocks that cannot be captured are split, and what can be compiled below them counts.

A kind of call is what it is made of without its sizes, but for sizes of 1: one image takes another way through the
network of a video than a video does. The verdict holds as long as the weights are of the same types on the same device,
and until the network is attached anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from ..guards.option_guards import checker
from ..reporting.report import named
from ..runtime.engine_state import EngineState
from ..runtime.fault_attribution import UNSEEN, is_passed_on
from ..runtime.forward_context import ForwardContext
from ..runtime.shared_state import ForGood
from .memory_reclaim import MemoryReclaim
from .region import Region
from .region_table import RegionTable

log = logging.getLogger("nexfort")

WHOLE = "(whole module)"
LEAST = 0.1  # of the weights that a call passes through: what is compiled of less saves less than looking costs
_ASIDE = "blocks with {:.0%} of the weights that it runs cannot be compiled ({}); it runs as without Nexfort"
_MOST_SETTLED = 512  # steps that differ in what they called; more are looked at each time
_MUCH = 0.5  # of the blocks' weights: more than a network leaves out in a step of its own accord
_NOT_CALLED = "{} to {} are not called as modules; if the network calls their parts, those run uncompiled"


class Worth:
    """Which kinds of call of one engine's backbone are not worth compiling."""

    def __init__(self, state: EngineState, table: RegionTable, memory: MemoryReclaim) -> None:
        self._state, self._table, self._memory = state, table, memory
        self._withdrawn = state.known.withdrawn
        self._off: dict[Hashable, Any] = state.known.off  # kinds of call that are not, each with how that is checked
        self._weights: dict[tuple[int, ...], int] = {}  # by region and those that are left out
        self._settled: set[Hashable] = set()  # what steps called that pay as they are
        self._has_told = False

    def anew(self) -> None:
        """Everything is worth a try again."""
        self._off.clear()
        self._forget()

    def _forget(self) -> None:
        self._weights, self._settled = {}, set()

    def is_off(self, call: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call runs as it would without the engine. It costs nothing before there is such a kind."""
        if not self._off:
            return False
        kind = self.kind(call, args, kwargs)
        found = self._off.get(kind)
        if found is None:
            return False
        state, check = found
        if state == self._now() and check(_mappings(args, kwargs)):
            return True
        del self._off[kind]
        return False

    def kind(self, call: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The kind of a call. call: a method of the backbone, where it is called by several."""
        name = getattr(getattr(call, "func", call), "__qualname__", "")
        return (name, *map(self._kind_of, args), *((key, self._kind_of(value)) for key, value in kwargs.items()))

    def _kind_of(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return (value.dtype, value.device.type, *[size == 1 for size in value.shape])
        if type(value) in (list, tuple):
            return (type(value), *map(self._kind_of, value))
        if isinstance(value, dict):
            return (dict, self._state.hooks.others_code(value))
        plain: Any = value if value is None or type(value) in (bool, str) else type(value)
        return plain

    def _now(self) -> Hashable:
        """What has to stay for a verdict to hold: types of weights, by one of each region, and what names lead to."""
        watched = self._state.known.watched
        watched.look()
        first = [place for region in self._table.regions for place in region.weights.slots.slots[:1]]
        rows = [(table.get(name), name) for table, name in first]
        kinds = [(name, type(w), w.dtype, w.device.type) if w is not None else None for w, name in rows]
        return (watched.changes, *kinds)

    # -- verdicts ------------------------------------------------------------------------------------------

    def pays(self, called: Iterable[tuple[Region, str | None]], session: ForwardContext) -> bool:
        """Whether a session's kind of call is worth compiling; if not, the engine steps aside from now on.

        called: a region for each of its calls, with the reason why no artefact can serve it, None where one can.
        """
        if session.missing.uncompiled:
            return False
        called = list(called)
        if self.splits(called, session):
            return True
        lost, all_of_it, rows = Counter[str](), 0, list[list[Any]]()
        for (_, reason), weight in zip(called, self._weighed(called), strict=True):
            all_of_it += weight
            if reason is not None:
                if not isinstance(reason, ForGood):
                    return True  # it may run compiled the next time
                lost[reason] += weight
                rows += [row for row in reason.guards if row not in rows]
        pays = all_of_it > 0 and all_of_it - lost.total() >= LEAST * all_of_it
        if not lost or pays or session.calls.engine is None:
            return True
        # what the network itself writes into its options on the way is not there when a call begins
        maps = _mappings(*session.calls.engine[1:])
        check = checker([row for row in rows if row[0] != "order" and maps and checker([row])(maps)])
        self._off[self.kind(*session.calls.engine)] = (self._now(), check)
        session.missing.run_uncompiled()
        if self._table.whole_region is None:  # which says so itself
            reason = _ASIDE.format(lost.total() / max(all_of_it, 1), lost.most_common(1)[0][0])
            self._state.report.eager(WHOLE, reason)
            log.info("Nexfort: %s runs eager: %s", self._state.name, reason)
        self._memory.release()
        return False

    def splits(self, called: Sequence[tuple[Region, str | None]], session: ForwardContext) -> bool:
        """Split the regions that hold much of the weights and cannot be captured. Whether some were not split before.

        Not in a call that brings code of others along, which may be why, and be gone in the next one. called: as for
        `pays`.
        """
        if self._brings_code(session):
            return False
        weights = self._weighed(called)
        refused = [
            (region, weight)
            for (region, reason), weight in zip(called, weights, strict=True)
            if isinstance(reason, ForGood) and region.disabled_reason is None and reason not in self._withdrawn
        ]
        lost = Counter[str]()
        for region, weight in refused:
            lost[region.kind] += weight
        much = {kind for kind, weight in lost.items() if weight and weight >= LEAST * sum(weights)}
        new = self._table.split(region for region, _ in refused if region.kind in much)
        if new:
            session.planning.note_split()
            self._forget()
        return new

    def _brings_code(self, session: ForwardContext) -> bool:
        return session.calls.engine is not None and not self._state.is_quiet(*session.calls.engine[1:])

    def judge(self, session: ForwardContext) -> None:
        """See what a step ran that has ended: if a region ran eager for good; in the first one, what was left out."""
        if session.planning.split:
            return
        if not self._has_told and session.trace.used:
            self._has_told = True
            self._tell_of_blocks_that_are_not_called(session)
        missing = session.missing
        if not session.trace.lost or missing.made_beside or missing.held or missing.uncompiled:
            return
        ran = [(region, None) for region in self._used(session)]
        called = [*ran, *session.trace.lost]
        kind = frozenset((id(region), reason and str(reason)) for region, reason in called)
        if kind in self._settled:
            return
        try:
            pays = self.pays(called, session) and not session.planning.split
            # with code of others nothing was split; without it some may be
            if pays and len(self._settled) < _MOST_SETTLED and not self._brings_code(session):
                self._settled.add(kind)
        except Exception as error:  # an argument's own code; the step has its result
            if is_passed_on(error, self._state.hooks.stops()):
                raise
            self._state.report.note(UNSEEN.format(named(error)))

    def _used(self, session: ForwardContext) -> list[Region]:
        of = {id(binding): region for region in self._table.regions for binding in region.bindings}
        return [of[id(binding)] for binding in session.trace.used if id(binding) in of]

    def _tell_of_blocks_that_are_not_called(self, session: ForwardContext) -> None:
        """A network may call parts of its blocks by other methods than `forward`: nothing of them is a region then."""
        call = session.calls.engine[0] if session.calls.engine is not None else None
        if session.missing.made_beside or getattr(getattr(call, "func", call), "__name__", "forward") != "forward":
            return  # one of several methods passes by what the others call
        called = {id(region) for region in [*self._used(session), *(region for region, _ in session.trace.lost)]}
        blocks = [region for region in self._table.regions if self._table.is_block(region)]
        left = [region for region in blocks if id(region) not in called]
        if sum(map(self.weight, left)) > _MUCH * sum(map(self.weight, blocks)):
            self._state.report.note(_NOT_CALLED.format(left[0].path, left[-1].path))

    def weight(self, region: Region, besides: Sequence[Region] | None = None) -> int:
        """How many numbers the weights of a region have, those of regions below it left out.

        besides: the regions below it whose weights are left out; None: all.
        """
        below = self._table.below(region) if besides is None else besides
        place = (id(region), *map(id, below))
        found = self._weights.get(place)
        if found is None:
            inner = {(id(table), name) for one in below for table, name in one.weights.slots.slots}
            slots = region.weights.slots
            own = zip(slots.slots, slots.read(), strict=True)
            found = sum(weight.numel() for (table, name), weight in own if (id(table), name) not in inner)
            self._weights[place] = found
        return found

    def _weighed(self, called: Sequence[tuple[Region, str | None]]) -> list[int]:
        """The numbers in the weights of each region that was called, those left out that count for one below it."""
        each = {id(region) for region, _ in called}
        return [
            self.weight(region, [one for one in self._table.below(region) if id(one) in each]) for region, _ in called
        ]


def _mappings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dict[Any, Any]]:
    """The first mapping among arguments, as often as guards may name one: a network hands its own to its blocks."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, dict)][:1] * 4
