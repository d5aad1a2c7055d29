# SPDX-License-Identifier: Apache-2.0
"""Builder: from a call no artefact is known for, to a binding. Plans, captures, lowers; lookup.py has what is there.

The first time something is missing, planner.py says what else is: all of it is captured and lowered together, with one
progress bar.

Everything here runs under one process-wide lock, off the path of calls whose artefact is known.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..cache.key import environment_parts, primary_key
from ..capture.exporter import capture, spec_key
from ..capture.types import LOCK, Captured, Example
from ..dispatch.region import Ineligible, Region
from ..guards import callback_sites
from ..guards.call_spec import Flat
from ..guards.option_recorder import Refused
from ..lowering.vec_isa_cache import remember_in
from ..modules.channels_last import as_taken, win_on
from ..modules.memory_format import normalised
from ..passes import low_precision, low_precision_attention, rotary
from ..quant import matmul
from ..reporting.report import named
from ..reporting.resource_shortages import told
from ..runtime.artifact import Artefact, Binding, Misfit, manifest_of
from ..runtime.devices import device_of
from ..runtime.forward_context import Session
from ..runtime.lru_mapping import Recent
from ..runtime.shared_state import Refusal
from ..system import torch_modes as modes
from .background import Background
from .jobs import WATCH, Job, Later, await_left, lower_all, no_later
from .lookup import Finder, Wanted, misfit_of, nearer
from .planner import Planner, ghost
from .refusals import Refusals, code_of

if TYPE_CHECKING:
    from ..engine import Engine

log = logging.getLogger("nexfort")

# artefacts of one structure and call that a session makes, and that there are at all; past that something changes on
# every run
MOST_VARIANTS = 8
_MOST_STORED = 64
_KEEPS_CHANGING = "what it depends on keeps changing"
_MOST_TRIES = 2  # in the background, for one kind of call of a region
_MOST_CALLS = 4096  # of all regions, of which is remembered how they were called
_SIZES_SHOWN = 4  # tensors of a call whose sizes are kept for those who look through the store
_PENDING: Refusal = ((lambda _: True), "it is being made")


class Builder:
    """Makes and finds the artefacts of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.planner = Planner(engine, self.wanted)
        self.finder = Finder(engine.state)
        self.background = Background(lambda text: engine.report.note(text)) if engine.config.background else None
        known = engine.known
        self.artefacts, self.refusals = known.artefacts, Refusals(known)
        self._made, self._reported = known.made, known.reported
        self._tried: Counter[tuple[str, str]] = Counter()
        self._noted: Recent[tuple[str, str], None] = Recent(_MOST_CALLS)  # artefacts, sizes that the store was told of
        self._primaries: Recent[tuple[int, Any, Any, bool, Any], tuple[Any, str]] = Recent(_MOST_CALLS)

    # -- a call whose artefact is not known --------------------------------------------------------------

    def obtain(self, region: Region, key: Any, flat: Flat, session: Session) -> Binding | None:
        """A binding for this call, or None; `Session.refused` says why. Raises Unsupported, Ineligible."""
        for check, reason in region.declined.get(key, ()):
            if check(flat.mappings):
                session.refused = reason, []
                return None
        if not self._has_lock(session):
            return None
        self.refusals.taken()
        try:
            self.engine.known.watched.look()
            carried = region.carries()
            if carried:
                raise Ineligible(f"it carries {carried}")
            wanted = self.wanted(region, key[0], flat)
            session.new_sizes |= wanted.device.type == "cpu"
            binding, refusal = self._find_or_make(wanted, session)
        except OSError as error:  # of files that are read and written here; the step does without
            if isinstance(error, self.engine.stops()):
                raise
            log.debug("Nexfort: nothing is found or made for %s", region.path, exc_info=True)
            self._tried[(region.path, "")] += 1
            if self._tried[(region.path, "")] < _MOST_TRIES:
                raise Ineligible(told(error)) from error
            binding, refusal = None, ((lambda _: True), told(error))
        finally:
            LOCK.release()
        if session.behind or session.aside:
            return None
        if binding is not None:
            region.remember(key, binding)
            self._note_sizes(binding.artefact, flat)
        if (problem := self.engine.store.problem) is not None:
            self.engine.report.note(f"artefacts last only as long as this process: {problem}")
        if binding is not None:
            return binding
        others = [one for one in region.declined.get(key) or () if one[1] != refusal[1]]
        region.declined[key] = [*others, refusal]
        session.refused = refusal[1], self.refusals.taken()
        return None

    def _has_lock(self, session: Session) -> bool:
        """Take the lock. False: it is for another step, or for the background, to make what is missing here."""
        if session.behind:
            return False
        if self.background is None or self.background.failed:
            while not LOCK.acquire(timeout=WATCH):  # another engine makes something
                self.engine.cancel()
            return True
        session.behind = self.background.busy or not LOCK.acquire(blocking=False)
        return not session.behind

    def _note_sizes(self, artefact: Artefact, flat: Flat) -> None:
        """Tell the store which sizes an artefact served; once, although many blocks share it."""
        sizes = ", ".join("x".join(map(str, t.shape)) for t in flat.tensors[:_SIZES_SHOWN])
        if artefact.entry is not None and (artefact.id, sizes) not in self._noted:
            self._noted[artefact.id, sizes] = None
            self.engine.store.note_shape(artefact.entry, sizes)

    def _find_or_make(self, wanted: Wanted, session: Session) -> tuple[Binding | None, Refusal]:
        binding, misfit = self.finder.bind(wanted)
        if binding is None and await_left(self.engine.cancel):
            binding, misfit = self.finder.bind(wanted)
        if binding is None and not session.planned and self.may_make(wanted, misfit):
            found = self.planner.calls(session)
            if not self.planner.pays(found, session):
                return None, _PENDING
            before, wanted = wanted, self.wanted(wanted.region, wanted.example.spec, wanted.flat)
            misfit = misfit if wanted.primary == before.primary else None  # a plan may find how images lie
            if self._beside(session, wanted, lambda: self._make_planned(wanted, misfit, found)):
                return None, _PENDING
            later = functools.partial(self._to_come, session, wanted.device)
            binding, misfit = self._make_planned(wanted, misfit, found, later)
        elif binding is None and self.may_make(wanted, misfit, first=session.planned):
            if self._beside(session, wanted, lambda: self._make(wanted, misfit)):
                return None, _PENDING
            binding = self._make(wanted, misfit)
        if binding is None and self.refusals.of(wanted) is None and misfit is not None and misfit.sizes:
            return None, (misfit.check, f"it was compiled for other sizes: {misfit.reason}")
        return binding, self.refusals.of(wanted) or (lambda _: True, "no artefact fits this call")

    def called(self, found: list[Wanted]) -> Iterator[tuple[Region, str | None]]:
        """What a plan saw of regions: each call's, and why it cannot be compiled, as far as that is known."""
        for wanted in found:
            refusal = self.refusals.of(wanted)
            yield wanted.region, refusal[1] if refusal is not None else None

    def _beside(self, session: Session, wanted: Wanted, work: Callable[[], object]) -> bool:
        """Have it made beside this step, which goes on eager. False: it is to be made now.

        What is still missing after some tries is the step's own matter, which has the reason.
        """
        tries = (wanted.primary, wanted.region.path)
        if self.background is None or self.background.failed or self._tried[tries] >= _MOST_TRIES:
            return False
        self._tried[tries] += 1
        wanted.flat = ghost(wanted.example)  # the step's own tensors are not kept while it is made
        session.behind = self.background.start(work)
        return session.behind

    def _make_planned(
        self, wanted: Wanted, misfit: Misfit | None, found: list[Wanted], later: Later = no_later
    ) -> tuple[Binding | None, Misfit | None]:
        """Make what a plan found, and then for this very call what the plan did not see."""
        self._make_all(found, later)
        binding, again = self.finder.bind(wanted)
        misfit = misfit or again
        if binding is None and self.may_make(wanted, misfit, first=True):
            binding = self._make(wanted, misfit)
        return binding, misfit

    def may_make(self, wanted: Wanted, misfit: Misfit | None, *, first: bool = False) -> bool:
        """Whether to make an artefact where none fits. For other sizes alone only blocks get one more, in a first step.

        first: this step was planned, the first of its kind; what the plan made at batch 2 may not serve its batch 1.

        What stands between the blocks costs little to run eager, and a later resolution must not wait for a compiler.
        But blocks that a plan did not see, such as one that a patch calls in another way, may have been captured at
        batch 1. What is made for a larger batch serves all that follow, and without it they run eager for good.
        """
        if self.refusals.of(wanted) is not None:
            return False
        if misfit is None or not misfit.sizes or not self.engine.config.dynamic:
            return True
        return self.engine.is_block(wanted.region) and (first or misfit.narrow or self.engine.report.calls == 0)

    def _make(self, wanted: Wanted, misfit: Misfit | None) -> Binding | None:
        """One artefact of its own for this very call."""
        wanted.why = why = _why(wanted, misfit)
        if self.has_many(wanted):
            count = len(self.artefacts[wanted.primary])
            reason = f"it has {count} variants already; {_KEEPS_CHANGING}: {why}"
            self.refusals.add_while_names_stay(wanted, reason, alike=_KEEPS_CHANGING)
            return None
        self._lower([self._job(wanted, _Others(self))])
        return self.finder.bind(wanted)[0]

    def made(self, primary: str) -> int:
        """How many artefacts of a structure were made here."""
        return self._made[primary]

    def has_many(self, wanted: Wanted, coming: int = 0) -> bool:
        """Whether there are as many artefacts as there may be, with so many that are under way."""
        stored = len(self.artefacts.get(wanted.primary, ()))
        return self._made[wanted.primary] + coming >= MOST_VARIANTS or stored + coming >= _MOST_STORED

    def wanted(self, region: Region, spec: Any, flat: Flat) -> Wanted:
        """What a region needs for a call, with the key under which artefacts for it are kept."""
        device = device_of([t.device for t in (*flat.tensors, *region.slots.read())])
        images = region.images and win_on(device)  # asked once: a step beside this one may change it
        shaping = modes.current().shaping
        metas = region.metas(flat, images)
        example = Example.of(spec, flat, as_taken if images else normalised)
        primary = self._primary(region, spec, flat, metas, str(device), images, shaping)
        return Wanted(region, primary, example, flat, images, shaping)

    def _primary(
        self, region: Region, spec: Any, flat: Flat, metas: list[Any], device: str, images: bool, shaping: modes.Values
    ) -> str:
        structure = region.structure()
        place = (id(region), spec, tuple(metas), images, shaping)
        found = self._primaries.get(place)
        if found is None or found[0] is not structure:
            parts = {
                "environment": environment_parts(device),
                "config": self.engine.lowering.lowering_key(images=images),
                "structure": structure,
                "call": spec_key(spec, flat, metas),
                "images": images,
                "modes": shaping,
            }
            found = self._primaries[place] = (structure, primary_key(parts))
        return found[1]

    # -- making ------------------------------------------------------------------------------------------

    def _make_all(self, found: list[Wanted], later: Later = no_later) -> None:
        """Compile what cannot be bound. Equal structures in turn: the second may bind to what the first gave.

        What the capture of the first says is enough to tell. Lowering them in turn would be waiting for one worker.
        later: as for `lower_all`, with the first of them.
        """
        while found:
            jobs, found = self._jobs_for(found)
            if not jobs:
                return
            self._lower(jobs, later)
            later = no_later

    def _jobs_for(self, found: list[Wanted]) -> tuple[list[Job], list[Wanted]]:
        """A job for each structure that cannot be bound, and what waits for what those give."""
        wave: dict[str, Wanted] = {}
        rest = []
        others = _Others(self)
        for wanted in found:
            binding, misfit = self.finder.bind(wanted)
            if binding is not None or not self.may_make(wanted, misfit):
                continue
            wanted.why = _why(wanted, misfit) if wanted.region.bindings else None  # None: it is its first one
            if wanted.primary in wave:
                rest.append(wanted)
                others.add(wanted, misfit)
            elif not self.has_many(wanted):
                wave[wanted.primary] = wanted
        return [self._job(wanted, others) for wanted in wave.values()], rest

    def expecting(self, call: Callable[..., Any], args: tuple[Any, ...], device: torch.device) -> list[Job]:
        """Jobs for a call on a device that is still to come."""
        if self.engine.passes(args) is not None or self.engine.whole_region is not None:
            return []
        session = Session(self.engine.on_call)
        session.root = (call, args, {})
        try:
            return self._jobs_for(self.planner.calls(session))[0]
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()  # workers are at work, and need what the plan's run has taken

    @contextlib.contextmanager
    def _to_come(self, session: Session, device: torch.device) -> Iterator[list[Job]]:
        """Jobs for what runs after this backbone. A convenience: this step does not fail by it."""
        with contextlib.ExitStack() as stack:
            jobs: list[Job] = []
            try:
                if session.root is not None:
                    after = stack.enter_context(self.engine.then(*session.root[1:]))
                    jobs = [job for engine, call, args in after for job in engine.builder.expecting(call, args, device)]
            except Exception as error:
                if isinstance(error, self.engine.stops()):
                    raise
                log.debug("Nexfort: planning what runs after %s failed", self.engine.name, exc_info=True)
                self.engine.report.note(f"what runs after it was not made with it ({named(error)})")
            yield jobs

    def _job(self, wanted: Wanted, others: _Others) -> Job:
        """others: what is made with it where its capture shows that its artefact will not serve it."""
        return Job(
            wanted.region.path,
            functools.partial(self._capture, wanted),
            self.engine.store,
            wanted.primary,
            wanted.device.type,
            modes=modes.named(wanted.modes),
            done=functools.partial(self._done, wanted),
            more=lambda job, manifest: [self._job(one, others) for one in others.after(job.primary, manifest)],
            weight=sum(1 for _ in wanted.region.module.modules()),
        )

    def _lower(self, jobs: list[Job], later: Later = no_later) -> None:
        """Capture and lower; what fails is refused with its reason. The host may cancel in between."""
        remember_in(self.engine.store.root)
        began = time.perf_counter()
        try:
            with self.engine.apart():
                lower_all(jobs, self.finder.options, self._cancel, later)
        finally:
            self.engine.report.made(time.perf_counter() - began)

    def _done(self, wanted: Wanted, job: Job) -> None:
        for note in job.notes:
            self.engine.report.note(note)
        if job.problem is None:
            self._adopt(wanted, job)
        elif job.refused or self.background is None or not self.background.here:
            self.refusals.add(wanted, job.guards, job.problem, self.finder.dependence(job.names, wanted.region))
        else:  # the host may have moved the weights meanwhile: not for good
            log.info("Nexfort: %s is tried again: %s", wanted.region.path, job.problem)

    def _cancel(self) -> None:
        """The host's cancel is of a step, and asking for it takes it back: the background leaves it alone."""
        if self.background is None or not self.background.here:
            self.engine.cancel()

    def _capture(self, wanted: Wanted) -> tuple[Captured, dict[str, Any]]:
        region = wanted.region
        if (refusal := self.refusals.of(wanted)) is not None:  # because of one that was captured a moment ago
            raise Refused(refusal[1])
        weights, layers = None, region.layers
        if layers is not None:
            weights = layers.examples(region.slots.read(), wanted.device)
        called_in = modes.named(wanted.modes)  # a plan finds calls that are made in others than these
        with modes.applied(called_in):
            captured = capture(
                region.module,
                wanted.example,
                dynamic=self.engine.config.dynamic,
                weights=weights,
                hidden=region.hidden(),
                images=wanted.images,
                device=called_in["default_device"],
            )
        driver, info = self.engine.made_for(region, wanted.device)
        options = self.finder.options(wanted.device.type)
        for name, dtype in (("low_precision", matmul.FP8), ("low_precision_int8", torch.int8)):
            if options.get(f"nexfort.{name}"):
                info["products"] = low_precision.told(captured.graph, dtype)
        if options.get("nexfort.narrow_attention"):
            info["attention"] = low_precision_attention.told(captured.graph)
        notes = callback_sites.told(captured.sites)
        if options.get("nexfort.rotary"):
            notes += [f"in {region.kind} {reason}" for reason in rotary.left(captured.graph)]
        if notes:
            info["notes"] = notes
        return captured, manifest_of(captured, region.kind, driver, info)

    def _adopt(self, wanted: Wanted, job: Job) -> None:
        entry = job.entry
        assert entry is not None
        region = wanted.region
        try:
            artefact = Artefact(entry.id, entry.primary, entry.manifest)
            artefact.entry = entry
            self.finder.load_code(artefact, entry)
        except Exception as error:
            self.refusals.add(wanted, None, f"its artefact does not load: {named(error)}")
            return
        self.artefacts.setdefault(wanted.primary, []).append(artefact)
        self.engine.known.compiled.add(code_of(wanted))
        self._made[wanted.primary] += 1
        self.finder.share(artefact, entry)
        self._reported.add(entry.id)
        self.engine.report.compiled(region.path, entry.id, job.seconds)
        if wanted.why:
            self.engine.report.variant(region.path, wanted.why)
        if name := entry.manifest["only_here"]:
            why = f"it uses {name}, which no other process can compare"
            self.engine.report.note(f"an artefact of {region.path} lasts only as long as this process: {why}")


class _Others:
    """Calls that wait for what others of their structure get, because it may serve them too."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._waiting: dict[str, list[tuple[Wanted, Misfit | None]]] = {}
        self._captured: dict[str, list[Artefact]] = {}
        self._made: dict[str, int] = {}  # how many there were of each structure before

    def add(self, wanted: Wanted, misfit: Misfit | None) -> None:
        """misfit: why artefacts that are there already do not serve it."""
        self._waiting.setdefault(wanted.primary, []).append((wanted, misfit))
        self._made.setdefault(wanted.primary, self._builder.made(wanted.primary))

    def after(self, primary: str, manifest: dict[str, Any]) -> list[Wanted]:
        """After a capture of their structure: one call that it does not serve, nor those before; its own is next."""
        captured = self._captured.setdefault(primary, [])
        waiting = self._waiting.get(primary, [])
        if waiting:
            captured.append(Artefact("", primary, manifest))
        while waiting:
            wanted, nearest = waiting.pop(0)
            hidden = wanted.region.hidden()
            misfits = [misfit_of(artefact, wanted, hidden) for artefact in captured]
            for misfit in misfits:
                nearest = nearer(nearest, misfit) if misfit is not None else nearest
            coming = len(captured) - (self._builder.made(primary) - self._made[primary])  # some are there already
            if None in misfits or self._builder.has_many(wanted, coming):
                continue
            if self._builder.may_make(wanted, nearest):
                wanted.why = _why(wanted, nearest) if wanted.region.bindings else None
                return [wanted]
        return []


def _why(wanted: Wanted, misfit: Misfit | None) -> str | None:
    """Why a region needs a further artefact; None if it has none yet."""
    if misfit is not None:
        return misfit.reason
    # the artefacts that it runs have another primary key
    return "it is called in another way: other arguments, dtypes or memory formats" if wanted.region.bindings else None
