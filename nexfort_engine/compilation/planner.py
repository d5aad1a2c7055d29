# SPDX-License-Identifier: Apache-2.0
"""Planner: what every region of a network is going to be called with, learned before the first one is compiled.

The network is run once eagerly beside the real call, at batch 2 where the call has batch 1. There a batch dimension
cannot be mistaken for a constant of 1, and an artefact made for it serves every batch. On a device whose memory is
counted it is run at batch 1 before, and at batch 2 only within the budget (cudagraphs/memory_budget.py).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..capture.named_state import NamedState
from ..capture.side_effects import CHANGES_GIVEN
from ..capture.trace import contents
from ..cudagraphs import memory_budget
from ..cudagraphs.host_constants import tensors_in
from ..dispatch.compiled_share import LEAST, Worth
from ..dispatch.memory_reclaim import MemoryReclaim
from ..dispatch.recovery import without_images
from ..dispatch.region import Region
from ..dispatch.region_table import RegionTable
from ..dispatch.region_weights import Ineligible
from ..guards.call_spec import Flat, changeable, flatten_call, of_its_own, stateful
from ..modules.boundaries import first_carrier
from ..modules.channels_last import Convolved, as_taken, is_of_order, to_channels_last
from ..modules.containers import OwnContainers, left_alone, put_back
from ..modules.layout_checks import LooksNoticed
from ..modules.memory_format import Unsupported
from ..modules.module_keys import is_by_modules
from ..modules.tree import own_foreign
from ..passes.registry import laid_out
from ..reporting.report import named
from ..runtime.devices import device_of
from ..runtime.engine_state import EngineState
from ..runtime.forward_context import ForwardContext, StepRunner
from ..runtime.shared_state import ForGood
from ..system.process_group import others_speak
from ..system.random_state import drawn_aside
from .lookup import Wanted
from .refusals import Refusals
from .requests import Requests

log = logging.getLogger("nexfort")

_DEEPEST = 4  # runs of a plan, each of which may find that what the last one split has to be split again
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_Way = Callable[[], _Call]  # gives the call in containers and with tensors of its own, which a network may change


class Planner:
    """Learns the calls of one engine's regions."""

    def __init__(
        self, state: EngineState, table: RegionTable, steps: StepRunner, worth: Worth, memory: MemoryReclaim
    ) -> None:
        self._state, self._table, self._steps, self._worth, self._memory = state, table, steps, worth, memory
        self.requests, self.refusals = Requests(state), Refusals(state.known)
        # calls of regions of the last plan that no artefact may serve, with the reason; None: one may
        self.lost: Sequence[tuple[Region, str | None]] = []
        # of a plan: classes of blocks that changed objects they were given
        self._changing: collections.Counter[type] = collections.Counter()
        self._changed: list[list[Any]] = []  # of a plan's run: lists that a block changed
        self._weights = self._weights_lost = 0  # numbers in what a plan called so far, and in what cannot be compiled

    @contextlib.contextmanager
    def plan(self, session: ForwardContext) -> Iterator[list[Wanted]]:
        """As `calls`; at the end of the block the network's modules hold what the call that is under way put there."""
        with put_back(self._state.root, self._state.besides):
            yield self.calls(session)

    def calls(self, session: ForwardContext) -> list[Wanted]:
        """What all regions need for the call of the network that is under way; once a session, else nothing."""
        session.planning.begin()
        self._state.hold_twice()  # the backbone's own code asks the host for all weights
        if session.calls.backbone is None or not self._state.config.dynamic:
            return []
        if self._table.sets_names:  # what the network's own code assigns would be as a further run leaves it
            return []
        if others_speak():
            self._state.report.note("regions are compiled one by one: other processes would wait for a run to plan")
            return []
        if self._table.whole_region is None and (path := first_carrier(self._state.root)) is not None:
            what = own_foreign(self._state.root.get_submodule(path), path)
            self._state.report.note(f"regions are compiled one by one: it carries {what}, which may count its calls")
            return []
        call, args, kwargs = session.calls.backbone
        args, kwargs = self._state.hooks.plain_call(args, kwargs)
        if reason := _stateful(args, kwargs):
            self._state.report.note(f"regions are compiled one by one: {reason}")
            return []
        for _ in range(_DEEPEST):
            before = len(self._state.known.split)  # a run at batch 1 may have split some as well
            found = self._calls_or_none(session, call, args, kwargs)
            self._splits(found, session)
            if len(self._state.known.split) == before:
                break
        return found

    def calls_below(self, found: list[Wanted], session: ForwardContext) -> list[Wanted]:
        """What regions need below those that captures of what a plan found refused. It ends with the module tree."""
        return self.calls(session) if self._splits(found, session) else []

    def _splits(self, found: list[Wanted], session: ForwardContext) -> bool:
        return self._worth.splits([*self._called(found), *self.lost], session)

    def _calls_or_none(self, session: ForwardContext, call: Callable[..., Any], args: Any, kwargs: Any) -> list[Wanted]:
        self.lost = []
        self._changing.clear()
        try:
            return self._calls(session, call, args, kwargs)
        except _Hopeless:
            reason, kinds = ForGood.of(CHANGES_GIVEN), self._changing
            self.lost = [(one, reason if type(one.module) in kinds else None) for one in self._innermost()]
            return []

    def _calls(self, session: ForwardContext, call: Callable[..., Any], args: Any, kwargs: Any) -> list[Wanted]:
        found = None
        device = device_of([*(t.device for t in tensors_in((args, kwargs))), torch.device("cpu")])
        if memory_budget.is_counted(device) and _batch_of(_by_name(args, kwargs)) == 1:
            # once as eager code runs it, which says what twice the batch would take
            with memory_budget.Measured(device) as taken:
                found = self._tried(call, [lambda: (of_its_own(args), of_its_own(kwargs))])
            if found is None or not self.pays(found, session) or not self._may_double(taken, self._state.room(device)):
                return found or []
        tried = self._tried(call, _doublings(args, kwargs, or_not=found is None), or_not=found is not None)
        return (tried if tried is not None else found) or []

    def pays(self, found: list[Wanted], session: ForwardContext) -> bool:
        """Whether what a plan found is worth compiling."""
        return self._worth.pays([*self._called(found), *self.lost], session)

    def _called(self, found: list[Wanted]) -> Iterator[tuple[Region, str | None]]:
        """What a plan saw of regions: each call's, and why it cannot be compiled, as far as that is known."""
        for wanted in found:
            refusal = self.refusals.of(wanted)
            yield wanted.region, refusal[1] if refusal is not None else None

    def _may_double(self, taken: memory_budget.Measured, pages: int) -> bool:
        """Whether the network may be run at batch 2, given what it took at batch 1, beside weights in the host's pages.

        Torch does not count those, and they are there in either case.
        """
        twice, eager = taken.twice() + pages, taken.least + pages
        if memory_budget.allows(twice, eager):
            return True
        self._state.report.note(
            f"it was planned at batch 1: at batch 2 that would have taken {twice / 2**30:.1f} GiB of the GPU, and "
            f"eager takes {eager / 2**30:.1f}. For a larger batch it is compiled when one comes"
        )
        return False

    def _tried(self, call: Callable[..., Any], ways: Iterable[_Way], *, or_not: bool = False) -> list[Wanted] | None:
        """What a call needs by the first way that the network takes; None where it takes none, which the report says.

        or_not: nothing is lost without.
        """
        problem = ""
        for way in ways:
            try:
                return self._planned(call, way)
            except _Hopeless:
                raise
            except torch.OutOfMemoryError:
                self._state.report.note("there was no memory to plan ahead; regions are compiled one by one")
                return None
            except Exception as error:
                if isinstance(error, self._state.hooks.stops()):
                    raise
                # the probe is a convenience: without it the regions are captured one by one at the sizes of the call
                log.debug("Nexfort: planning failed", exc_info=True)
                problem = problem or named(error)  # of the first way, which is the likeliest one
        if not or_not:
            self._state.report.note(f"planning ahead failed ({problem})")
        return None

    def _planned(self, call: Callable[..., Any], way: _Way) -> list[Wanted]:
        """As `calls`, in one way; with images as eager code leaves them, where some code asks for that."""
        args, kwargs = way()
        further = self._state.hooks.also(args, kwargs)
        looks = LooksNoticed()
        try:
            with looks if self._state.images else contextlib.nullcontext():
                return self._observe(call, args, kwargs) + self._observe_further(call, further)
        except Exception as error:
            if not (looks.any and is_of_order(error)):
                raise
            reason = named(error)
        with without_images(self._state, self._memory, reason):
            return self._planned(call, way)

    def _observe(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Wanted]:
        root, region = self._state.root, self._table.whole_region
        if region is not None:
            flat = Flat()
            return [self.requests.wanted(region, flatten_call(args, kwargs, flat), flat)]
        self._weights = self._weights_lost = 0
        devices = sorted({p.device for p in root.parameters() if p.device.type == "cuda"}, key=str)
        with (
            drawn_aside([d.index for d in devices]),
            left_alone(root, self._state.besides),
            NamedState(root.modules(), self._state.hooks.accounts).left(),
            self._steps.active(instead=self.record) as session,
        ):
            try:
                call(*args, **kwargs)
            finally:
                self._changed.clear()  # they hold what the network made
        self.lost = session.trace.lost
        return session.planning.examples

    def _observe_further(self, call: Callable[..., Any], calls: list[tuple[Any, Any]]) -> list[Wanted]:
        """What calls need that the host knows of; a network that does not take one loses nothing but that."""
        found: list[Wanted] = []
        for args, kwargs in calls:
            try:
                found += self._observe(call, args, kwargs)
            except _Hopeless:
                raise
            except Exception as error:
                if isinstance(error, self._state.hooks.stops()):
                    raise
                log.debug("Nexfort: planning a further call failed", exc_info=True)
                self._state.report.note(f"planning ahead for other sizes failed ({named(error)})")
        return found

    def record(self, region: Region, plain: Any, args: Any, kwargs: Any, session: ForwardContext) -> Any:
        """Note what a region is called with, and run it eagerly.

        What follows has to see results that lie in memory as those of the artefact that will run there.
        """
        flat, options, wanted, other = Flat(lists=region.changes, root=region.module), {}, None, None
        try:
            region.weights.renew()  # code between the blocks, or before the step, may have exchanged some
            spec = region.flatten(args, kwargs, flat)
            if not region.weights.due():
                region.weights.read()
            if region.disabled_reason is None and region.carries() is None:
                wanted = self.requests.wanted(region, spec, flat)
                wanted.changing = other = self._in_changing_form(region, wanted, args, kwargs)
                wanted.drop_data()
                session.planning.add_example(wanted)
                options = self._state.lowering.lowering_options(wanted.device.type)
        except (Unsupported, Ineligible) as reason:
            log.debug("Nexfort: %s is not planned: %s", region.path, reason)
            lost = str(reason) if isinstance(reason, Ineligible) else ForGood.of(f"it is called with {reason}")
            session.trace.note_lost(region, lost)
        # eager code lets go of what lies in lists once it has put other tensors there
        flat.tensors.clear()
        if region.disabled_reason is not None:
            session.trace.note_lost(region, region.disabled_reason)
        try:
            in_parts = wanted is None or self.refusals.of(wanted) is not None
            if wanted is None or not wanted.images or not self._may_pay(region):
                with laid_out(options), self._watched(wanted, other, session, args, kwargs):
                    return region.run_own_forward(plain, args, kwargs, session, in_parts=in_parts)
            taken = tuple(map(_as_taken, args)), {name: _as_taken(value) for name, value in kwargs.items()}
            with Convolved(), self._watched(wanted, other, session, *taken):
                result = region.run_own_forward(plain, *taken, session, in_parts=in_parts)
                return to_channels_last(result, tensors_in(taken))
        finally:
            self._weigh(region, wanted)

    def _may_pay(self, region: Region) -> bool:
        """Whether enough of what was called so far can be compiled; if not, no input is copied to lie otherwise."""
        weights = self._weights + self._worth.weight(region)
        return weights - self._weights_lost >= LEAST * weights

    def _weigh(self, region: Region, wanted: Wanted | None) -> None:
        weight = self._worth.weight(region)
        self._weights += weight
        if wanted is None or self.refusals.of(wanted) is not None:
            self._weights_lost += weight

    def _in_changing_form(self, region: Region, wanted: Wanted, args: Any, kwargs: Any) -> Wanted | None:
        """The request of a call with the lists as they are now, for a block that may change them; None for others."""
        if wanted.flat.lists or any(given and not is_by_modules(given) for given in wanted.flat.mappings):
            return None
        flat = Flat(lists=True, root=region.module)
        spec = region.flatten(args, kwargs, flat)
        if not flat.mappings:
            return None
        found = self.requests.wanted(region, spec, flat)
        found.drop_data()
        return found

    def _is_passed_on(self, lists: list[list[Any]]) -> bool:
        """Whether a block of this run changed one of these lists, and left tensors in it."""
        return any(
            one is other and any(isinstance(item, torch.Tensor) for item in one)
            for one in lists
            for other in self._changed
        )

    def _is_hopeless(self) -> bool:
        """Whether next to nothing is left where all blocks of classes that changed what they were given do so.

        A network that is not worth compiling is not run to its end beside the step.
        """
        regions = self._innermost()
        changing = {kind for kind, count in self._changing.items() if count > 1}
        lost = sum(self._worth.weight(region) for region in regions if type(region.module) in changing)
        return (all_of_it := sum(map(self._worth.weight, regions))) - lost < LEAST * all_of_it

    def _innermost(self) -> list[Region]:
        """The regions in which no others lie."""
        paths = [region.path for region in self._table.regions]
        around = {path[:end] for path in paths for end, sign in enumerate(path) if sign == "."}
        return [region for region in self._table.regions if region.path not in around]

    @contextlib.contextmanager
    def _watched(
        self, wanted: Wanted | None, other: Wanted | None, session: ForwardContext, args: Any, kwargs: Any
    ) -> Iterator[None]:
        """Look whether a block changes what it is given, so that it need not be captured to find that out.

        No artefact may change an object. Where it is a list, the other request takes the place of the last one; and
        where it is a mapping by modules. Not where it is given options: what it does may depend on them, and a capture
        says on which.
        """
        if wanted is None or not (other or (not wanted.flat.mappings and any(changeable(wanted.example.spec)))):
            yield
            return
        own = OwnContainers(wanted.region.module, self._state.besides).now()[1] if other is not None else []
        lists = _lists_in((args, kwargs)) if other is not None else []
        objects, before = contents((args, kwargs), lists=False), contents((args, kwargs, own))
        held, given = [list(one) for one in lists], tensors_in((args, kwargs))
        yield
        for one, was in zip(lists, held, strict=True):
            if contents(one) != contents(was):
                self._changed.append(one)
                if wanted.images:
                    _lay_out(one, given)
        if not wanted.flat.mappings and contents((args, kwargs), lists=False) != objects:
            self.refusals.add(wanted, None, CHANGES_GIVEN)
            self._changing[type(wanted.region.module)] += 1
            if self._is_hopeless():
                raise _Hopeless
        elif other is not None and _may_be_kept(wanted, args, kwargs):
            if contents((args, kwargs, own)) == before and not self._is_passed_on(lists):
                return
            other.region.changes_what_it_is_given()
            session.planning.replace_example(wanted, other)


class _Hopeless(Exception):
    """A plan goes no further: too little of the network can be compiled."""


def _may_be_kept(wanted: Wanted, args: Any, kwargs: Any) -> bool:
    """Whether what a block is given is where it keeps things, as far as it is given mappings."""
    return not wanted.flat.mappings or any(map(is_by_modules, (*args, *kwargs.values())))


def _lay_out(held: list[Any], given: Sequence[torch.Tensor]) -> None:
    """Have tensors that a block put into a list lie as its artefact leaves them. given: what it was called with."""
    own = set(map(id, given))
    at = [place for place, item in enumerate(held) if isinstance(item, torch.Tensor) and id(item) not in own]
    for place, tensor in zip(at, to_channels_last([held[i] for i in at], given), strict=True):
        held[place] = tensor


def _lists_in(value: Any) -> list[list[Any]]:
    """The lists of a call that are not inside another one."""
    if type(value) is list:
        return [value]
    parts = value.values() if type(value) is dict else value if isinstance(value, tuple) else ()
    return [found for part in parts for found in _lists_in(part)]


def _stateful(args: Any, kwargs: Any) -> str | None:
    """Why a plan's runs would change what the call is given, as far as that can be seen."""
    try:
        return stateful(flatten_call(args, kwargs, Flat()))
    except Unsupported as reason:  # a run may change it, and there is no copy to give to one
        return f"it is called with {reason}"


def _as_taken(value: Any) -> Any:
    return as_taken(value) if isinstance(value, torch.Tensor) else value


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    return {**dict(enumerate(args)), **kwargs}


def _doublings(args: tuple[Any, ...], kwargs: dict[str, Any], *, or_not: bool = True) -> Iterator[_Way]:
    """The call at batch 2 where it has batch 1: ways to try until the network takes one.

    A first size of 1 is the batch, or it is one for all rows (a mask that is expanded later). A list of one may be the
    batch too, and another first size the batch times something (the frames of all videos). At last, or_not, it stays as
    it is.
    """
    values = _by_name(args, kwargs)
    if _batch_of(values) == 1:
        sized = {k: v.shape[0] for k, v in values.items() if isinstance(v, torch.Tensor) and v.ndim > 0}
        lists = {k for k, v in values.items() if _is_batch(v) and len(v) == 1}
        ones = {k for k, size in sized.items() if size == 1}
        others = {k for k in sized.keys() - ones if values[k].ndim > 1}
        ways = [lists, set()] if lists else [set()]
        for twice in [*(ones | also for also in (*ways, others)), *(ones - {k} | also for k in ones for also in ways)]:
            yield functools.partial(_twice, values, len(args), ones, twice)
    if or_not:
        yield lambda: (of_its_own(args), of_its_own(kwargs))


def _twice(values: dict[Any, Any], count: int, ones: set[Any], twice: set[Any]) -> _Call:
    """The call with some of its values, the first `count` of which are by place, at twice their first size."""
    found = {k: _doubled(v) if k in twice - ones else of_its_own(v, k not in ones - twice) for k, v in values.items()}
    return tuple(found.pop(i) for i in range(count)), found


def _doubled(value: Any) -> Any:
    return torch.cat([value, value]) if isinstance(value, torch.Tensor) else of_its_own(value) + of_its_own(value)


def _is_batch(value: Any) -> bool:
    """Whether a list may hold one item a row: items that have no batch of their own."""
    return type(value) is list and all(
        v.shape[0] != 1 if isinstance(v, torch.Tensor) and v.ndim > 0 else type(v) in (list, tuple) for v in value
    )


def _batch_of(values: dict[Any, Any]) -> int:
    """The batch of a call: the first size of its first tensor that has one, or of a list of tensors; 0 if unknown."""
    for value in values.values():
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            return value.shape[0]
        if _is_batch(value) and value and isinstance(value[0], torch.Tensor):
            return len(value)
    return 0
