# SPDX-License-Identifier: Apache-2.0
"""Builder: from a call no artefact is known for, to a binding. Plans, captures, lowers; lookup.py has what is there.

The first time something is missing, planner.py says what else is: all of it is made together, with one progress bar.

Everything here runs under one process-wide lock, off the path of calls whose artefact is known.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..capture.exporter import capture
from ..capture.side_effects import MAY_CHANGE
from ..capture.types import LOCK, Captured
from ..dispatch.region import Region
from ..dispatch.region_table import RegionTable
from ..dispatch.region_weights import Ineligible
from ..guards import callback_sites
from ..guards.call_spec import Flat
from ..guards.option_recorder import Refused
from ..lowering.vec_isa_cache import remember_in
from ..passes import fp8_input, int8_linear, low_precision, low_precision_attention, rotary
from ..passes.prologue_match import calls_of
from ..quant import matmul
from ..reporting.report import named
from ..reporting.resource_shortages import describe_error
from ..runtime.artifact import Artefact, Binding, GuardFailure, manifest_of
from ..runtime.engine_state import EngineState
from ..runtime.forward_context import ForwardContext, to_come
from ..runtime.shared_state import Refusal
from ..system import torch_modes as modes
from . import load_ahead
from .background import Background, stop_at_exit
from .eligibility import Eligibility
from .handover import Handover
from .jobs import WATCH, Job, Later, await_left, lower_all, no_later
from .lookup import Finder, Wanted, as_changing
from .model_keys import ModelKeys
from .planner import Planner
from .rank_turns import turn
from .refusals import code_of
from .waiting import Others, why_another

log = logging.getLogger("nexfort")

# what is made for a call that is still to come: the jobs for it on a device
Coming = list[Callable[[torch.device], list[Job]]]
# for the arguments of a first call: what is called once the steps are done, to be made inside the block
Then = Callable[[tuple[Any, ...], dict[str, Any]], contextlib.AbstractContextManager[Coming]]

# artefacts of one structure and call that a session makes, and that there are at all; past that it keeps changing
MOST_VARIANTS = 8
MOST_SIZES = 4  # of those, for sizes that code loops over
_MOST_STORED = 64
_KEEPS_CHANGING = "what it depends on keeps changing"
_MOST_TRIES = 2  # in the background, without one that fits, for one kind of call of a region
_NOT_MADE = "what was made in the background does not fit this call"
_PENDING: Refusal = ((lambda _: True), "it is being made")


class Builder:
    """Makes and finds the artefacts of one engine."""

    def __init__(self, state: EngineState, table: RegionTable, planner: Planner, eligibility: Eligibility) -> None:
        self.state, self.planner, self.finder, self.keys = state, planner, Finder(state), ModelKeys(state)
        self._table, self._eligibility = table, eligibility
        self.background = Background(state.report, lambda: state.hooks.works_on()) if state.config.background else None
        self.handover = Handover(state, self.background)
        self.requests, self.refusals, self.artefacts = planner.requests, planner.refusals, state.known.artefacts
        self._made, self._reported = state.known.made, state.known.reported
        self._then: Then = lambda args, kwargs: contextlib.nullcontext([])
        self._tried: Counter[tuple[str, str]] = Counter()
        self._failed: dict[tuple[str, str], set[int]] = {}  # in which works of the background

    def followed_by(self, then: Then) -> None:
        """Have what runs after this backbone made with what its first step needs."""
        self._then = then

    # -- a call whose artefact is not known --------------------------------------------------------------

    def obtain(self, region: Region, key: Any, flat: Flat, session: ForwardContext) -> Binding | None:
        """A binding for this call, or None; `Planning.refused` says why. Raises Unsupported, Ineligible."""
        if (reason := region.declined(key, flat)) is not None:
            session.planning.note_refusal(reason, [])
            return None
        load_ahead.finish(self.state.hooks.cancel)
        if not self._has_lock(session):
            return None
        self.refusals.taken()
        try:
            session.with_rare_collections()
            self.state.known.watched.look()
            carried = region.carries()
            if carried:
                raise Ineligible(f"it carries {carried}")
            wanted = self.requests.wanted(region, key[0], flat)
            if wanted.device.type == "cpu":
                session.outcome.note_new_sizes()
            binding, refusal = self._find_or_make(wanted, session)
        except OSError as error:  # of files that are read and written here; the step does without
            if isinstance(error, self.state.hooks.stops()):
                raise
            log.debug("Nexfort: nothing is found or made for %s", region.path, exc_info=True)
            self._tried[(region.path, "")] += 1
            if self._tried[(region.path, "")] < _MOST_TRIES:
                raise Ineligible(describe_error(error)) from error
            binding, refusal = None, ((lambda _: True), describe_error(error))
        finally:
            LOCK.release()
        if session.missing.made_beside or session.missing.uncompiled:
            return None
        if binding is not None:
            region.remember(key, binding)
            self.finder.note_sizes(binding.artefact, flat)
        self.state.report.unsaved(self.state.store.problem)
        if binding is not None:
            return binding
        if not flat.lists and region.changes:  # its capture showed it: the call is made again
            return None
        region.decline(key, flat, refusal)
        session.planning.note_refusal(refusal[1], self.refusals.taken())
        return None

    def is_known_to_change(self, region: Region, spec: Any, flat: Flat) -> bool:
        """Whether there is an artefact for this call of a block that changes lists which it is given."""
        return self.finder.is_known(self.requests.wanted(region, spec, flat).primary)

    def withdraw(self, region: Region, spec: Any, flat: Flat, artefact: Artefact, reason: str) -> None:
        """Give an artefact to no call any more, and make none for calls like this one."""
        self.finder.withdraw(artefact, reason)
        self.state.known.withdrawn.add(reason)
        self.refusals.add(self.requests.wanted(region, spec, flat), None, reason)

    def lacked(self, session: ForwardContext) -> None:
        """A region has no artefact in a step. Raises HalfDone where the step has to begin anew."""
        self.handover.lacked(session)

    def take_back(self, refused: list[Any]) -> None:
        """Forget what was refused for a call: eager refuses the call as well."""
        self.refusals.take_back(refused)

    def _has_lock(self, session: ForwardContext) -> bool:
        """Take the lock. False: it is for another step, or for the background, to make what is missing here."""
        if session.missing.made_beside:
            return False
        if self.background is None or self.background.waits:
            while not LOCK.acquire(timeout=WATCH):  # another engine makes something
                self.state.hooks.cancel()
            return True
        return not session.missing.note_made_beside(self.background.busy or not LOCK.acquire(blocking=False))

    def _find_or_make(self, wanted: Wanted, session: ForwardContext) -> tuple[Binding | None, Refusal]:
        binding, failure = self.finder.bind(wanted)
        if binding is None and await_left(self.state.hooks.cancel):
            binding, failure = self.finder.bind(wanted)
        if binding is not None:
            self._tried.pop((wanted.primary, wanted.region.path), None)
        elif (given_up := self._given_up(wanted)) is not None:
            return None, self.refusals.of(wanted) or given_up
        if binding is None and not session.planning.planned and self.may_make(wanted, failure):
            last = failure is not None and failure.wide  # the picture's other steps have theirs, and do not lack this
            if not (self.waits or last) and self.handover.puts_off(session):
                return None, _PENDING
            later: Later = functools.partial(self._to_come, session, wanted.device)
            with self.planner.plan(session) as found:
                if not self.planner.pays(found, session):
                    return None, _PENDING
                if self.waits:
                    while found:
                        self._make_all(found, later)
                        later, found = no_later, self.planner.calls_below(found, session)
            wanted.region.weights.renew()  # a plan exchanges submodules as the network does
            before, wanted = wanted, self.requests.wanted(wanted.region, wanted.example.spec, wanted.flat)
            failure = failure if wanted.primary == before.primary else None  # a plan may find how images lie
            if self._beside(session, wanted, lambda: self._make_planned(wanted, failure, found)):
                return None, _PENDING
            binding, failure = self._make_planned(wanted, failure, found)
        elif binding is None and self.may_make(wanted, failure, first=session.planning.planned):
            if self._beside(session, wanted, lambda: self._make(wanted, failure)):
                return None, _PENDING
            binding = self._make(wanted, failure)
        if binding is None and self.refusals.of(wanted) is None and failure is not None and failure.sizes:
            return None, (failure.check, f"it was compiled for other sizes: {failure.reason}")
        return binding, self.refusals.of(wanted) or (lambda _: True, "nothing that is compiled fits this call")

    @property
    def waits(self) -> bool:
        """Whether steps wait for what they lack; otherwise it is made beside them."""
        return self.background is None or self.background.waits

    def _given_up(self, wanted: Wanted) -> Refusal | None:
        """Why nothing is made for a call beside the steps any more, None where it may be."""
        if self.background is None or self.background.waits:
            return None
        if self.background.failures >= _MOST_TRIES:
            return (lambda _: True), self.background.problem
        return ((lambda _: True), _NOT_MADE) if self._tried[wanted.primary, wanted.region.path] >= _MOST_TRIES else None

    def _beside(self, session: ForwardContext, wanted: Wanted, work: Callable[[], object]) -> bool:
        """Have it made beside this step, which goes on eager. False: it is to be made now."""
        if self.background is None or self.background.waits:
            return False
        self._tried[wanted.primary, wanted.region.path] += 1
        wanted.drop_data()  # the step's own tensors are not kept while it is made
        return session.missing.note_made_beside(self.background.start(work))

    def _make_planned(
        self, wanted: Wanted, failure: GuardFailure | None, found: list[Wanted]
    ) -> tuple[Binding | None, GuardFailure | None]:
        """Make what a plan found and is not made yet, and then for this very call what the plan did not see."""
        self._make_all(found, no_later)
        binding, again = self.finder.bind(wanted)
        failure = failure or again
        if wanted.region.changes and not wanted.flat.lists:  # the call is made again, in that form
            return None, failure
        if binding is None and self.may_make(wanted, failure, first=True):
            binding = self._make(wanted, failure)
        return binding, failure

    def may_make(self, wanted: Wanted, failure: GuardFailure | None, *, first: bool = False) -> bool:
        """Whether to make an artefact where none fits. For other sizes alone only blocks get one more, in a first step.
        Where a size of 1 was taken for a constant, each region gets one that takes more, and a region that keeps frames
        in a list one for a single frame. Blocks whose code asks whether a number is even get one for each answer. Those
        that were captured for more than 1 get one for 1: MiniMax-H3's first step has one time for all tokens.
        Blocks whose code loops over a size, such as a video's frames, get one for each of a few where no step waits.

        first: this step was planned, the first of its kind; what the plan made at batch 2 may not serve its batch 1.

        What stands between the blocks costs little to run eager, and a later resolution must not wait for a compiler.
        But blocks that a plan did not see, such as one that a patch calls in another way, may have been captured at
        batch 1. What is made for a larger batch serves all that follow, and without it they run eager for good.
        """
        if self.refusals.of(wanted) is not None:
            return False
        if failure is None or not failure.sizes or not self.state.config.dynamic:
            return True
        if failure.narrow or (failure.wide and wanted.example.changes):
            return True
        if not self._table.is_block(wanted.region):
            return False
        few = len(self.artefacts.get(wanted.primary, ())) < MOST_SIZES
        one = failure.wide and not any(0 in sizes for sizes, *_ in wanted.example.tensors)
        if few and (one or (failure.parity and not failure.fixed)):
            return True
        return first or self.state.report.calls == 0 or (failure.fixed and few and not self.waits)

    def _make(self, wanted: Wanted, failure: GuardFailure | None) -> Binding | None:
        """One artefact of its own for this very call."""
        why = why_another(wanted, failure)
        wanted.explain(why)
        if self.has_many(wanted):
            count = len(self.artefacts[wanted.primary])
            reason = f"it has {count} variants already; {_KEEPS_CHANGING}: {why}"
            self.refusals.add_while_names_stay(wanted, reason, alike=_KEEPS_CHANGING)
            return None
        name = f"{wanted.primary}/{len(self.artefacts.get(wanted.primary, ()))}"
        with turn(name, lambda: self.finder.bind(wanted)[0], self._cancel) as made:
            if made is None:
                self._lower([self._job(wanted, Others(self))])
            return made or self.finder.bind(wanted)[0]

    def made(self, primary: str) -> int:
        """How many artefacts of a structure were made here."""
        return self._made[primary]

    def has_many(self, wanted: Wanted, coming: int = 0) -> bool:
        """Whether there are as many artefacts as there may be, with so many that are under way."""
        stored = len(self.artefacts.get(wanted.primary, ()))
        return self._made[wanted.primary] + coming >= MOST_VARIANTS or stored + coming >= _MOST_STORED

    # -- making ------------------------------------------------------------------------------------------

    def _make_all(self, found: list[Wanted], later: Later = no_later) -> None:
        """Compile what cannot be bound. Equal structures in turn: the second may bind to what the first gave.

        What a capture says is enough to tell, and no lowering is waited for. later: as for `lower_all`, for the first.
        """
        while found:
            jobs, rest = self._jobs_for(found)
            if not jobs:
                return
            self._lower(jobs, later)
            later, found = no_later, rest + as_changing(found)

    def _jobs_for(self, found: list[Wanted]) -> tuple[list[Job], list[Wanted]]:
        """A job for each structure that cannot be bound, and what waits for what those give."""
        wave: dict[str, Wanted] = {}
        rest = []
        others = Others(self)
        for wanted in found:
            binding, failure = self.finder.bind(wanted)
            if binding is not None or not self.may_make(wanted, failure) or wanted.is_stale():
                continue
            wanted.explain(why_another(wanted, failure) if wanted.region.bindings else None)  # None: it is its first
            if wanted.primary in wave:
                rest.append(wanted)
                others.add(wanted, failure)
            elif not self.has_many(wanted):
                wave[wanted.primary] = wanted
        return [self._job(wanted, others) for wanted in wave.values()], rest

    def expecting(self, call: Callable[..., Any], args: tuple[Any, ...], device: torch.device) -> list[Job]:
        """Jobs for a call on a device that is still to come."""
        if self._eligibility.reason(args, {}) is not None or self._table.whole_region is not None:
            return []
        try:
            return self._jobs_for(self.planner.calls(to_come(call, args)))[0]
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()  # workers are at work, and need what the plan's run has taken

    @contextlib.contextmanager
    def _to_come(self, session: ForwardContext, device: torch.device) -> Iterator[list[Job]]:
        """Jobs for what runs after this backbone. A convenience: this step does not fail by it."""
        with contextlib.ExitStack() as stack:
            jobs: list[Job] = []
            try:
                if session.calls.backbone is not None:
                    after = stack.enter_context(self._then(*session.calls.backbone[1:]))
                    jobs = [job for expecting in after for job in expecting(device)]
            except Exception as error:
                if isinstance(error, self.state.hooks.stops()):
                    raise
                log.debug("Nexfort: planning what runs after %s failed", self.state.name, exc_info=True)
                self.state.report.note(f"what runs after it was not made with it ({named(error)})")
            yield jobs

    def _job(self, wanted: Wanted, others: Others) -> Job:
        """others: what is made with it where its capture shows that its artefact will not serve it."""
        return Job(
            wanted.region.path,
            functools.partial(self._capture, wanted),
            self.state.store,
            wanted.primary,
            wanted.device.type,
            modes=modes.named(wanted.modes),
            done=functools.partial(self._done, wanted),
            more=lambda job, manifest: [self._job(one, others) for one in others.after(job.primary, manifest)],
            weight=sum(1 for _ in wanted.region.module.modules()),
            family=self.state.name,
            mode=str(self.state.config.mode),
            kind=wanted.region.kind,
        )

    def _lower(self, jobs: list[Job], later: Later = no_later) -> None:
        """Capture and lower; what fails is refused with its reason. The host may cancel in between."""
        remember_in(self.state.store.root)
        began = time.perf_counter()
        try:
            with self.state.hooks.apart():
                lower_all(jobs, self.finder.options, self._cancel, later)
        finally:
            self.state.report.made(time.perf_counter() - began)

    def _done(self, wanted: Wanted, job: Job) -> None:
        for note in job.notes:
            self.state.report.note(note)
        if job.problem is None:
            self._adopt(wanted, job)
        elif job.refused and job.problem in MAY_CHANGE and not wanted.example.changes:
            wanted.region.changes_what_it_is_given()
        elif job.refused or not self._is_tried_again(wanted):
            self.refusals.add(wanted, job.guards, job.problem, self.finder.dependence(job.names, wanted.region))
        else:  # the host may have moved the weights meanwhile: not for good
            log.info("Nexfort: %s is tried again: %s", wanted.region.path, job.problem)

    def _is_tried_again(self, wanted: Wanted) -> bool:
        """Whether what could not be made is tried once more. In the background it may have failed for what passes."""
        if self.background is None or not self.background.here:
            return False
        failed = self._failed.setdefault((wanted.primary, wanted.region.path), set())
        failed.add(self.background.begun)
        return len(failed) < _MOST_TRIES

    def _cancel(self) -> None:
        """The host's cancel is of a step, and asking for it takes it back: the background leaves it alone."""
        if self.background is None or not self.background.here:
            self.state.hooks.cancel()
        else:
            stop_at_exit()

    def _capture(self, wanted: Wanted) -> tuple[Captured, dict[str, Any]]:
        region = wanted.region
        if (refusal := self.refusals.of(wanted)) is not None:  # because of one that was captured a moment ago
            raise Refused(refusal[1])
        weights, layers = None, region.weights.layers
        if layers is not None:
            weights = layers.examples(region.weights.slots.read(), wanted.device)
        called_in = modes.named(wanted.modes)  # a plan finds calls that are made in others than these
        with modes.applied(called_in):
            captured = capture(
                region.module,
                wanted.example,
                dynamic=self.state.config.dynamic,
                weights=weights,
                hidden=region.weights.hidden(),
                images=wanted.images,
                device=called_in["default_device"],
            )
        if wanted.is_stale():
            raise RuntimeError("its weights were exchanged while it was captured")
        driver, info = self.keys.origin(region.path, wanted.device)
        options = self.finder.options(wanted.device.type)
        for name, dtype in (("low_precision", matmul.FP8), ("low_precision_int8", torch.int8)):
            if options.get(f"nexfort.{name}"):
                info["products"] = low_precision.describe_plan(captured.graph, dtype)
        if options.get("nexfort.narrow_attention"):
            info["attention"] = low_precision_attention.describe_plan(captured.graph)
        notes = callback_sites.describe_sites(captured.sites)
        for rewrite in (rotary, fp8_input, int8_linear):
            name = rewrite.__name__.rpartition(".")[2]
            if options.get(f"nexfort.{name}"):
                notes += [f"in {region.kind} {reason}" for reason in rewrite.left(captured.graph)]
            elif name in self.finder.inactive and calls_of(captured.graph, rewrite.NAME):
                notes.append(self.finder.inactive[name])  # the same for each block: the report has it once
        if notes:
            info["notes"] = notes
        return captured, manifest_of(captured, region.kind, driver, info)

    def _adopt(self, wanted: Wanted, job: Job) -> None:
        entry = job.entry
        assert entry is not None
        region = wanted.region
        try:
            artefact = Artefact(entry.id, entry.primary, entry.manifest, entry)
            self.finder.load_code(artefact, entry)
        except Exception as error:
            self.refusals.add(wanted, None, f"its compiled code does not load: {named(error)}")
            return
        artefact.note_new()
        self.artefacts.setdefault(wanted.primary, []).append(artefact)
        self.state.known.compiled.add(code_of(wanted))
        self._made[wanted.primary] += 1
        self.finder.share(artefact, entry)
        self._reported.add(entry.id)
        self.state.report.compiled(region.path, entry.id, job.seconds)
        if wanted.why:
            self.state.report.variant(region.path, wanted.why)
        if name := entry.manifest["only_here"]:
            why = f"it uses {name}, which no other process can compare"
            self.state.report.note(f"an artefact of {region.path} lasts only as long as this process: {why}")
