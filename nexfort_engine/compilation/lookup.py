# SPDX-License-Identifier: Apache-2.0
"""Finder: an artefact that fits a call, from memory or from the store; nothing is made here.

Candidates have the call's primary key. Of each the manifest has to hold before its code is loaded: the sources of the
host it was captured from, the driver, conditions on sizes and options, and the attributes of the block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch

from ..cache.key import driver_problem
from ..cache.os_errors import is_refusal
from ..cache.store import Entry, StoreError
from ..capture.backend_operators import cuda_missing
from ..capture.source_hashes import sources_changed
from ..capture.types import Example
from ..config.option_catalogue import NOT_MEASURED, OPTION_ROWS
from ..config.pass_catalogue import NEEDS, PASSES
from ..dispatch.region import Region
from ..guards import callbacks, collectives
from ..guards.call_spec import Flat
from ..guards.module_guards import matches_text
from ..guards.name_guards import Dependence
from ..guards.name_resolver import Row, classes_in
from ..guards.tensor_answers import Answers, fits
from ..kernels.gluon_support import kernels_missing
from ..kernels.low_precision_attention.op import slower
from ..lowering import inductor
from ..lowering.vec_isa_cache import remember_in
from ..modules.tree import Hidden, WeightSlots
from ..quant import card_figures, matmul
from ..reporting.report import named
from ..runtime.artifact import Artefact, Binding, GuardFailure
from ..runtime.devices import device_of
from ..runtime.engine_state import EngineState
from ..runtime.lru_mapping import Recent
from ..system.torch_modes import Values

log = logging.getLogger("nexfort")

_loaded: WeakValueDictionary[tuple[str, str], Artefact] = WeakValueDictionary()


@dataclass
class Wanted:
    """A region and a call it needs an artefact for."""

    region: Region
    primary: str
    example: Example
    flat: Flat
    images: bool = False  # whether it takes and gives images with channels innermost
    modes: Values = ()  # of torch, that shape what is made (system/torch_modes.py)
    structure: object = None  # of the region's weights, which `primary` names
    why: str | None = None  # why it needs a further one, for the report
    changing: Wanted | None = None  # the same call, where it may change lists that it is given or holds

    @property
    def device(self) -> torch.device:
        """Where the call runs."""
        given = [device for *_, device in self.example.tensors]
        return device_of(given + [weight.device for weight in self.region.weights.slots.read()])

    def answers(self) -> Answers:
        """What the call answers besides sizes."""
        module = self.region.module
        return replace(self.example.answers, own=lambda: WeightSlots(module).read())

    def is_stale(self) -> bool:
        """Whether the region's weights are others by now, so that what is captured would not fit `primary`."""
        return not self.region.weights.are_as(self.structure)

    def drop_data(self) -> None:
        """Keep the call without its data: sizes and options are all that the checks look at."""
        one = self.example
        tensors = [torch.empty_strided(s, st, dtype=dt, device="meta") for s, st, dt, _ in one.tensors]
        self.flat = Flat.of(tensors, one.ints, one.mappings, lists=one.changes, own=one.own)

    def explain(self, why: str | None) -> None:
        """Note why the region needs a further artefact."""
        self.why = why


def as_changing(found: Iterable[Wanted]) -> list[Wanted]:
    """Of calls whose capture showed that they change lists, how they are made from now on."""
    return [one.changing for one in found if one.changing is not None and one.region.changes]


_SIZES_SHOWN = 4  # tensors of a call whose sizes are kept for those who look through the store
MOST_NOTED = 4096


class Finder:
    """Finds the artefacts of one engine."""

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self._artefacts, self._reported = state.known.artefacts, state.known.reported
        self._dependences: dict[tuple[int, tuple[type, ...]], Dependence] = {}
        self._noted: Recent[tuple[str, str], None] = Recent(MOST_NOTED)  # artefacts, sizes that the store was told of
        self.inactive: dict[str, str] = {}  # passes for layers of a host's package that cannot run here: a note of each

    def bind(self, wanted: Wanted) -> tuple[Binding | None, GuardFailure | None]:
        """A binding from an artefact in memory or in the store, and why those that exist did not fit."""
        region = wanted.region
        for binding in region.bindings:
            same = binding.artefact.primary == wanted.primary and _answers(binding.artefact, wanted)
            if same and binding.artefact.guard_failure(wanted.flat) is None and binding.unchanged():
                return binding, None
        nearest: GuardFailure | None = None
        hidden = region.weights.hidden()
        for artefact in self._candidates(wanted):
            failure = guard_failure_of(artefact, wanted, hidden)
            names = self.dependence(artefact.names, region) if failure is None or failure.sizes else None
            if names is not None and not names.holds():
                failure = GuardFailure(f"{names.differs} is not what it was when the block was captured")
            if failure is not None:
                nearest = nearer(nearest, failure)
            elif self._has_code(artefact, wanted):
                binding = Binding(artefact, region.module, hidden, names)
                region.bind(binding)
                self.state.report.region(region.path, kind=region.kind, key=wanted.primary)
                info = artefact.entry.info if artefact.entry is not None else {}
                if info.get("products") or info.get("attention"):
                    self.state.report.precision(region.path, info.get("products", []), info.get("attention", []))
                for note in info.get("notes", []):
                    self.state.report.note(note)
                return binding, None
        return None, nearest

    def load_ahead(self, entry: Entry) -> None:
        """Load an artefact for the step that will ask for it. Raises what loading raises."""
        known = self._artefacts.setdefault(entry.primary, [])
        stale = sources_changed(entry.manifest.get("sources", {})) or driver_problem(entry.manifest.get("driver"))
        if stale or entry.id in (artefact.id for artefact in known):
            return
        artefact = self._described(entry)
        if artefact is None:
            return
        if artefact.code is None:
            with self.state.hooks.apart():
                self.load_code(artefact, entry)
            self.share(artefact, entry)
        known.append(artefact)

    def is_known(self, primary: str) -> bool:
        """Whether there are artefacts of a primary key."""
        return bool(self._artefacts.get(primary)) or bool(self.state.store.candidates(primary))

    def dependence(self, rows: Sequence[Row], region: Region) -> Dependence:
        """What code reaches by name, for a region; one for all regions of the same classes."""
        classes = classes_in(region.module)
        found = self._dependences.get((id(rows), classes))
        if found is None:  # it holds on to the rows, so that no others come to be known by their id
            found = self._dependences[id(rows), classes] = Dependence(rows, classes, self.state.known.watched)
        return found

    def _candidates(self, wanted: Wanted) -> Iterator[Artefact]:
        """The artefacts of this structure and call, those of the store without their code."""
        known = self._artefacts.setdefault(wanted.primary, [])
        yield from list(known)
        ids = {artefact.id for artefact in known}
        for entry in self.state.store.candidates(wanted.primary):
            if entry.id in ids:
                continue
            changed = sources_changed(entry.manifest.get("sources", {}))
            if changed:
                path = wanted.region.path
                self.state.report.note(f"an artefact of {path} is out of date: the source of {changed} changed")
                continue
            problem = driver_problem(entry.manifest.get("driver"))
            if problem:
                self.state.report.note(f"an artefact of {wanted.region.path} is not used: {problem}")
                continue
            artefact = self._described(entry)
            if artefact is not None:
                known.append(artefact)
                yield artefact

    def _described(self, entry: Entry) -> Artefact | None:
        shared = _loaded.get((str(self.state.store.root), entry.id))
        if shared is not None:
            return shared
        try:
            return Artefact(entry.id, entry.primary, entry.manifest, entry)
        except Exception as error:
            # a manifest that is sound by its hash and cannot be read all the same: its classes are not here
            self.state.store.set_aside(entry, named(error))
            return None

    def _has_code(self, artefact: Artefact, wanted: Wanted) -> bool:
        """Load the artefact's code if it is not there yet. False: it is damaged, and was set aside."""
        store, path = self.state.store, wanted.region.path
        if artefact.code is not None:
            if artefact.id not in self._reported:
                self._reported.add(artefact.id)
                self.state.report.loaded(path, artefact.id, 0.0)
                if artefact.entry is not None:
                    store.touch(artefact.entry)
            return True
        entry = artefact.entry
        assert entry is not None, "an artefact comes from this process or from the store"
        began = time.perf_counter()
        problem = None
        try:
            with self.state.hooks.apart():
                self.load_code(artefact, entry)
        except StoreError as error:
            problem = str(error)
        except Exception as error:
            # a file that is sound by its hashes and still does not load: another torch build, a missing operator
            problem = named(error)
            if is_refusal(error):  # nothing is wrong with the entry
                store.pass_over(entry, problem)
        if problem is not None:
            store.set_aside(entry, problem)
            self.state.report.note(f"an artefact of {path} is not used: {problem}")
            self._artefacts[artefact.primary].remove(artefact)
            return False
        store.touch(entry)
        self._reported.add(artefact.id)
        self.state.report.loaded(path, artefact.id, time.perf_counter() - began)
        self.share(artefact, entry)
        return True

    def load_code(self, artefact: Artefact, entry: Entry) -> None:
        remember_in(self.state.store.root)
        options = self.options("cuda" if torch.cuda.is_available() else "cpu")
        # a copy that only this process writes to, checked byte by byte before anything of it is loaded
        payload = self.state.store.ready(entry)
        if artefact.sites:
            callbacks.operator()
        if artefact.groups:
            collectives.operator()
        how = options, entry.manifest["modules"], len(artefact.weights)
        try:
            artefact.take_code(inductor.load(payload, *how))
        except OSError as error:  # there is no room for what is written on loading, say; there may be elsewhere
            if not is_refusal(error):
                raise
            log.info("Nexfort: %s is loaded from the temporary directory: %s", entry.id, error)
            artefact.take_code(inductor.load(self.state.store.ready(entry, elsewhere=True), *how))

    def withdraw(self, artefact: Artefact, reason: str) -> None:
        """Give an artefact to no call any more, in this process and in others."""
        artefact.withdraw()
        known = self._artefacts.get(artefact.primary, [])
        if artefact in known:
            known.remove(artefact)
        if (entry := artefact.entry) is not None:
            _loaded.pop((str(self.state.store.root), entry.id), None)
            self.state.store.set_aside(entry, reason)

    def note_sizes(self, artefact: Artefact, flat: Flat) -> None:
        """Tell the store which sizes an artefact served; once, although many blocks share it."""
        sizes = ", ".join("x".join(map(str, t.shape)) for t in flat.tensors[:_SIZES_SHOWN])
        if artefact.entry is not None and (artefact.id, sizes) not in self._noted:
            self._noted[artefact.id, sizes] = None
            self.state.store.note_shape(artefact.entry, sizes)

    def share(self, artefact: Artefact, entry: Entry) -> None:
        """Let other engines of this process use the code that this one has loaded."""
        _loaded[(str(self.state.store.root), entry.id)] = artefact

    def options(self, device_type: str) -> dict[str, object]:
        """Settings to lower and load with on "cpu" or "cuda"; the report says what of the config has no effect."""
        config, note = self.state.config, self.state.report.note
        options = self.state.lowering.lowering_options(device_type)
        if config.has("low-precision"):
            self._check_products(options, device_type)
        if device_type != "cuda":
            return options
        card, figures = torch.cuda.get_device_capability(), card_figures.of_cache(self.state.store.root)
        card_figures.use(figures)
        if figures is not None:
            options["nexfort.card"] = figures.as_dict()
        for one in PASSES:
            pays = None if figures is None or not one.tuned else getattr(figures, one.tuned)
            if pays is None:
                pays = not one.measured or (card in one.measured and torch.version.hip is None)
            if not pays and not config.option(one.option):
                options[one.switch] = False
        self._check_kernels(options, card)
        for name, missing in (("int8_linear", _int8_layers_missing), ("fp8_input", lambda: matmul.missing("cuda"))):
            if options[f"nexfort.{name}"] and (reason := missing()):
                options[f"nexfort.{name}"] = False
                self.inactive[name] = _not_active([f"fuse.{name}"], reason)
                if config.option(f"fuse.{name}"):  # else where a block has such layers (builder.py)
                    note(self.inactive[name])
        if options["nexfort.narrow_attention"] and (reason := slower()):
            note(f"attention in 8 bits is not by the fastest of its kernels: {reason}")
        return options

    def _check_kernels(self, options: dict[str, object], card: tuple[int, int]) -> None:
        """Leave out passes whose kernels cannot be called on this card; the report says so where they are missed."""
        for need, row in NEEDS.items():
            if not row.cards or (reason := kernels_missing(need, card)) is None:
                continue
            off = [one for one in PASSES if one.needs == need and options[one.switch]]
            options.update({one.switch: False for one in off})
            served = {one.option for one in PASSES if options[one.switch]}  # by another card's kernel
            asked = {one.option for one in off if card in row.cards or self.state.config.option(one.option)}
            if missed := [one.option for one in off if one.option in asked - served]:
                self.state.report.note(_not_active(missed, reason))

    def _check_products(self, options: dict[str, object], device_type: str) -> None:
        """Leave out low precision where the card has none of it; the report says so, and what nobody measured."""
        fp8, int8 = matmul.missing(device_type), matmul.missing(device_type, torch.int8)
        asked, note = self.state.config.is_on("quant.int8"), self.state.report.note
        missing = {"fp8": fp8, "int8": int8}
        options.update({one.switch: False for one in PASSES if missing.get(one.needs)})
        if asked and int8 is None:
            note(
                "products are computed in int8 (quant.int8), which nobody measured on such a card yet: compare with O2"
            )
        elif reason := int8 if asked else fp8:
            more = "" if int8 else '; {"quant.int8": true} in options computes them in int8, which nobody measured yet'
            note(f"low precision is not active: {reason}{more}")


def _not_active(options: Sequence[str], reason: str) -> str:
    """That options have no effect here, why, and what that costs as far as anybody measured it."""
    measured = [(name, OPTION_ROWS[name].gain) for name in options if OPTION_ROWS[name].gain != NOT_MEASURED]
    gains = "; ".join(f"{name} ({gain})" for name, gain in measured)
    text = f"{' and '.join(options)} {'is' if len(options) == 1 else 'are'} not active: {reason}"
    return f"{text}. Measured with and without: {gains}" if gains else text


def _int8_layers_missing() -> str | None:
    """Why layers in int8 of a host's files are not computed by kernels of the engine's own, or None."""
    return matmul.missing("cuda", torch.int8) or cuda_missing("int8_linear")


def guard_failure_of(artefact: Artefact, wanted: Wanted, hidden: Hidden) -> GuardFailure | None:
    """Why an artefact of the same primary key, whose code need not be there, may not serve a call; None if it may."""
    failure = artefact.guard_failure(wanted.flat)
    if (failure is None or failure.sizes) and not matches_text(wanted.region.module, artefact.reads, hidden):
        return GuardFailure("an attribute of the block differs from the captured one")
    if (failure is None or failure.sizes) and not _answers(artefact, wanted):
        return GuardFailure("its code asks its tensors for more than sizes, and the answer is another one")
    if failure is None and not artefact.speaks(wanted.region.module):
        return GuardFailure("the group of processes that it speaks with is another one")
    return failure


def _answers(artefact: Artefact, wanted: Wanted) -> bool:
    """Whether a call answers what an artefact's code asks besides sizes as it did at capture."""
    return not artefact.asked or fits(artefact.asked, wanted.answers(), wanted.region.module)


def nearer(one: GuardFailure | None, other: GuardFailure) -> GuardFailure:
    """Which of two guard failures says more: of sizes before others, of those one that has no other explanation."""
    return other if one is None else max(other, one, key=_says)


def _says(failure: GuardFailure) -> int:
    """The more, the less an artefact for the call would be one of a kind that there is not yet."""
    explained = (not failure.sizes, failure.narrow, failure.fixed, failure.parity)
    return next((place for place, by_that in enumerate(explained) if by_that), len(explained))
