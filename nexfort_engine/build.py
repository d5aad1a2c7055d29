# SPDX-License-Identifier: Apache-2.0
"""Builder: from a call no artefact is known for, to a binding. Finds in the store, plans, captures, lowers, loads.

Planning: the first time something is missing, the backbone is run once eagerly beside the real call, at batch 2 where
the call has batch 1, to learn what every region is called with. Then all that is missing is captured and lowered
together, with one progress bar. At batch 2 a batch dimension cannot be mistaken for a constant of 1, and an artefact
made there serves every batch.

Everything here runs under one process-wide lock, off the path of calls whose artefact is known.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from . import lower, readset
from .artefact import Artefact, Binding, manifest_of
from .cache.key import environment_parts, primary_key
from .cache.store import Entry
from .capture import LOCK, Captured, Example, capture, spec_key
from .cpu_probe import remember_in
from .dispatch import Ineligible, Region
from .lowering import Job, lower_all
from .modulestate import matches_text
from .signature import Flat, Unsupported, flatten_call, normalised
from .sources import sources_changed

if TYPE_CHECKING:
    from .engine import Engine
    from .session import Session

log = logging.getLogger("nexfort")

MOST_VARIANTS = 8  # artefacts of one structure and call; past that something changes on every run
_loaded: WeakValueDictionary[tuple[str, str], Artefact] = WeakValueDictionary()


@dataclass
class Wanted:
    """A region and a call it needs an artefact for."""

    region: Region
    primary: str
    example: Example
    flat: Flat


class Builder:
    """Makes and finds the artefacts of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.artefacts: dict[str, list[Artefact]] = {}
        self.refusals: dict[str, list[tuple[Callable[[list[Any]], bool], str]]] = {}
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
            wanted = self._wanted(region, key[0], flat)
            binding, misfit = self._bind(wanted)
            if binding is None and not session.planned and self._refused(wanted) is None:
                self._plan(session)
                binding, again = self._bind(wanted)
                misfit = again if misfit is None else misfit
            if binding is None and self._refused(wanted) is None:
                binding = self._make(wanted, misfit)
        if binding is not None:
            region.remember(key, binding)
            return binding
        refusal = self._refused(wanted) or (lambda _: True, "no artefact fits this call")
        region.declined.setdefault(key, []).append(refusal)
        self.engine.report.eager(region.path, refusal[1])
        return None

    def _make(self, wanted: Wanted, misfit: str | None) -> Binding | None:
        """One artefact of its own for this very call."""
        known = self.artefacts.get(wanted.primary, [])
        if len(known) >= MOST_VARIANTS:
            self._refuse(
                wanted, None, f"it has {MOST_VARIANTS} variants already; what it depends on keeps changing: {misfit}"
            )
            return None
        self.compile([wanted])
        binding, _ = self._bind(wanted)
        if binding is not None and misfit:
            self.engine.report.variant(wanted.region.path, misfit)
        return binding

    def _wanted(self, region: Region, spec: Any, flat: Flat) -> Wanted:
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
            device = str((weights or flat.tensors)[0].device)
            parts = {
                "environment": environment_parts(device),
                "config": self.engine.config.lowering_key(),
                "structure": structure,
                "call": spec_key(spec, flat, metas),
            }
            found = self._primaries[place] = (structure, primary_key(parts))
        return found[1]

    # -- what is there -----------------------------------------------------------------------------------

    def _bind(self, wanted: Wanted) -> tuple[Binding | None, str | None]:
        """A binding from an artefact in memory or in the store, and why those that exist did not fit."""
        region, misfit = wanted.region, None
        for binding in region.bindings:
            same = binding.artefact.primary == wanted.primary
            if same and binding.artefact.broken_by(wanted.flat) is None and binding.state.unchanged():
                return binding, None
        for artefact in self._candidates(wanted):
            reason = artefact.broken_by(wanted.flat)
            if reason is None and not matches_text(region.module, artefact.reads):
                reason = "an attribute of the block differs from the captured one"
            if reason is None and artefact.code is None:
                continue
            if reason is not None:
                misfit = reason
                continue
            binding = Binding(artefact, region.module)
            region.bindings = [b for b in region.bindings if b.artefact is not artefact] + [binding]
            self.engine.report.region(region.path, kind=region.kind, key=wanted.primary)
            return binding, None
        return None, misfit

    def _candidates(self, wanted: Wanted) -> Any:
        known = self.artefacts.setdefault(wanted.primary, [])
        yield from list(known)
        ids = {artefact.id for artefact in known}
        for entry in self.engine.store.candidates(wanted.primary):
            if entry.id not in ids:
                artefact = self._load(entry, wanted)
                if artefact is not None:
                    known.append(artefact)
                    yield artefact

    def _load(self, entry: Entry, wanted: Wanted) -> Artefact | None:
        """An entry of the store as an artefact with its code, if it is sound and made for this call."""
        store, region = self.engine.store, wanted.region
        shared = _loaded.get((str(store.root), entry.id))
        if shared is not None:
            self.engine.report.loaded(region.path, entry.id, 0.0)
            return shared
        changed = sources_changed(entry.manifest.get("sources", {}))
        if changed:
            self.engine.report.note(f"an artefact of {region.path} is out of date: the source of {changed} changed")
            return None
        began = time.perf_counter()
        try:
            artefact = Artefact(entry.id, entry.primary, entry.manifest)
            if artefact.broken_by(wanted.flat) is not None or not matches_text(region.module, artefact.reads):
                return None  # made for other sizes or options: left alone until it is needed
            problem = entry.verify()
            if problem is None:
                self._load_code(artefact, entry)
        except Exception as error:
            # a file that is sound by its hashes and still does not load: another torch build, a missing operator
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            store.set_aside(entry, problem)
            return None
        store.touch(entry)
        self.engine.report.loaded(region.path, entry.id, time.perf_counter() - began)
        _loaded[(str(store.root), entry.id)] = artefact
        return artefact

    def _load_code(self, artefact: Artefact, entry: Entry) -> None:
        remember_in(self.engine.store.root)
        options = self._options("cuda" if torch.cuda.is_available() else "cpu")
        artefact.code = lower.load(entry.payload, options, entry.manifest["modules"], len(artefact.weights))

    def _options(self, device_type: str) -> dict[str, object]:
        return self.engine.config.inductor_options(device_type)

    # -- planning ----------------------------------------------------------------------------------------

    def _plan(self, session: Session) -> None:
        """Learn every region's call from one eager run beside the real one, and make all that is missing."""
        session.planned = True
        if session.root is None or not self.engine.config.dynamic:
            return
        call, args, kwargs = session.root
        args, kwargs = self.engine.plain_call(args, kwargs)
        wants_two = _batch_of(args, kwargs) == 1
        args, kwargs = _of_its_own(args, wants_two), _of_its_own(kwargs, wants_two)
        try:
            found = self._observe(call, args, kwargs)
        except torch.OutOfMemoryError:
            self.engine.report.note("there was no memory to plan ahead; regions are compiled one by one")
            return
        except Exception as error:
            # the probe is a convenience: without it the regions are captured one by one at the sizes of the call
            log.debug("Nexfort: planning failed", exc_info=True)
            self.engine.report.note(f"planning ahead failed ({type(error).__name__}: {str(error)[:200]})")
            return
        self._make_all(found)

    def _observe(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Wanted]:
        root = self.engine.root
        region = next((r for r in self.engine.regions if r.module is root), None)
        if region is not None:
            flat = Flat()
            return [self._wanted(region, flatten_call(args, kwargs, flat), flat)]
        devices = sorted({p.device for p in root.parameters() if p.device.type == "cuda"}, key=str)
        with torch.random.fork_rng(devices=[d.index for d in devices]), self.engine.active(recording=True) as session:
            call(*args, **kwargs)
        return session.examples

    def record(self, region: Region, plain: Any, args: Any, kwargs: Any, session: Session) -> Any:
        """Note what a region is called with, and run it eagerly."""
        flat = Flat()
        try:
            spec = flatten_call(args, kwargs, flat)
            region.weights()
            if region.latched is None and region.carries() is None:
                wanted = self._wanted(region, spec, flat)
                wanted.flat = _ghost(wanted.example)
                session.examples.append(wanted)
        except (Unsupported, Ineligible) as reason:
            log.debug("Nexfort: %s is not planned: %s", region.path, reason)
        return region._inside(plain, args, kwargs, session)

    def _make_all(self, found: list[Wanted]) -> None:
        """Compile what cannot be bound. Equal structures in turn: the second may bind to what the first gave."""
        while found:
            wave: dict[str, Wanted] = {}
            rest = []
            for wanted in found:
                if self._refused(wanted) is not None or self._bind(wanted)[0] is not None:
                    continue
                if wanted.primary in wave:
                    rest.append(wanted)
                elif len(self.artefacts.get(wanted.primary, [])) < MOST_VARIANTS:
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
            weights = want.region.slots.read()
            device = want.example.tensors[0][3] if want.example.tensors else weights[0].device
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

        lower_all(jobs, self._options, self.engine.cancel, done)

    def _capture(self, wanted: Wanted) -> tuple[Captured, dict[str, Any]]:
        region = wanted.region
        captured = capture(region.module, wanted.example, dynamic=self.engine.config.dynamic)
        return captured, manifest_of(captured, region.path, region.kind)

    def _adopt(self, wanted: Wanted, job: Job) -> None:
        entry = job.entry
        assert entry is not None
        region = wanted.region
        try:
            artefact = Artefact(entry.id, entry.primary, entry.manifest)
            self._load_code(artefact, entry)
        except Exception as error:
            self._refuse(wanted, None, f"its artefact does not load: {type(error).__name__}: {error}")
            return
        self.artefacts.setdefault(wanted.primary, []).append(artefact)
        _loaded[(str(self.engine.store.root), entry.id)] = artefact
        self.engine.report.compiled(region.path, entry.id, job.seconds)
        if not entry.persistent:
            self.engine.report.note(f"artefacts last only as long as this process: {self.engine.store.problem}")

    # -- refusals ----------------------------------------------------------------------------------------

    def _refused(self, wanted: Wanted) -> tuple[Callable[[list[Any]], bool], str] | None:
        for check, reason in self.refusals.get(wanted.primary, ()):
            if check(wanted.flat.mappings):
                return check, reason
        return None

    def _refuse(self, wanted: Wanted, guards: list[list[Any]] | None, reason: str) -> None:
        check = readset.checker(guards or [])
        self.refusals.setdefault(wanted.primary, []).append((check, reason))
        log.info("Nexfort: %s (%s) runs eager: %s", wanted.region.path, wanted.region.kind, reason)


def _ghost(example: Example) -> Flat:
    """The example's call without its data: sizes and options are all that the checks look at."""
    flat = Flat()
    flat.tensors = [torch.empty_strided(s, st, dtype=dt, device="meta") for s, st, dt, _ in example.tensors]
    flat.ints, flat.mappings = example.ints, example.mappings
    return flat


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The batch of a call: the first size of its first tensor that has one; 0 if there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            return value.shape[0]
    return 0


def _of_its_own(value: Any, twice: bool) -> Any:
    """A call with tensors of its own, which the network may change. `twice`: at batch 2 where the call has batch 1."""
    if isinstance(value, torch.Tensor):
        return torch.cat([value, value]) if twice and value.ndim > 0 and value.shape[0] == 1 else value.clone()
    if type(value) in (list, tuple):
        return type(value)(_of_its_own(v, twice) for v in value)
    if isinstance(value, dict):
        return {k: _of_its_own(v, twice) for k, v in value.items()}
    return value
