# SPDX-License-Identifier: Apache-2.0
"""Engine: one backbone with one config. It stands its regions in the blocks' places for the length of a call.

What it knows between calls is here: regions, artefacts, the report, what is held of the device.
dispatch/forward_shim.py has what stands in a block's place.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .attention.tuner import Told, asking
from .cache.key import driver_needed, environment_parts, fingerprint, machine, primary_key
from .cache.store import Store
from .capture.reached_names import assigns_names
from .capture.side_effects import tensors_held
from .compilation.builder import Builder
from .compilation.support import OLDEST, NotNow, torch_version, unsupported
from .config.compile_config import CompileConfig
from .cudagraphs.host_constants import tensors_in
from .cudagraphs.step_graphs import StepGraphs
from .dispatch.compiled_share import Worth
from .dispatch.forward_shim import leave, stand_in
from .dispatch.prepack_cache import hold_once, spared
from .dispatch.recovery import remedy, written_to
from .dispatch.region import Region
from .dispatch.slowdown import Promise
from .dispatch.verify import Verifier
from .guards.call_spec import of_its_own
from .lowering import worker_pool
from .lowering.preload import import_ahead, import_tracing_ahead
from .modules.channels_last import lie_innermost, outermost
from .modules.regions import RegionSpec, Seats, beyond, find_regions
from .modules.tree import Slot, own_foreign, structure
from .reporting.report import Report, named
from .reporting.resource_shortages import begun, told
from .runtime.artifact import Binding
from .runtime.engine_state import EngineState, HostHooks
from .runtime.fault_attribution import UNSEEN, is_passed_on
from .runtime.forward_context import Instead, Session, entered
from .runtime.shared_state import Known
from .system import compiler_processes, heap_trim, torch_modes
from .system.process_settings import backend_scope, disabled
from .weights.lease import Lender

log = logging.getLogger("nexfort")

Coming = list[tuple["Engine", Callable[..., Any], tuple[Any, ...]]]
Then = Callable[[tuple[Any, ...], dict[str, Any]], contextlib.AbstractContextManager[Coming]]

_alive: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Regions, artefacts and the report of one backbone under one config.

    name: what the report calls it; the backbone's class if the host has no name.
    whole: it is called through its forward alone, so it may be one region.
    lender: where the host keeps weights elsewhere; they are borrowed for each call.
    known: what engines of networks alike share, where a host makes its network anew for each run.
    report: one that exists already, for the same networks.
    hooks: what is asked of the host.
    """

    def __init__(
        self,
        root: nn.Module,
        config: CompileConfig,
        store: Store,
        *,
        name: str = "",
        whole: bool = True,
        lender: Lender | None = None,
        known: Known | None = None,
        report: Report | None = None,
        hooks: HostHooks | None = None,
    ) -> None:
        self.state = EngineState(
            root, config, store, name=name, lender=lender, known=known, report=report, hooks=hooks
        )
        self.whole = whole
        self.then: Then = lambda args, kwargs: contextlib.nullcontext([])
        self.builder = Builder(self)
        self.worth = Worth(self, self.known.off)
        self.promise = Promise(self.state, graphs=config.step_graphs)
        self._table: dict[int, Region] | None = None
        self._placed: list[tuple[RegionSpec, Region]] = []
        self.sets_names = False  # code between the blocks assigns what blocks may read by name
        self._seats: Seats | None = None  # where their blocks are in the backbone
        self.graphs = StepGraphs(self.state, self._blocks, self.spared) if config.step_graphs else None
        self._off: str | None = None
        self._innermost: bool | None = None  # whether the backbone's own weights lie so
        self._verify_due = False
        self._model_keys: dict[str, str] = {}
        self._sessions: set[Session] = set()  # that are under way
        _alive.add(self)

    @property
    def root(self) -> nn.Module:
        """The backbone."""
        return self.state.root

    @property
    def name(self) -> str:
        """What the report calls it."""
        return self.state.name

    @property
    def config(self) -> CompileConfig:
        """What the user asked for."""
        return self.state.config

    @property
    def store(self) -> Store:
        """Where its artefacts are kept."""
        return self.state.store

    @property
    def report(self) -> Report:
        """What happened."""
        return self.state.report

    known = property(lambda self: self.state.known)
    lender = property(lambda self: self.state.lender)
    besides = property(lambda self: self.state.besides)
    lowering = property(lambda self: self.state.lowering)
    cancel = property(lambda self: self.state.hooks.cancel)
    stops = property(lambda self: self.state.hooks.stops)
    apart = property(lambda self: self.state.hooks.apart)
    plain_call = property(lambda self: self.state.hooks.plain_call)
    others_code = property(lambda self: self.state.hooks.others_code)
    also = property(lambda self: self.state.hooks.also)
    images = property(lambda self: self.state.images, lambda self, on: self.state.lay_images(on))
    keeps = property(lambda self: self.state.keeps, lambda self, _: self.state.stop_keeping())
    held_twice = property(lambda self: self.state.held_twice, lambda self, on: self.state.hold_twice(on))
    version = property(lambda self: self.state.version)
    room = property(lambda self: self.state.room)
    frees = property(lambda self: self.state.frees)
    unquiet = property(lambda self: self.state.unquiet)
    is_quiet = property(lambda self: self.state.is_quiet)

    def _blocks(self) -> list[nn.Module]:
        return [region.module for region in self.regions]

    @property
    def regions(self) -> list[Region]:
        """The regions, found on first use."""
        return list(self._regions().values())

    def _regions(self) -> dict[int, Region]:
        if self._table is None:
            specs = find_regions(self.root, whole=self.whole)
            # a region whose block stayed where it is keeps what it knows
            known = {(spec.path, id(region.module)): region for spec, region in self._placed}
            found = [(spec, known.get((spec.path, id(spec.module))) or Region(self, spec)) for spec in specs]
            self._placed, self._seats = found, Seats(self.root, [spec.path for spec in specs])
            self._table = {id(spec.module): region for spec, region in found}
            inside = {id(sub) for spec in specs for sub in spec.module.modules()}
            own = {type(sub) for sub in self.root.modules() if id(sub) not in inside or sub is self.root}
            self.sets_names = any(map(assigns_names, own))
            if not self._table:
                self.report.note("no region: the module holds no weights; it runs as it is")
            for path, kind in beyond(self.root):
                self.report.eager(path, f"this {kind} lies in a plain object, where no region is looked for")
        return self._table

    @property
    def whole_region(self) -> Region | None:
        """The region that is the backbone as a whole; None where it has several."""
        return self._regions().get(id(self.root))

    def prepare(self, device: torch.device) -> None:
        """Start what the first step will need while the host still loads the model; nothing is compiled yet.

        device: where the model will run. What the store has for this model is made ready to load; where it has nothing,
            workers are started.
        """
        try:
            import_ahead()
            self.worth.anew()
            if torch_version() < OLDEST or device.type not in ("cpu", "cuda"):
                return
            there = self.stored(device)
            if there:
                begun("nexfort-ahead", self.store.ahead, there)  # or the first step makes them ready
            else:
                import_tracing_ahead()
                worker_pool.expect(device.type, self.store.root)
        except worker_pool.NoWorkers as error:
            self.report.note(f"no workers were started ahead: {error}")
        except OSError as error:
            self.report.note(f"nothing was made ready for the first step: {told(error)}")

    def stored(self, device: torch.device) -> list[str]:
        """The primary keys of what the store has for this backbone on a device."""
        key = self.model_key(device)
        return [row["primary"] for row in self.store.rows() if row["info"].get("model") == key]

    def model_key(self, device: torch.device) -> str:
        """A key of this backbone's classes, shapes and config on one kind of device."""
        if device.type not in self._model_keys:
            parts = {
                "environment": environment_parts(str(device)),
                "config": self.lowering.lowering_key(),
                "structure": structure(self.root, besides=self.besides),
            }
            self._model_keys[device.type] = primary_key(parts)
        return self._model_keys[device.type]

    def made_for(self, region: Region, device: torch.device) -> tuple[int | None, dict[str, Any]]:
        """For an artefact's manifest: the oldest driver that runs it, and what people want to know of its origin."""
        where = str(device)
        info = {"region": region.path, "family": self.name, "model": self.model_key(device)}
        return driver_needed(where), {**info, "machine": machine(where), "fingerprint": fingerprint(where)}

    def is_block(self, region: Region) -> bool:
        """Whether a region is one of the blocks that make a step long: one of several alike, or all there is."""
        return region.module is self.root or sum(other.kind == region.kind for other in self.regions) > 1

    def refresh(self) -> None:
        """Find the regions anew: submodules were exchanged."""
        self.worth.anew()
        self._table = self._innermost = None

    def spared(self, used: list[Binding]) -> list[Slot]:
        """Weights that a step which used these bindings does not need as they are, because it has them prepared."""
        ids = {id(binding) for binding in used}
        found, needed = [], set()
        for region in self.regions:
            without = spared(region, ids)
            for place, (table, name) in enumerate(region.slots.slots):
                if place in without:
                    found.append((table, name))
                else:
                    needed.add((id(table), name))
        return [(table, name) for table, name in found if (id(table), name) not in needed]

    def look(self, run: object) -> None:
        """Have the host see whether weights changed without a word, once for each run; None: it has no name."""
        if self.lender is not None:
            self.lender.look(run)

    def is_busy_elsewhere(self) -> bool:
        """Whether the backbone is in another step than this thread's, of whichever engine."""
        others = [other for other in list(_alive) if other.root is self.root and other is not self]
        return len(self._sessions) > 1 or any(other._sessions for other in others)

    def release(self) -> bool:
        """Give back what is held of the device between steps, to be made again when wanted. Whether there was any."""
        if self.lender is not None:
            self.lender.stay()
        graphs = self.graphs is not None and bool(self.graphs.release())
        return any([region.release() for region in (self._table or {}).values()]) or graphs

    def others_give_way(self) -> bool:
        """Have engines that are in no step now give back what they hold. Whether one held anything."""
        return any([other.give_way() for other in list(_alive) if other is not self])

    def give_way(self) -> bool:
        """As `release`, unless a step is under way, which may be a graph that reads what is held."""
        with self.graphs.idle() if self.graphs is not None else contextlib.nullcontext(True) as is_idle:
            return is_idle and self.release()

    # -- running -----------------------------------------------------------------------------------------

    def call(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the backbone: `plain` is its own forward. Regions are in place for the length of the call."""
        try:
            reason = self.passes(args, kwargs)
            if reason is None and self.steps_aside(plain, args, kwargs):
                reason = ""
        except Exception as error:  # an argument's own code
            reason = UNSEEN.format(named(error))
        if reason is not None:
            if not reason:
                return self.promise.without(plain, args, kwargs)
            self.report.eager("(whole module)", reason)
            return plain(*args, **kwargs)
        return self._called(plain, args, kwargs)

    def steps_aside(self, plain: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call runs as it would without this engine, because too little of it can be compiled.

        plain: the method that is called, where the host calls several.
        """
        return not self._verify_due and self.worth.is_off(plain, args, kwargs)

    def uncounted(
        self, plain: Callable[..., Any], args: Any, kwargs: Any, *, graphs: bool, names: Iterable[Hashable] = ()
    ) -> Any:
        """One more step that nobody asked for; the report does not count it.

        graphs: it may be replayed as one. names: of its arguments' tensors, as in Session, None where one has none.
        """
        return self._called(plain, args, kwargs, counted=False, graphs=graphs, names=names)

    def _called(
        self,
        plain: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        counted: bool = True,
        graphs: bool = True,
        names: Iterable[Hashable] = (),
    ) -> Any:
        with self.active(counted=counted) as session:
            session.asked = (plain, args, kwargs) if counted else None
            self._notes(session, plain, args, kwargs)
            named_ = zip(tensors_in((args, kwargs)) if names else (), names, strict=False)
            session.lasting = {id(tensor): (tensor, name) for tensor, name in named_ if name is not None}
            return self._step(self._through(plain, session), args, kwargs, session, graphs=graphs)

    def _notes(self, session: Session, plain: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Note what a step is called with, so that it may be planned and run again."""
        try:
            session.written = written_to((args, kwargs))
            session.root = (plain, _copied(args), _copied(kwargs))
        except Exception as error:  # an argument's own code, which the step need not ask
            if is_passed_on(error, self.stops()):
                raise
            session.root = session.asked = None
            self.report.note(UNSEEN.format(named(error)))

    def verify_next(self) -> None:
        """Compare the next step with eager, region by region, once it has ended; see dispatch/verify.py."""
        self._verify_due = True

    def _through(self, plain: Callable[..., Any], session: Session) -> Callable[..., Any]:
        """The backbone's own forward, or its region where it is one region as a whole."""
        own = self.whole_region
        if own is not None:
            return lambda *args, **kwargs: own.call(plain, args, kwargs, session)
        return lambda *args, **kwargs: self._laid_back(plain(*args, **kwargs), (args, kwargs), session)

    def _laid_back(self, result: Any, given: Any, session: Session) -> Any:
        """The backbone's result as eager code leaves it: with channels innermost where its weights lie so."""
        back = outermost(result, tensors_in(given)) if session.images else result
        if back is result:
            return result
        if self._innermost is None:
            self._innermost = lie_innermost(self.root)  # once: it looks at every module
        return result if self._innermost else back

    def _step(self, run: Callable[..., Any], args: Any, kwargs: Any, session: Session, *, graphs: bool = True) -> Any:
        self.known.watched.look()
        session.modes, session.fingerprint = torch_modes.current(), torch_modes.fingerprint()
        session.wary = self.sets_names or self._brings_code(args, kwargs)
        session.others_ran = session.wary
        due, self._verify_due = self._verify_due, False
        kept, again = self._kept(args, kwargs, session) if due else None, None
        ends = self.promise.begin(args, kwargs, session)
        try:
            if not graphs or self.graphs is None or not torch.cuda.is_available():
                result = run(*args, **kwargs)
            else:
                result = self.graphs.call(run, args, kwargs, session)
        except BaseException as error:
            self._verify_due |= due  # the next step will do
            if session.root is None:
                raise
            again, args, kwargs = remedy(self, error, session), *session.root[1:]  # as they were given
            if again is None:
                raise
        if again is not None:  # not before the error is gone, which holds on to what the step had made
            with again:
                return run(*args, **kwargs)
        if ends is not None:
            self.promise.ended(ends(), session)
        self.worth.judge(session)
        if due and session.behind:
            self._verify_due = True  # there is nothing compiled yet to compare
        elif kept is not None and session.root is not None:
            told = Verifier(self, graphs=kept[2], names=kept[3]).run(session.root[0], *kept[:2])
            self.promise.verified(told, session)
            self.held_twice = True  # eager code asked the host for all weights
        hold_once(self)
        return result

    def _kept(self, args: Any, kwargs: Any, session: Session) -> tuple[Any, Any, bool, list[Any]] | None:
        """Arguments for a verification after the step, which may change its own; whether it may be a graph, and names.

        The names are those of the arguments' tensors, None where one has none.
        """
        quiet = self.is_quiet(args, kwargs)
        try:
            args, kwargs = self.plain_call(args, kwargs)
            names = [session.lasting.get(id(tensor), (tensor, None))[1] for tensor in tensors_in((args, kwargs))]
            return of_its_own(args), of_its_own(kwargs), quiet, names
        except Exception as error:
            # no memory for copies, or an argument that has none: the step itself needs neither
            self.report.note(f"a step could not be verified ({named(error)})")
            return None

    def _brings_code(self, args: Any, kwargs: Any) -> bool:
        """Whether a call brings code of others along, or what cannot be looked at."""
        try:
            return not self.is_quiet(args, kwargs)
        except Exception:
            return True

    def repeatable(self, session: Session) -> bool:
        """Whether a step may be run again on what it was given.

        Not where code of others, which may count its calls, saw a part of it, or where it changed what it was given.
        """
        if session.root is None or session.instead is not None or not self.is_quiet(*session.root[1:]):
            return False
        return written_to(session.root[1:]) == session.written

    def passes(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> str | None:
        """Why a call runs without regions: a reason, "" where the user asked for it, None if it does not."""
        if self.config.disable or disabled():
            return ""
        if torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or _exported_here()):
            return "it is being traced by torch.compile or torch.export"
        if (reason := self.unfit_modes(args, kwargs or {})) is not None:
            return reason
        if self._off is None:
            stop = compiler_processes.cancel.set(self.cancel)
            try:
                self._off = unsupported(self.root, self.store.root) or ""
            except NotNow as error:  # the next step asks again
                return str(error)
            finally:
                compiler_processes.cancel.reset(stop)
            if self._off:
                log.warning("Nexfort: running eager: %s", self._off)
        return self._off or None

    def unfit_modes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why no artefact can follow the modes of torch in which a call is made, or None."""
        if torch.is_grad_enabled() and self._may_need_gradients(args, kwargs):
            return "gradients are on; run it under torch.no_grad() or torch.inference_mode()"

        def device_types() -> set[str]:
            return {tensor.device.type for tensor in (*tensors_in((args, kwargs)), *self.root.parameters())}

        return torch_modes.unsupported(device_types)

    def _may_need_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether something that a call computes with may require a gradient.

        Where a host attaches functions to weights, what trains may be anywhere in these.
        """
        if self.lender is not None:
            return True
        held = (*self.root.parameters(), *tensors_held(self.root).values())
        return any(tensor.requires_grad for tensor in (*held, *tensors_in((args, kwargs))))

    @contextlib.contextmanager
    def active(
        self, *, watch_root: bool = False, instead: Instead | None = None, counted: bool = True
    ) -> Iterator[Session]:
        """Regions stand in the blocks' places inside the block, in this context only.

        watch_root: the backbone is called by somebody else inside the block; note what it is called with.
        instead: what is done with each region's call in the place of running it. counted: it is a step for the report.
        """
        session = Session(self.on_call, instead=instead)
        session.modes, session.fingerprint = torch_modes.current(), torch_modes.fingerprint()
        placed = []
        if self._seats is not None and not self._seats.unchanged():
            self.refresh()
        for region in self._regions().values():
            if region.module is not self.root:
                if stand_in(region.module):
                    placed.append(region.module)
                else:
                    self.report.eager(region.path, f"it carries {region.carries()}")
        if watch_root:
            if stand_in(self.root):
                placed.append(self.root)
            elif counted:
                why = f"the network carries {own_foreign(self.root)}"
                self.report.note(f"steps are not planned ahead, and are no CUDA graphs: {why}")
        began = time.perf_counter()
        self._sessions.add(session)
        try:
            asked = asking(Told(self.store.root, self.report, self.apart))
            with backend_scope(**self.config.backend_flags()), entered(session), asked:
                yield session
        finally:
            self._sessions.discard(session)
            for module in placed:
                leave(module)
            heap_trim.give_back(session.new_sizes)
            if counted and instead is None:
                self.report.call(time.perf_counter() - began)
                worker_pool.dismiss()

    def on_call(self, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any, session: Session) -> Any:
        """What a stand-in does when its block is called inside a session of this engine."""
        if module is self.root and session.root is None:
            self._notes(session, plain, args, kwargs)
            return self._step(self._through(plain, session), args, kwargs, session)
        region = self._regions().get(id(module))
        if region is None or session.inside:
            return plain(*args, **kwargs)
        if session.aside:
            session.ran_eager = True
            return plain(*args, **kwargs)
        if session.instead is not None:
            return session.instead(region, plain, args, kwargs, session)
        return region.call(plain, args, kwargs, session)


def _copied(value: Any) -> Any:
    """A call's arguments in containers of their own: networks take items out of the ones they are given."""
    if type(value) in (list, tuple):
        return type(value)(_copied(v) for v in value)
    if type(value) is dict:
        return {k: _copied(v) for k, v in value.items()}
    return value


def _exported_here() -> bool:
    """Whether this thread is inside torch.export; the flag that says so is set for all threads of the process."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return bool(_get_current_dispatch_mode_stack())  # its fake tensors are a mode of the thread that traces
