# SPDX-License-Identifier: Apache-2.0
"""Region: the signature of a call -> its artefact -> the call; eager with a reason otherwise.

No tracing happens here and nothing is guessed: a call runs an artefact only if its structure, dtypes, memory formats,
sizes, options and the block's own attributes answer as they did at capture. The result of that search is remembered
for the exact sizes, and what can change between two calls of the same sizes (options, attributes, weights) is compared
every time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from ..cudagraphs.host_constants import unwatched
from ..guards.call_spec import Flat, flatten_call
from ..guards.callbacks import Strayed, raised_by, still_there
from ..guards.option_recorder import look
from ..modules.boundaries import OwnForward, uncapturable
from ..modules.channels_last import as_taken, holds_images, is_image
from ..modules.containers import OwnContainers, in_two_places
from ..modules.memory_format import Unsupported, normalised, tensor_meta
from ..modules.regions import RegionSpec
from ..modules.tree import PLAIN
from ..reporting.report import named
from ..runtime.artifact import Artefact, Binding
from ..runtime.engine_state import EngineState
from ..runtime.fault_attribution import UNSEEN, HalfDone, is_passed_on
from ..runtime.forward_context import ForwardContext
from ..runtime.lru_mapping import Recent
from ..runtime.shared_state import ForGood, Refusal
from ..system.process_group import others_speak
from ..system.torch_modes import current as current_modes
from ..system.torch_modes import fingerprint
from ..weights.lease import NO_PLACEHOLDERS
from ..weights.prepack_entry import PrepackEntry
from . import fallback
from .eager_reasons import unfit_modes
from .first_result import can_be_compared, differs
from .prepack_cache import prepack, prepack_for
from .region_weights import Ineligible, RegionWeights

log = logging.getLogger("nexfort")

MOST_SIZES = 512  # remembered combinations of sizes a region, those that it was called with last


class ArtifactProvider(Protocol):
    """Where a region gets an artefact from that it does not know yet."""

    def obtain(self, region: Region, key: Any, flat: Flat, session: ForwardContext) -> Binding | None:
        """A binding for this call, or None; `Planning.refused` says why. Raises Unsupported, Ineligible."""

    def take_back(self, refused: list[Any]) -> None:
        """Forget what was refused for a call: eager refuses the call as well."""

    def is_known_to_change(self, region: Region, spec: Any, flat: Flat) -> bool:
        """Whether there is an artefact for this call of a block that changes lists which it is given."""

    def withdraw(self, region: Region, spec: Any, flat: Flat, artefact: Artefact, reason: str) -> None:
        """Give an artefact to no call any more, and make none for calls like this one."""

    def lacked(self, session: ForwardContext) -> None:
        """There is none for this call. Raises HalfDone where the step has to begin anew."""


class Region:
    """One region of one model: finds the artefact for a call and runs it."""

    def __init__(
        self, state: EngineState, spec: RegionSpec, artifacts: ArtifactProvider, make_room: Callable[[], bool]
    ) -> None:
        """make_room: has others give back what they hold of the device. Whether they held anything."""
        self.state, self.path, self.kind = state, spec.path or "(whole module)", spec.kind
        self.module, self.inner = spec.module, spec.inner
        self.own_forward = OwnForward(spec.module)
        self._artifacts, self.make_room = artifacts, make_room
        # the backbone's own result lies as its code has it
        self.of_images = self.module is not state.root and holds_images(self.module)
        self.weights = RegionWeights(state, self.module, self.drop_artifacts)
        self.bindings: list[Binding] = []
        self.known: Recent[Any, list[Binding]] = Recent(MOST_SIZES)
        self._declined: Recent[Any, list[Refusal]] = Recent(MOST_SIZES)
        self.disabled_reason: str | None = None
        self._asked: Recent[Any, None] = Recent(MOST_SIZES)  # kinds of call for which it was asked whether it does
        self._containers: OwnContainers | None = None  # once it is known to change some
        self._modal = False  # the network's own code calls it under modes of torch other than the step's

    @property
    def changes(self) -> bool:
        """Whether it is known to change lists or mappings that it is given or holds."""
        return self.path in self.state.known.changing

    @property
    def is_split(self) -> bool:
        """Whether submodules below it are regions too, for calls of it that cannot be captured."""
        return self.path in self.state.known.split

    def changes_what_it_is_given(self) -> None:
        """From now on it is called so that changes reach its caller."""
        self.state.known.changing.add(self.path)

    def flatten(self, args: Any, kwargs: Any, flat: Flat) -> Any:
        """A call as its structure and leaves. Where it may change lists, its own containers are leaves as well."""
        spec = flatten_call(args, kwargs, flat)
        if flat.lists:
            if self._containers is None:
                self._containers = OwnContainers(self.module, self.state.besides)
            flat.add_own(*self._containers.now())
            if in_two_places(flat.mappings):  # what is put into one is read from the other
                raise Unsupported("a list or dictionary that stands in two places")
        return spec

    @property
    def images(self) -> bool:
        """Whether images that its artefacts take and give lie with channels innermost."""
        return self.of_images and self.state.images

    # -- the call ----------------------------------------------------------------------------------------

    def call(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], session: ForwardContext
    ) -> Any:
        """Run the block for one call. `plain` is the block's own forward."""
        if self.disabled_reason is not None:
            if self in session.doubted:
                return self._instead(plain, args, kwargs, session, self.disabled_reason)
            return self._eager(plain, args, kwargs, session, self.disabled_reason)
        if session.others_code.has_run:
            self.state.known.watched.look()
            session.others_code.note_names_seen()
        modes, now = session.modes, fingerprint()
        if now != session.fingerprint:  # by code between the blocks
            if reason := unfit_modes(self.state, args, kwargs):
                return self._eager(plain, args, kwargs, session, reason)
            modes = current_modes()
        elif self._modal:
            modes = current_modes()
        held, flat, lease, unseen = self.weights, Flat(lists=self.changes, root=self.module), None, ""
        try:
            spec = self.flatten(args, kwargs, flat)
            due = held.due()
            weights = [] if due else held.read()
            key = (spec, tuple(map(_size_key, flat.tensors)), tuple(flat.ints), flat.own, modes)
            binding = self._find(key, flat)
            if binding is None and not self._modal and current_modes() != modes:
                self._modal, key = True, (*key[:-1], current_modes())
                binding = self._find(key, flat)
            if binding is None:
                held.renew()
                due = held.due()
                with unwatched():
                    if not flat.lists and self._finds_changes(spec, args, kwargs):
                        return self.call(plain, args, kwargs, session)
                    binding = self._artifacts.obtain(self, key, flat, session)
                if binding is None and self.changes and not flat.lists:  # its capture showed it
                    session.planning.take_refusal()
                    return self.call(plain, args, kwargs, session)
                weights = [] if due else held.read()
            if session.missing.only_looked_for:
                binding, due = None, []
            kept = prepack_for(self, binding) if binding is not None and binding.prepares else None
            if due and binding is not None:
                weights, lease = held.acquire(due, flat.tensors, kept.placeholders if kept else NO_PLACEHOLDERS)
        except Unsupported as reason:
            if flat.lists:
                session.trace.note_lists()
            return self._eager(plain, args, kwargs, session, ForGood.of(f"it is called with {reason}"))
        except Ineligible as reason:
            return self._eager(plain, args, kwargs, session, str(reason))
        except Exception as error:
            if is_passed_on(error, self.state.hooks.stops()):
                raise
            unseen = UNSEEN.format(named(error))
        if unseen:
            return self._eager(plain, args, kwargs, session, unseen)
        if binding is None:
            key = _with_form(key, flat)
            flat.tensors.clear()  # eager code lets go of what lies in lists once it has put other tensors there
            self._artifacts.lacked(session)
            return self._refused(key, plain, args, kwargs, session)
        if lease is not None and not lease.kept:
            session.trace.note_fetched()
        is_new, strayed = binding.artefact.is_new, None
        try:
            try:
                result = self._run(binding, weights, kept, flat, plain, args, kwargs, session)
                if not is_new:
                    return result
            except Strayed as stray:
                strayed = stray.target, str(stray)
            if strayed is not None:  # not before the error is gone, which holds on to what the artefact had made
                target, why = strayed
                declined = self._declined.setdefault(_with_form(key, flat), [])
                declined.append((still_there(flat.mappings, self.module, target), why))
                return self._eager(plain, args, kwargs, session, why)
        finally:
            if lease is not None:
                lease.release()
        return self._compared(result, key[0], binding.artefact, flat, (plain, args, kwargs), session)

    def _compared(
        self, ours: Any, spec: Any, artefact: Artefact, flat: Flat, call: Any, session: ForwardContext
    ) -> Any:
        """The first result of an artefact, or eager's where that is another: no call uses the artefact then."""
        artefact.note_compared()
        if self.disabled_reason is not None or flat.lists or not can_be_compared(artefact, session):
            return ours
        result, reason = differs(artefact, ours, call, session, self.state, self.path)
        if reason:
            self._artifacts.withdraw(self, spec, flat, artefact, reason)
            self.state.report.eager(self.path, reason)
            session.trace.note_eager()
            session.trace.note_lost(self, ForGood.of(reason))
        return result

    def _finds_changes(self, spec: Any, args: Any, kwargs: Any) -> bool:
        """Whether artefacts that others left show that such blocks change lists which they are given; asked once."""
        if spec in self._asked:
            return False
        self._asked[spec] = None
        flat = Flat(lists=True, root=self.module)
        try:
            other = self.flatten(args, kwargs, flat)
            found = (flat.own or other != spec) and self._artifacts.is_known_to_change(self, other, flat)
        except Unsupported:  # of which the call itself makes nothing
            return False
        if found:
            self.changes_what_it_is_given()
        return self.changes

    def _find(self, key: Any, flat: Flat) -> Binding | None:
        for binding in dict.get(self.known, key) or self.known.get(key, ()):  # the first takes half the time
            if binding.usable(flat) and not (binding.artefact.sites and self._strays(key, flat)):
                return binding
        return None

    def _strays(self, key: Any, flat: Flat) -> bool:
        """Whether a function of the options is there that no artefact can follow; what is declined says why."""
        return any(check(flat.mappings) for check, _ in self._declined.get(_with_form(key, flat), ()))

    def _run(
        self,
        binding: Binding,
        weights: list[torch.Tensor],
        kept: PrepackEntry | None,
        flat: Flat,
        plain: Any,
        args: Any,
        kwargs: Any,
        session: ForwardContext,
    ) -> Any:
        artefact, trace, outcome, observation = binding.artefact, session.trace, session.outcome, session.observation
        if artefact.mutated and (reason := fallback.unfit_to_change(flat, artefact)):
            return self._eager(plain, args, kwargs, session, reason)
        self.state.hooks.cancel()  # the layers whose code would have asked for it are not run
        trace.used.append(binding)
        if artefact.images and not outcome.images:
            outcome.note_images()
        if artefact.others:
            trace.note_others()
            session.others_code.note_run()
        if artefact.changes:
            outcome.note_changed_lists()
        if (
            artefact.changes
            or artefact.by_modules
            or flat.own
            or (flat.lists and any(type(given) is list for given in flat.mappings))
        ):
            trace.note_lists()
        elif artefact.options:
            trace.looked_up.extend([look(flat.mappings, path) for path in artefact.options])
        tensors = list(map(as_taken if artefact.images else normalised, flat.tensors))
        try:
            if binding.prepares and kept is None:
                kept = prepack(self, binding, weights, session)
            run = partial(self._ran, binding, weights, flat, tensors, kept, session)
            if observation.watching is None or artefact.others:
                return run()
            with observation.watching.around(artefact, partial(getattr, observation.invariants, "answered", 0)):
                return run()
        except (torch.OutOfMemoryError, Strayed):
            raise  # of memory the host has remedies of its own: unloading, tiling
        except Exception as error:
            if session.observation.capturing:
                raise  # the capture is over, and the step runs region by region
            if (who := raised_by(error)) is not None:
                self._noted(error, f"by {who}")
                raise
            if artefact.groups or (artefact.boundaries and others_speak()):
                # other ranks have heard a part of it, and eager code would say that again
                self._noted(error, "which speaks with other processes; one of them may have failed")
                raise
            if self.weights.are_others():  # artefacts look at the sizes of what they are given before they do anything
                return self.call(plain, args, kwargs, session)
            reason = f"its compiled code failed: {named(error)}"
            whole = self.module is self.state.root
            if not whole and fallback.has_to_begin_anew(self.state, artefact, flat, tensors, session):
                self.disabled_reason = reason
                session.doubted.add(self)
                raise HalfDone(reason) from error
        # whatever it was, the step must complete; not before the error is gone, which holds what the artefact had made
        return self._instead(plain, args, kwargs, session, reason)

    def _ran(
        self,
        binding: Binding,
        weights: list[torch.Tensor],
        flat: Flat,
        tensors: Any,
        kept: PrepackEntry | None,
        session: ForwardContext,
    ) -> Any:
        invariants = session.observation.invariants
        if invariants is None:
            return binding.run(weights, flat, tensors, kept)
        # what is fetched may lie where others' weights did
        held, fits = self.weights, kept is not None or not binding.prepares
        settled = fits and not session.trace.fetched and held.version() is not None and not binding.artefact.groups
        whole = settled and binding.plain and not binding.artefact.others and held.are_covered(binding.artefact)
        return invariants.run(binding, weights, flat, tensors, kept, parts=settled, whole=whole)

    def release(self) -> bool:
        """Let go of prepared weights; they are made again when they are wanted. Whether there were any."""
        held = [binding for binding in self.bindings if binding.kept is not None]
        for binding in held:
            binding.let_go()
        if held:
            self.weights.forget_leases()
        return bool(held)

    def latch(self, reason: str) -> None:
        """Run the block eager from now on."""
        self.disabled_reason = ForGood.of(reason)
        self.state.report.eager(self.path, reason)
        log.warning("Nexfort: %s (%s) runs eager from now on; %s", self.path, self.kind, reason)

    def _eager(self, plain: Any, args: Any, kwargs: Any, session: ForwardContext, reason: str) -> Any:
        self.state.report.eager(self.path, reason)
        session.trace.note_lost(self, reason)
        return self.run_own_forward(plain, args, kwargs, session)

    def run_own_forward(
        self, plain: Any, args: Any, kwargs: Any, session: ForwardContext, *, in_parts: bool = True
    ) -> Any:
        """Run the block uncompiled. in_parts: regions below it stand in their places, where it is split."""
        session.trace.note_eager()
        session.others_code.note_run()
        if self.changes:
            session.outcome.note_changed_lists()
        before = session.enter_block(self.is_split and in_parts)
        try:
            return plain(*args, **kwargs)
        except Exception as error:
            self._noted(error, "which Nexfort ran uncompiled")
            raise
        finally:
            session.leave_block(before)

    def _instead(self, plain: Any, args: Any, kwargs: Any, session: ForwardContext, reason: str) -> Any:
        """Run the block eager in the place of an artefact that failed, and from now on where eager does not fail."""
        session.doubted.discard(self)
        self.disabled_reason = None
        result = self.run_own_forward(plain, args, kwargs, session)
        self.latch(reason)
        return result

    def _refused(self, key: Any, plain: Any, args: Any, kwargs: Any, session: ForwardContext) -> Any:
        """Run the block eager for want of an artefact. Where eager takes the call, the report has the reason."""
        reason, fresh = session.planning.take_refusal()
        try:
            result = self.run_own_forward(plain, args, kwargs, session)
        except Exception as error:
            if fresh and not is_passed_on(error, self.state.hooks.stops()):
                self._artifacts.take_back(fresh)
                self._declined.pop(key, None)
            raise
        if reason:
            self.state.report.eager(self.path, reason)
            session.trace.note_lost(self, reason)
        return result

    def _noted(self, error: BaseException, how: str) -> BaseException:
        """An error with a note of where it was raised."""
        if hasattr(error, "add_note") and not isinstance(error, self.state.hooks.stops()):  # Python 3.11
            error.add_note(f"It was raised in the block {self.path} ({self.kind}), {how}.")
        return error

    # -- what is known of it -----------------------------------------------------------------------------

    def drop_artifacts(self) -> None:
        """Forget every artefact: the module is not what it was."""
        self.bindings, self.known, self._declined = [], Recent(MOST_SIZES), Recent(MOST_SIZES)

    def bind(self, binding: Binding) -> None:
        """Use a binding from now on, in the place of another one of the same artefact."""
        self.bindings = [one for one in self.bindings if one.artefact is not binding.artefact] + [binding]

    def declined(self, key: Any, flat: Flat) -> str | None:
        """Why calls of these exact sizes with such mappings have no artefact, as far as that is known."""
        known = self._declined.get(_with_form(key, flat), ())
        return next((reason for check, reason in known if check(flat.mappings)), None)

    def decline(self, key: Any, flat: Flat, refusal: Refusal) -> None:
        """Remember why calls of these exact sizes have no artefact; it replaces what has the same reason."""
        key = _with_form(key, flat)
        others = [one for one in self._declined.get(key) or () if one[1] != refusal[1]]
        self._declined[key] = [*others, refusal]

    def remember(self, key: Any, binding: Binding) -> None:
        """Use a binding for calls of these exact sizes."""
        found = self.known.setdefault(key, [])
        if binding not in found:
            found.append(binding)

    def metas(self, flat: Flat, images: bool) -> list[tuple[str, int, str, str]]:
        """The tensors' part of the signature. Raises Unsupported."""
        found = [tensor_meta(t) for t in flat.tensors]
        if images:  # one artefact however they lie
            found = [(*m[:3], "l") if is_image(t) else m for t, m in zip(flat.tensors, found, strict=True)]
        return found

    def carries(self) -> str | None:
        """What keeps the block from being captured now."""
        return uncapturable(self.module)


def _with_form(key: Any, flat: Flat) -> Any:
    """A key of a call with what its lists hold, which decides whether there is an artefact for it."""
    return (*key, *map(_form, flat.mappings)) if flat.lists else key


def _form(value: Any) -> Any:
    if type(value) in (list, tuple):
        return (type(value), *map(_form, value))
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    return value if type(value) in PLAIN else type(value)


def _size_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous() or tensor.stride(), type(tensor))
