# SPDX-License-Identifier: Apache-2.0
"""Region: the signature of a call -> its artefact -> the call; eager with a reason otherwise.

No tracing happens here and nothing is guessed: a call runs an artefact only if its structure, dtypes, memory formats,
sizes, options and the block's own attributes answer as they did at capture. The result of that search is remembered
for the exact sizes, and what can change between two calls of the same sizes (options, attributes, weights) is compared
every time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from ..cudagraphs.host_constants import unwatched
from ..guards.call_spec import Flat, flatten_call
from ..guards.callbacks import Strayed, raised_by, still_there
from ..guards.option_recorder import Refused, look, where
from ..modules.channels_last import as_taken, holds_images, is_image
from ..modules.memory_format import Unsupported, normalised, tensor_meta
from ..modules.regions import RegionSpec
from ..modules.tree import Hidden, Seen, WeightSlots, foreign, structure
from ..reporting.report import named
from ..runtime.artifact import Artefact, Binding
from ..runtime.devices import device_of, weight_problem
from ..runtime.fault_attribution import UNSEEN, HalfDone, is_passed_on
from ..runtime.lru_mapping import Recent
from ..runtime.shared_state import ForGood
from ..system.torch_modes import current as current_modes
from ..system.torch_modes import fingerprint
from ..weights.lease import NO_STAND_INS, Layers, Loan, NotLent, StandIns
from ..weights.prepack_entry import Kept
from ..weights.subclass_unwrap import Parts
from . import fallback
from .prepack_cache import kept_of, prepared

if TYPE_CHECKING:
    from ..engine import Engine
    from ..runtime.forward_context import Session

log = logging.getLogger("nexfort")

_DTYPE = attrgetter("dtype")  # `map` over it takes less than a comprehension, and there are dozens of weights
MOST_SIZES = 512  # remembered combinations of sizes a region, those that it was called with last


class Region:
    """One region of one model: finds the artefact for a call and runs it."""

    def __init__(self, engine: Engine, spec: RegionSpec) -> None:
        self.engine, self.path, self.kind = engine, spec.path or "(whole module)", spec.kind
        self.module, self.inner = spec.module, spec.inner
        # the backbone's own result lies as its code has it
        self.of_images = self.module is not engine.root and holds_images(self.module)
        self.slots = WeightSlots(self.module, engine.besides)
        self.bindings: list[Binding] = []
        self.known: Recent[Any, list[Binding]] = Recent(MOST_SIZES)
        self.declined: Recent[Any, list[tuple[Callable[[list[Any]], bool], str]]] = Recent(MOST_SIZES)
        self.latched: str | None = None
        self.modal = False  # the network's own code calls it under modes of torch other than the step's
        self._seen = Seen()
        self._dtypes: list[torch.dtype] = []
        self._device: torch.device | None = None
        self.parts: Parts | None = None  # how weights come apart that are not plain
        self._structure: list[Any] | None = None
        self._problem: str | None = None
        self._layers: Layers | None = None
        self._due: list[Any] = []
        self._sound: Loan | None = None  # what it lends is as artefacts want it, with the other weights as they are
        self._lent: dict[int, torch.dtype] = {}  # place among the weights -> dtype that it has on loan

    @property
    def images(self) -> bool:
        """Whether images that its artefacts take and give lie with channels innermost."""
        return self.of_images and self.engine.images

    # -- the call ----------------------------------------------------------------------------------------

    def call(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], session: Session) -> Any:
        """Run the block for one call. `plain` is the block's own forward."""
        if self.latched is not None:
            if self in session.doubted:
                return fallback.instead(self, plain, args, kwargs, session, self.latched)
            return self._eager(plain, args, kwargs, session, self.latched)
        if session.others_ran:
            self.engine.known.watched.look()
            session.others_ran = session.wary
        modes, now = session.modes, fingerprint()
        if now != session.fingerprint:  # by code between the blocks
            if reason := self.engine.unfit_modes(args, kwargs):
                return self._eager(plain, args, kwargs, session, reason)
            modes = current_modes()
        elif self.modal:
            modes = current_modes()
        flat, loan, unseen = Flat(), None, ""
        try:
            spec = flatten_call(args, kwargs, flat)
            due = self.due()
            weights = [] if due else self.weights()
            key = (spec, tuple(map(_size_key, flat.tensors)), tuple(flat.ints), modes)
            binding = self._find(key, flat)
            if binding is None and not self.modal and current_modes() != modes:
                self.modal, key = True, (*key[:-1], current_modes())
                binding = self._find(key, flat)
            if binding is None:
                self.renew()
                due = self.due()
                with unwatched():
                    binding = self.engine.builder.obtain(self, key, flat, session)
                weights = [] if due else self.weights()
            kept = kept_of(self, binding) if binding is not None and binding.prepares else None
            if due and binding is not None:
                weights, loan = self._borrow(due, flat.tensors, kept.stand_ins if kept else NO_STAND_INS)
        except Unsupported as reason:
            return self._eager(plain, args, kwargs, session, ForGood.of(f"it is called with {reason}"))
        except Ineligible as reason:
            return self._eager(plain, args, kwargs, session, str(reason))
        except Exception as error:
            if is_passed_on(error, self.engine.stops()):
                raise
            unseen = UNSEEN.format(named(error))
        if unseen:
            return self._eager(plain, args, kwargs, session, unseen)
        if binding is None:
            flat.tensors.clear()  # eager code lets go of what lies in lists once it has put other tensors there
            return fallback.refused(self, key, plain, args, kwargs, session)
        session.fetched |= loan is not None and not loan.kept
        try:
            try:
                return self._run(binding, weights, kept, flat, plain, args, kwargs, session)
            except Strayed as stray:
                path, why = stray.path, str(stray)
            # not before the error is gone, which holds on to what the artefact had made
            self.declined.setdefault(key, []).append((still_there(flat.mappings, path), why))
            return self._eager(plain, args, kwargs, session, why)
        finally:
            if loan is not None:
                loan.give_back()

    def _find(self, key: Any, flat: Flat) -> Binding | None:
        for binding in dict.get(self.known, key) or self.known.get(key, ()):  # the first takes half the time
            if binding.usable(flat) and not (binding.artefact.sites and self._strays(key, flat)):
                return binding
        return None

    def _strays(self, key: Any, flat: Flat) -> bool:
        """Whether a function of the options is there that no artefact can follow; what is declined says why."""
        return any(check(flat.mappings) for check, _ in self.declined.get(key, ()))

    def _run(
        self,
        binding: Binding,
        weights: list[torch.Tensor],
        kept: Kept | None,
        flat: Flat,
        plain: Any,
        args: Any,
        kwargs: Any,
        session: Session,
    ) -> Any:
        if binding.artefact.mutated and _shared(flat.tensors, binding.artefact):
            # compiled code reads and writes in an order of its own, which only separate tensors do not show
            reason = "a tensor that it changes shares memory with another of its arguments"
            return self._eager(plain, args, kwargs, session, reason)
        self.engine.cancel()  # the layers whose code would have asked for it are not run
        session.used.append(binding)
        session.images |= binding.artefact.images
        if binding.artefact.sites:
            session.others = session.others_ran = True
        if binding.artefact.options:
            session.looked_up += [look(flat.mappings, path) for path in binding.artefact.options]
        tensors = list(map(as_taken if binding.artefact.images else normalised, flat.tensors))
        try:
            if binding.prepares and kept is None:
                kept = prepared(self, binding, weights, session)
            run = partial(self._ran, binding, weights, flat, tensors, kept, session)
            if session.watching is None or binding.artefact.sites:
                return run()
            with session.watching.around(binding.artefact, partial(getattr, session.asides, "answered", 0)):
                return run()
        except (torch.OutOfMemoryError, Strayed):
            raise  # of memory the host has remedies of its own: unloading, tiling
        except Exception as error:
            if session.capturing:
                raise  # the capture is over, and the step runs region by region
            if (path := raised_by(error)) is not None:
                self._noted(error, f"by {where(path)}")
                raise
            if self._is_another():  # artefacts look at the sizes of what they are given before they do anything
                return self.call(plain, args, kwargs, session)
            reason = f"its artefact failed: {named(error)}"
            if fallback.failed(self, binding, flat, tensors, session):
                self.latched = reason
                session.doubted.add(self)
                raise HalfDone(reason) from error
        # whatever it was, the step must complete; not before the error is gone, which holds what the artefact had made
        return fallback.instead(self, plain, args, kwargs, session, reason)

    def _ran(
        self,
        binding: Binding,
        weights: list[torch.Tensor],
        flat: Flat,
        tensors: Any,
        kept: Kept | None,
        session: Session,
    ) -> Any:
        if session.asides is None:
            return binding.run(weights, flat, tensors, kept)
        # what is fetched may lie where others' weights did
        settled = not session.fetched and self.version() is not None and (kept is not None or not binding.prepares)
        whole = settled and binding.plain and not binding.artefact.sites and self._is_told(binding)
        return session.asides.run(binding, weights, flat, tensors, kept, parts=settled, whole=whole)

    def _is_told(self, binding: Binding) -> bool:
        """Whether the host says when anything changes that an artefact reads: not of buffers, nor of strengths."""
        own = self.slots.parameters
        lasting = own if self.parts is None else self.parts.each(own)
        return not binding.artefact.strengths and all(lasting[place] for place in binding.artefact.weights)

    def version(self) -> Any:
        """The host's word for its weights, unless a layer changes them by code of which the host says nothing."""
        return self.engine.version() if self._layers is None or self._layers.told else None

    def release(self) -> bool:
        """Let go of prepared weights; they are made again when they are wanted. Whether there were any."""
        held = [binding for binding in self.bindings if binding.kept is not None]
        for binding in held:
            binding.kept = None
        if held and self._layers is not None:
            self._layers.forget()  # it holds on to what stood in for weights
            self._sound = None
        return bool(held)

    def latch(self, reason: str) -> None:
        """Run the block eager from now on."""
        self.latched = ForGood.of(reason)
        self.engine.report.eager(self.path, reason)
        log.warning("Nexfort: %s (%s) runs eager from now on; %s", self.path, self.kind, reason)

    def _eager(self, plain: Any, args: Any, kwargs: Any, session: Session, reason: str) -> Any:
        self.engine.report.eager(self.path, reason)
        session.lost.append((self, reason))
        return self.inside(plain, args, kwargs, session)

    def inside(self, plain: Any, args: Any, kwargs: Any, session: Session) -> Any:
        session.ran_eager = session.others_ran = True
        session.inside, before = True, session.inside
        try:
            return plain(*args, **kwargs)
        except Exception as error:
            self._noted(error, "which Nexfort ran uncompiled")
            raise
        finally:
            session.inside = before

    def _noted(self, error: BaseException, how: str) -> BaseException:
        """An error with a note of where it was raised."""
        if hasattr(error, "add_note") and not isinstance(error, self.engine.stops()):  # Python 3.11
            error.add_note(f"It was raised in the block {self.path} ({self.kind}), {how}.")
        return error

    # -- what the module is now --------------------------------------------------------------------------

    @property
    def layers(self) -> Layers | None:
        """The layers whose weights the host may lend; None without such a host."""
        if self._layers is None and self.engine.lender is not None:
            self._layers = Layers(self.engine.lender, self.module, self.slots.names)
        return self._layers

    def due(self) -> list[Any]:
        """The layers whose weights have to be borrowed now. Raises Ineligible where no artefact may see them."""
        layers = self.layers
        try:
            due = layers.due() if layers is not None else []
        except NotLent as reason:
            raise Ineligible(str(reason)) from None
        if not due and not self._lent:
            return due
        raw = self.slots.read()
        changed = not self._seen.again(raw) or list(map(_DTYPE, raw)) != self._dtypes
        if changed or due is not self._due:
            self._sound = None
            lent = layers.dtypes(due, raw) if layers is not None else {}
            self._due = due
            if lent != self._lent:
                self._lent, self._structure = lent, None
                self.forget()
        if changed and due and layers is not None:
            layers.forget()
            self._inspect(raw)
        return due

    def _borrow(
        self, due: list[Any], tensors: list[torch.Tensor], stand_ins: StandIns = NO_STAND_INS
    ) -> tuple[list[torch.Tensor], Loan]:
        """The block's weights for a call with these tensors, those of the layers `due` on loan. Raises Ineligible."""
        raw, layers = self.slots.read(), self.layers
        assert layers is not None, "layers are due"
        device = device_of(t.device for t in itertools.chain(tensors, raw))
        kept = layers.again(due, device, stand_ins)
        if kept is not None and kept.loan is self._sound:
            return kept.given, kept.loan
        try:
            weights, loan = (kept.given, kept.loan) if kept is not None else layers.borrow(due, raw, device, stand_ins)
        except NotLent as reason:
            raise Ineligible(str(reason)) from None
        plain = self.parts.take(weights) if self.parts is not None else weights
        problem = weight_problem(plain) if plain is not None else "a weight comes back from the host as another kind"
        if problem is not None or plain is None:
            loan.give_back()
            raise Ineligible(problem)
        self._sound = loan if plain is weights else None
        return plain, loan

    @contextlib.contextmanager
    def resident_weights(self, tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The block's weights, those on loan included, for a call with these tensors. Raises Ineligible."""
        due = self.due()
        weights, loan = self._borrow(due, tensors) if due else (self.weights(), None)
        try:
            yield weights
        finally:
            if loan is not None:
                loan.give_back()

    def hidden(self) -> Hidden:
        """What a copy of the block shows in the place of its own attributes, so that it is taken for resident."""
        return self.layers.hidden() if self.layers is not None else {}

    def weights(self) -> list[torch.Tensor]:
        """The tensors of the block as they are now, checked. Raises Ineligible where no artefact may see them."""
        weights = self.slots.read()
        if (
            not self._seen.again(weights)
            or list(map(_DTYPE, weights)) != self._dtypes
            or (weights and (weights[0].device != self._device or weights[-1].device != self._device))
        ):
            self._inspect(weights)
            weights = self.slots.read()
        if self._problem is not None:
            raise Ineligible(self._problem)
        return weights if self.parts is None else self._apart(weights)

    def _is_another(self) -> bool:
        """Whether weights got other sizes or strides in their place, as by `weight.data = ...`; no call looks at it."""
        before = self.structure()
        self._inspect(self.slots.read())
        return self.structure() != before

    def _apart(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The plain tensors that the weights hold. Raises Ineligible."""
        for _ in range(2):
            plain = self.parts.take(weights) if self.parts is not None else weights
            if plain is not None:
                return plain
            self._inspect(weights)  # a weight was changed in its place: another scale or layout
            if self._problem is not None:
                raise Ineligible(self._problem)
        raise Ineligible("a weight that is not a plain tensor changes while it is looked at")

    def _inspect(self, weights: list[torch.Tensor]) -> None:
        if self._has_others():
            weights = self.slots.read()
        try:
            self.parts = Parts.of(weights)
            plain = self.parts.take(weights) if self.parts is not None else weights
            self._problem = weight_problem(plain) if plain is not None else None
        except Refused as reason:
            self.parts, self._problem = None, str(reason)
        before = self._structure
        self._structure = None
        if self._problem is None or self.engine.lender is not None:
            self._seen, self._dtypes = Seen(weights), [w.dtype for w in weights]
            self._device = weights[0].device if weights else None
            if before is not None and self.structure() != before:
                self.forget()

    def renew(self) -> None:
        """Find the weights anew: a submodule may have been exchanged, and the new one has tables of its own."""
        if self._has_others():
            self._inspect(self.slots.read())

    def _has_others(self) -> bool:
        """Whether the weights lie elsewhere than before; then they are found there, and what was known is not asked.

        An artefact that is known for a submodule that comes back would be given the weights of the one that left.
        """
        slots = WeightSlots(self.module, self.engine.besides)
        if [(id(table), name) for table, name in slots.slots] == [(id(t), n) for t, n in self.slots.slots]:
            return False
        self.slots, self._layers = slots, None
        self.forget()
        return True

    def forget(self) -> None:
        """Forget every artefact: the module is not what it was."""
        self.bindings, self.known, self.declined = [], Recent(MOST_SIZES), Recent(MOST_SIZES)

    def structure(self) -> list[Any]:
        """Classes and weights of the block's tree, and the strides of weights that are not contiguous."""
        if self._structure is None:
            weights = self.slots.read()
            plain = (self.parts.take(weights) if self.parts is not None else None) or weights
            strides = [list(w.stride()) if not w.is_contiguous() else 0 for w in plain]
            self._structure = [structure(self.module, self._lent, self.engine.besides), strides]
            if self.parts is not None:
                self._structure.append(self.parts.text)
        return self._structure

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
        """Hooks and the like that keep the block from being captured or replaced now."""
        return foreign(self.module)


class Ineligible(Exception):
    """The block cannot run an artefact now. The text is the reason."""


def _shared(tensors: list[torch.Tensor], artefact: Artefact) -> bool:
    """Whether a tensor that the artefact changes lies in the memory of another one."""
    places = [t.untyped_storage().data_ptr() for t in tensors]
    return any(places.count(places[artefact.tensors[i]]) > 1 for i in artefact.mutated)


def _size_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous() or tensor.stride(), type(tensor))
