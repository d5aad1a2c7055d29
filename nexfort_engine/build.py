# SPDX-License-Identifier: Apache-2.0
"""Builder: from a call no artefact is known for, to a binding. Finds in the store, plans, captures, lowers, loads.

The first time something is missing, planning.py says what else is: all of it is captured and lowered together, with one
progress bar.

Everything here runs under one process-wide lock, off the path of calls whose artefact is known.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from . import lower, precision
from .artefact import Artefact, Binding, Misfit, Refusal, manifest_of
from .cache.key import driver_problem, environment_parts, primary_key
from .cache.store import Entry, StoreError
from .capture import LOCK, Captured, Example, capture, spec_key
from .cpu_probe import remember_in
from .dispatch import Ineligible, Region, device_of
from .effects import CHANGES_GIVEN
from .guards import checker
from .lowering import Job, await_left, lower_all
from .modulestate import matches_text
from .planning import Planner
from .report import named
from .signature import Flat, holds_objects, normalised
from .sources import sources_changed

if TYPE_CHECKING:
    from .engine import Engine
    from .session import Session

log = logging.getLogger("nexfort")

# artefacts of one structure and call that a session makes, and that there are at all; past that something changes on
# every run
MOST_VARIANTS = 8
_MOST_STORED = 64
# Blocks of one class that are tried although they change a list that they are given. A video's autoencoder hands such
# blocks another list each time, and each try is a capture.
_MOST_CHANGING = 3
_SIZES_SHOWN = 4  # tensors of a call whose sizes are kept for those who look through the store
_loaded: WeakValueDictionary[tuple[str, str], Artefact] = WeakValueDictionary()


@dataclass
class Wanted:
    """A region and a call it needs an artefact for."""

    region: Region
    primary: str
    example: Example
    flat: Flat
    why: str | None = None  # why it needs a further one, for the report


class Builder:
    """Makes and finds the artefacts of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.planner = Planner(engine, self.wanted)
        known = engine.known
        self.artefacts, self.refusals = known.artefacts, known.refusals
        self._made, self._reported, self._changing = known.made, known.reported, known.changing
        self._noted: set[tuple[str, str]] = set()  # artefacts and sizes that the store was told of
        self._primaries: dict[tuple[int, Any, Any], tuple[Any, str]] = {}

    # -- a call whose artefact is not known --------------------------------------------------------------

    def obtain(self, region: Region, key: Any, flat: Flat, session: Session) -> Binding | None:
        """A binding for this call, or None: it runs eager and the report says why. Raises Unsupported, Ineligible."""
        for check, reason in region.declined.get(key, ()):
            if check(flat.mappings):
                self.engine.report.eager(region.path, reason)
                return None
        with LOCK:
            carried = region.carries()
            if carried:
                raise Ineligible(f"it carries {carried}")
            wanted = self.wanted(region, key[0], flat)
            binding, refusal = self._find_or_make(wanted, session)
        if binding is not None:
            region.remember(key, binding)
            self._note_sizes(binding.artefact, flat)
            return binding
        region.declined.setdefault(key, []).append(refusal)
        self.engine.report.eager(region.path, refusal[1])
        return None

    def _note_sizes(self, artefact: Artefact, flat: Flat) -> None:
        """Tell the store which sizes an artefact served; once, although many blocks share it."""
        sizes = ", ".join("x".join(map(str, t.shape)) for t in flat.tensors[:_SIZES_SHOWN])
        if artefact.entry is not None and (artefact.id, sizes) not in self._noted:
            self._noted.add((artefact.id, sizes))
            self.engine.store.note_shape(artefact.entry, sizes)

    def _find_or_make(self, wanted: Wanted, session: Session) -> tuple[Binding | None, Refusal]:
        binding, misfit = self._bind(wanted)
        if binding is None and await_left(self.engine.cancel):
            binding, misfit = self._bind(wanted)
        if binding is None and not session.planned and self._may_make(wanted, misfit):
            self._make_all(self.planner.calls(session))
            binding, again = self._bind(wanted)
            misfit = misfit or again
        if binding is None and self._may_make(wanted, misfit, first=session.planned):
            binding = self._make(wanted, misfit)
        if binding is None and self._refused(wanted) is None and misfit is not None and misfit.sizes:
            return None, (misfit.check, f"it was compiled for other sizes: {misfit.reason}")
        return binding, self._refused(wanted) or (lambda _: True, "no artefact fits this call")

    def _may_make(self, wanted: Wanted, misfit: Misfit | None, *, first: bool = False) -> bool:
        """Whether to make an artefact where none fits. For other sizes alone only blocks get one more, in a first step.

        first: this step was planned, the first of its kind; what the plan made at batch 2 may not serve its batch 1.

        What stands between the blocks costs little to run eager, and a later resolution must not wait for a compiler.
        But blocks that a plan did not see, such as one that a patch calls in another way, may have been captured at
        batch 1. What is made for a larger batch serves all that follow, and without it they run eager for good.
        """
        if self._refused(wanted) is not None:
            return False
        if misfit is None or not misfit.sizes or not self.engine.config.dynamic:
            return True
        return self.engine.is_block(wanted.region) and (first or misfit.narrow or self.engine.report.calls == 0)

    def _make(self, wanted: Wanted, misfit: Misfit | None) -> Binding | None:
        """One artefact of its own for this very call."""
        wanted.why = why = _why(wanted, misfit)
        if self._has_many(wanted):
            count = len(self.artefacts[wanted.primary])
            self._refuse(wanted, None, f"it has {count} variants already; what it depends on keeps changing: {why}")
            return None
        self.compile([wanted])
        return self._bind(wanted)[0]

    def _has_many(self, wanted: Wanted) -> bool:
        stored = len(self.artefacts.get(wanted.primary, ()))
        return self._made[wanted.primary] >= MOST_VARIANTS or stored >= _MOST_STORED

    def wanted(self, region: Region, spec: Any, flat: Flat) -> Wanted:
        """What a region needs for a call, with the key under which artefacts for it are kept."""
        metas = region.metas(flat)
        plain = Flat()
        plain.tensors, plain.ints, plain.mappings = [normalised(t) for t in flat.tensors], flat.ints, flat.mappings
        return Wanted(region, self._primary(region, spec, flat, metas), Example.of(spec, plain), flat)

    def _primary(self, region: Region, spec: Any, flat: Flat, metas: list[Any]) -> str:
        structure = region.structure()
        place = (id(region), spec, tuple(metas))
        found = self._primaries.get(place)
        if found is None or found[0] is not structure:
            weights = region.slots.read()
            device = str(device_of([t.device for t in (*flat.tensors, *weights)]))
            parts = {
                "environment": environment_parts(device),
                "config": self.engine.config.lowering_key(),
                "structure": structure,
                "call": spec_key(spec, flat, metas),
            }
            found = self._primaries[place] = (structure, primary_key(parts))
        return found[1]

    # -- what is there -----------------------------------------------------------------------------------

    def _bind(self, wanted: Wanted) -> tuple[Binding | None, Misfit | None]:
        """A binding from an artefact in memory or in the store, and why those that exist did not fit."""
        region = wanted.region
        for binding in region.bindings:
            same = binding.artefact.primary == wanted.primary
            if same and binding.artefact.misfit(wanted.flat) is None and binding.state.unchanged():
                return binding, None
        nearest: Misfit | None = None
        hidden = region.layers.hidden() if region.layers is not None else None
        for artefact in self._candidates(wanted):
            misfit = artefact.misfit(wanted.flat)
            if (misfit is None or misfit.sizes) and not matches_text(region.module, artefact.reads, hidden):
                misfit = Misfit("an attribute of the block differs from the captured one")
            if misfit is not None:
                nearest = _nearer(nearest, misfit)
            elif self._has_code(artefact, wanted):
                binding = Binding(artefact, region.module, hidden)
                region.bindings = [b for b in region.bindings if b.artefact is not artefact] + [binding]
                self.engine.report.region(region.path, kind=region.kind, key=wanted.primary)
                return binding, None
        return None, nearest

    def _candidates(self, wanted: Wanted) -> Iterator[Artefact]:
        """The artefacts of this structure and call, those of the store without their code."""
        known = self.artefacts.setdefault(wanted.primary, [])
        yield from list(known)
        ids = {artefact.id for artefact in known}
        for entry in self.engine.store.candidates(wanted.primary):
            if entry.id in ids:
                continue
            changed = sources_changed(entry.manifest.get("sources", {}))
            if changed:
                path = wanted.region.path
                self.engine.report.note(f"an artefact of {path} is out of date: the source of {changed} changed")
                continue
            problem = driver_problem(entry.manifest.get("driver"))
            if problem:
                self.engine.report.note(f"an artefact of {wanted.region.path} is not used: {problem}")
                continue
            artefact = self._described(entry)
            if artefact is not None:
                known.append(artefact)
                yield artefact

    def _described(self, entry: Entry) -> Artefact | None:
        shared = _loaded.get((str(self.engine.store.root), entry.id))
        if shared is not None:
            return shared
        try:
            artefact = Artefact(entry.id, entry.primary, entry.manifest)
        except Exception as error:
            # a manifest that is sound by its hash and cannot be read all the same: its classes are not here
            self.engine.store.set_aside(entry, named(error))
            return None
        artefact.entry = entry
        return artefact

    def _has_code(self, artefact: Artefact, wanted: Wanted) -> bool:
        """Load the artefact's code if it is not there yet. False: it is damaged, and was set aside."""
        store, path = self.engine.store, wanted.region.path
        if artefact.code is not None:
            if artefact.id not in self._reported:
                self._reported.add(artefact.id)
                self.engine.report.loaded(path, artefact.id, 0.0)
            return True
        entry = artefact.entry
        assert entry is not None, "an artefact comes from this process or from the store"
        began = time.perf_counter()
        problem = None
        try:
            with self.engine.apart():
                self._load_code(artefact, entry)
        except StoreError as error:
            problem = str(error)
        except Exception as error:
            # a file that is sound by its hashes and still does not load: another torch build, a missing operator
            problem = named(error)
        if problem is not None:
            store.set_aside(entry, problem)
            self.engine.report.note(f"an artefact of {path} is not used: {problem}")
            self.artefacts[artefact.primary].remove(artefact)
            return False
        store.touch(entry)
        self._reported.add(artefact.id)
        self.engine.report.loaded(path, artefact.id, time.perf_counter() - began)
        _loaded[(str(store.root), entry.id)] = artefact
        return True

    def _load_code(self, artefact: Artefact, entry: Entry) -> None:
        remember_in(self.engine.store.root)
        options = self._options("cuda" if torch.cuda.is_available() else "cpu")
        # a copy that only this process writes to, checked byte by byte before anything of it is loaded
        payload = self.engine.store.ready(entry)
        artefact.code = lower.load(payload, options, entry.manifest["modules"], len(artefact.weights))

    def _options(self, device_type: str) -> dict[str, object]:
        options = self.engine.config.lowering_options(device_type)
        if self.engine.config.has("low-precision") and (reason := precision.missing(device_type)):
            self.engine.report.note(f"low precision is not active: {reason}")
            options["nexfort.low_precision"] = False
        return options

    def _make_all(self, found: list[Wanted]) -> None:
        """Compile what cannot be bound. Equal structures in turn: the second may bind to what the first gave."""
        while found:
            wave: dict[str, Wanted] = {}
            rest = []
            for wanted in found:
                binding, misfit = self._bind(wanted)
                if binding is not None or not self._may_make(wanted, misfit):
                    continue
                wanted.why = _why(wanted, misfit) if wanted.region.bindings else None  # None: it is its first one
                if wanted.primary in wave:
                    rest.append(wanted)
                elif not self._has_many(wanted):
                    wave[wanted.primary] = wanted
            if not wave:
                return
            self.compile(list(wave.values()))
            found = rest

    # -- making ------------------------------------------------------------------------------------------

    def compile(self, wanted: list[Wanted]) -> None:
        """Capture and lower; what fails is refused with its reason. The host may cancel in between."""
        remember_in(self.engine.store.root)
        by_job = {}
        jobs = []
        for want in wanted:
            device = _device_of(want)
            size = sum(1 for _ in want.region.module.modules())
            capture_it = functools.partial(self._capture, want)
            job = Job(want.region.path, capture_it, self.engine.store, want.primary, device.type, size)
            by_job[id(job)] = want
            jobs.append(job)

        def done(job: Job) -> None:
            want = by_job[id(job)]
            if job.problem is not None:
                self._refuse(want, job.guards, job.problem)
                return
            self._adopt(want, job)

        with self.engine.apart():
            lower_all(jobs, self._options, self.engine.cancel, done)

    def _capture(self, wanted: Wanted) -> tuple[Captured, dict[str, Any]]:
        region = wanted.region
        weights, hidden, layers = None, None, region.layers
        if layers is not None:
            weights, hidden = layers.examples(region.slots.read(), _device_of(wanted)), layers.hidden()
        captured = capture(
            region.module, wanted.example, dynamic=self.engine.config.dynamic, weights=weights, hidden=hidden
        )
        return captured, manifest_of(captured, region.kind, *self.engine.made_for(region, _device_of(wanted)))

    def _adopt(self, wanted: Wanted, job: Job) -> None:
        entry = job.entry
        assert entry is not None
        region = wanted.region
        try:
            artefact = Artefact(entry.id, entry.primary, entry.manifest)
            artefact.entry = entry
            self._load_code(artefact, entry)
        except Exception as error:
            self._refuse(wanted, None, f"its artefact does not load: {named(error)}")
            return
        self.artefacts.setdefault(wanted.primary, []).append(artefact)
        self._made[wanted.primary] += 1
        _loaded[(str(self.engine.store.root), entry.id)] = artefact
        self._reported.add(entry.id)
        self.engine.report.compiled(region.path, entry.id, job.seconds)
        if wanted.why:
            self.engine.report.variant(region.path, wanted.why)
        if not entry.persistent:
            self.engine.report.note(f"artefacts last only as long as this process: {self.engine.store.problem}")

    # -- refusals ----------------------------------------------------------------------------------------

    def _refused(self, wanted: Wanted) -> Refusal | None:
        for check, reason in self.refusals.get(wanted.primary, ()):
            if check(wanted.flat.mappings):
                return check, reason
        if self._changing[_code_of(wanted)] >= _MOST_CHANGING and holds_objects(wanted.example.spec):
            return (lambda _: True), CHANGES_GIVEN
        return None

    def _refuse(self, wanted: Wanted, guards: list[list[Any]] | None, reason: str) -> None:
        check = checker(guards or [])
        self.refusals.setdefault(wanted.primary, []).append((check, reason))
        if reason == CHANGES_GIVEN:
            self._changing[_code_of(wanted)] += 1
        log.info("Nexfort: %s (%s) runs eager: %s", wanted.region.path, wanted.region.kind, reason)


def _nearer(one: Misfit | None, other: Misfit) -> Misfit:
    """Which of two misfits says more: first one of sizes, and of those one that a size of 1 does not explain."""
    if one is None:
        return other
    return max(other, one, key=lambda misfit: (misfit.sizes, misfit.sizes and not misfit.narrow))


def _why(wanted: Wanted, misfit: Misfit | None) -> str | None:
    """Why a region needs a further artefact; None if it has none yet."""
    if misfit is not None:
        return misfit.reason
    # the artefacts that it runs have another primary key
    return "it is called in another way: other arguments, dtypes or memory formats" if wanted.region.bindings else None


def _code_of(wanted: Wanted) -> str:
    kind = type(wanted.region.module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _device_of(wanted: Wanted) -> torch.device:
    given = [device for *_, device in wanted.example.tensors]
    return device_of(given + [weight.device for weight in wanted.region.slots.read()])
