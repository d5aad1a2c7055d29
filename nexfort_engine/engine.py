# SPDX-License-Identifier: Apache-2.0
"""Engine: one backbone with one config. It stands its regions in the blocks' places for the length of a call.

It makes the parts and hands each what it needs: the state that they share (runtime/engine_state.py), the table of
regions, and the parts below it. No part knows the engine; those that need the backbone run are given it as a
`StepRunner`. dispatch/forward_shim.py has what stands in a block's place.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .cache.store import Store
from .compilation import load_ahead
from .compilation.builder import Builder, Then
from .compilation.eligibility import Eligibility
from .compilation.planner import Planner
from .compilation.support import OLDEST, torch_version
from .config.compile_config import CompileConfig
from .cudagraphs.host_constants import tensors_in
from .cudagraphs.step_graphs import StepGraphs
from .dispatch.compiled_share import Worth
from .dispatch.fallback import written_to
from .dispatch.forward_shim import leave, stand_in
from .dispatch.memory_reclaim import MemoryReclaim
from .dispatch.recovery import recover
from .dispatch.region import Region
from .dispatch.region_table import RegionTable
from .dispatch.slowdown import Promise
from .dispatch.verify import Verifier
from .guards.call_spec import of_its_own
from .lowering import worker_pool
from .lowering.preload import import_ahead, import_tracing_ahead
from .modules.boundaries import OwnForward, first_carrier
from .modules.channels_last import is_channels_last, to_contiguous
from .modules.containers import left_alone
from .modules.regions import RegionSpec
from .modules.tree import is_carrier, own_foreign, replaced_forward
from .reporting.report import Report, named
from .reporting.resource_shortages import describe_error
from .runtime.engine_state import EngineState, HostHooks
from .runtime.fault_attribution import UNSEEN, is_passed_on
from .runtime.forward_context import Calls, ForwardContext, Instead, entered
from .runtime.shared_state import Known
from .system import heap_trim
from .system.process_group import others_speak
from .system.process_settings import backend_scope
from .system.yielding import runs_a_step
from .weights.lease import WeightProvider


class Engine:
    """Regions, artefacts and the report of one backbone under one config.

    name: what the report calls it; the backbone's class if the host has no name.
    whole: it is called through its forward alone, so it may be one region.
    provider: where the host keeps weights elsewhere; they are leased for each call.
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
        provider: WeightProvider | None = None,
        known: Known | None = None,
        report: Report | None = None,
        hooks: HostHooks | None = None,
    ) -> None:
        self.state = EngineState(
            root, config, store, name=name, provider=provider, known=known, report=report, hooks=hooks
        )
        self.table = RegionTable(self.state, self._region, whole=whole)
        self.graphs = (
            StepGraphs(self.state, self.table.modules, self.table.released_weights) if config.step_graphs else None
        )
        self.memory = MemoryReclaim(self.state, self.table, self.graphs)
        self.worth = Worth(self.state, self.table, self.memory)
        self.promise = Promise(self.state, graphs=config.step_graphs)
        self._eligibility = Eligibility(self.state)
        planner = Planner(self.state, self.table, self, self.worth, self.memory)
        self.builder = Builder(self.state, self.table, planner, self._eligibility)
        self._innermost: bool | None = None  # whether the backbone's own weights lie so
        self._verify_due = False
        self._own_forward = OwnForward(root)

    def _region(self, spec: RegionSpec) -> Region:
        return Region(self.state, spec, self.builder, self.memory.others_give_way)

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
    def report(self) -> Report:
        """What happened."""
        return self.state.report

    @property
    def regions(self) -> list[Region]:
        """The regions, found on first use."""
        return self.table.regions

    def prepare(self, device: torch.device) -> None:
        """Start what the first step will need while the host still loads the model; nothing is compiled yet.

        device: where the model will run. What the store has for this model is made ready to load; where it has nothing,
            workers are started, if its first step will wait for them.
        """
        store, report = self.state.store, self.report
        try:
            import_ahead()
            self.worth.anew()
            if torch_version() < OLDEST or device.type not in ("cpu", "cuda"):
                return
            there = self.stored(device)
            if there:
                load_ahead.begin(self.builder.finder, there, device)
            else:
                import_tracing_ahead()
                if self.builder.waits:  # workers that start take the processor from what loads the model
                    worker_pool.expect(device.type, store.root)
        except worker_pool.NoWorkers as error:
            report.note(f"no workers were started ahead: {error}")
        except OSError as error:
            report.note(f"nothing was made ready for the first step: {describe_error(error)}")

    def stored(self, device: torch.device) -> list[str]:
        """The primary keys of what the store has for this backbone on a device."""
        return self.builder.keys.stored(device)

    def followed_by(self, then: Then) -> None:
        """Have what runs after this backbone made with what its first step needs.

        then: given the arguments of a first call, what will be called once the steps are done; it is made in the block.
        """
        self.builder.followed_by(then)

    def refresh(self) -> None:
        """Find the regions anew: submodules were exchanged."""
        self.worth.anew()
        self.table.find_anew()
        self._innermost = None

    def poll_versions(self, run: object) -> None:
        """Have the host see whether weights changed without a word, once for each run; None: it has no name."""
        if self.state.provider is not None:
            self.state.provider.poll_versions(run)

    def release(self) -> bool:
        """Give back what is held of the device between steps, to be made again when wanted. Whether there was any."""
        return self.memory.release()

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

    def called_by(self, replaced: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward that others put in the place of the backbone's own; where it calls that, the engine begins."""

        def begin(module: nn.Module, plain: Callable[..., Any], given: Any, words: Any, _: ForwardContext) -> Any:
            with entered(None):
                return self.call(plain, given, words) if module is self.root else plain(*given, **words)

        if not self._own_forward.places() or not stand_in(self.root, self._own_forward):
            return replaced(*args, **kwargs)  # it may call the compiled one's, which was there when it was made
        try:
            with entered(ForwardContext(begin)):
                return replaced(*args, **kwargs)
        finally:
            leave(self.root)

    def steps_aside(self, plain: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call runs as it would without this engine, because too little of it can be compiled.

        plain: the method that is called, where the host calls several.
        """
        return not self._verify_due and self.worth.is_off(plain, args, kwargs)

    def uncounted(
        self, plain: Callable[..., Any], args: Any, kwargs: Any, *, graphs: bool, names: Iterable[Hashable] = ()
    ) -> Any:
        """One more step that nobody asked for; the report does not count it.

        graphs: it may be replayed as one. names: of its arguments' tensors, as in Calls; None: one has none.
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
        calls = Calls(engine=(plain, args, kwargs) if counted else None)
        with self.active(counted=counted, calls=calls) as session:
            self._notes(session, plain, args, kwargs)
            calls.name_tensors(zip(tensors_in((args, kwargs)) if names else (), names, strict=False))
            return self._step(self._through(plain, session), args, kwargs, session, graphs=graphs)

    def _notes(self, session: ForwardContext, plain: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Note what a step is called with, so that it may be planned and run again."""
        try:
            versions = written_to((args, kwargs))
            session.calls.note_backbone((plain, _copied(args), _copied(kwargs)), versions)
        except Exception as error:  # an argument's own code, which the step need not ask
            if is_passed_on(error, self.state.hooks.stops()):
                raise
            session.calls.forget()
            self.report.note(UNSEEN.format(named(error)))

    def verify_next(self) -> None:
        """Compare the next step with eager, region by region, once it has ended; see dispatch/verify.py."""
        self._verify_due = True

    def _through(self, plain: Callable[..., Any], session: ForwardContext) -> Callable[..., Any]:
        """The backbone's own forward, or its region where it is one region as a whole."""
        own = self.table.whole_region
        if own is not None:
            missing = session.missing
            return lambda *args, **kwargs: (
                own.call(plain, args, kwargs, session)
                if missing.only_looked_for or not missing.held
                else plain(*args, **kwargs)
            )
        return lambda *args, **kwargs: self._laid_back(plain(*args, **kwargs), (args, kwargs), session)

    def _laid_back(self, result: Any, given: Any, session: ForwardContext) -> Any:
        """The backbone's result as eager code leaves it: with channels innermost where its weights lie so."""
        back = to_contiguous(result, tensors_in(given)) if session.outcome.images else result
        if back is result:
            return result
        if self._innermost is None:
            self._innermost = is_channels_last(self.root)  # once: it looks at every module
        return result if self._innermost else back

    def _step(
        self, run: Callable[..., Any], args: Any, kwargs: Any, session: ForwardContext, *, graphs: bool = True
    ) -> Any:
        self.state.known.watched.look()
        others_around = session.others_code.around_blocks
        session.begin(brings_code=self.table.sets_names or others_around or self._brings_code(args, kwargs))
        due, self._verify_due = self._verify_due, False
        if due and (reason := self._why_unverified()):
            due = False
            self.report.note(f"no step is verified: {reason} while this one runs it again")
        kept, again = self._kept(args, kwargs, session) if due else None, None
        ends = self.promise.begin(args, kwargs, session)
        if session.calls.engine is not None:
            self.builder.handover.begins(args, kwargs, session)
        try:
            if session.missing.held or not graphs or self.graphs is None or not torch.cuda.is_available():
                result = run(*args, **kwargs)
            else:
                result = self.graphs.call(run, args, kwargs, session)
        except BaseException as error:
            self._verify_due |= due  # the next step will do
            if session.calls.backbone is None:
                raise
            again = recover(self.state, self.memory, error, session)
            if again is None:
                raise
            args, kwargs = session.calls.backbone[1:]  # as they were given
        if again is not None:  # not before the error is gone, which holds on to what the step had made
            with again:
                return run(*args, **kwargs)
        if ends is not None:
            self.promise.ended(ends(), session)
        self.builder.handover.ended(session)
        self.worth.judge(session)
        if due and (session.missing.made_beside or session.missing.held):
            self._verify_due = True  # there is nothing compiled yet to compare
        elif kept is not None and (backbone := session.calls.backbone) is not None:
            args, kwargs, replayed, names = kept
            verifier = Verifier(self.state, self.table, self, self.graphs, replayed=replayed, names=names)
            with left_alone(self.root, self.state.besides):  # it runs the step many times
                self.promise.verified(verifier.run(backbone[0], args, kwargs), session)
            self.state.hold_twice()  # eager code asked the host for all weights
        self.memory.hold_once()
        return result

    def _why_unverified(self) -> str | None:
        if others_speak():
            return "other processes would wait"
        return "code of others on layers would run more often" if first_carrier(self.root) is not None else None

    def _kept(self, args: Any, kwargs: Any, session: ForwardContext) -> tuple[Any, Any, bool, list[Any]] | None:
        """Arguments for a verification after the step, which may change its own; whether it may be a graph, and names.

        The names are those of the arguments' tensors, None where one has none.
        """
        quiet = self.state.is_quiet(args, kwargs)
        try:
            args, kwargs = self.state.hooks.plain_call(args, kwargs)
            named_ = session.calls.step_invariant
            names = [named_.get(id(tensor), (tensor, None))[1] for tensor in tensors_in((args, kwargs))]
            return of_its_own(args), of_its_own(kwargs), quiet, names
        except Exception as error:
            # no memory for copies, or an argument that has none: the step itself needs neither
            self.report.note(f"a step could not be verified ({named(error)})")
            return None

    def _brings_code(self, args: Any, kwargs: Any) -> bool:
        """Whether a call brings code of others along, or what cannot be looked at."""
        try:
            return not self.state.is_quiet(args, kwargs)
        except Exception:
            return True

    def passes(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> str | None:
        """Why a call runs without regions: a reason, "" where the user asked for it, None if it does not."""
        return self._eligibility.reason(args, kwargs or {})

    @contextlib.contextmanager
    def active(
        self,
        *,
        watch_root: bool = False,
        instead: Instead | None = None,
        counted: bool = True,
        calls: Calls | None = None,
    ) -> Iterator[ForwardContext]:
        """Regions stand in the blocks' places inside the block, in this context only.

        watch_root: the backbone is called by somebody else inside the block; note what it is called with.
        instead: what is done with each region's call in the place of running it. counted: it is a step for the report.
        calls: what the engine is called with, where the caller knows it.
        """
        session, root = ForwardContext(self.on_call, instead=instead, calls=calls), self.state.root
        placed = []
        if self.table.were_exchanged():
            self.refresh()
        for region in self.table.regions:
            if region.module is not root:
                if is_carrier(region.module):
                    session.others_code.note_around_blocks()
                if stand_in(region.module, region.own_forward):
                    placed.append(region.module)
                    if replaced_forward(region.module) is not None and not self.table.is_below(region):
                        session.others_code.expect_call(region.module, region)
                else:
                    self.report.eager(region.path, f"it carries {own_foreign(region.module)}")
        if watch_root:
            if stand_in(root, self._own_forward):
                placed.append(root)
            elif counted:
                why = f"the network carries {own_foreign(root)}"
                self.report.note(f"steps are not planned ahead, and are no CUDA graphs: {why}")
        began = time.perf_counter()
        self.memory.step_begins(session)
        runs_a_step()
        try:
            with backend_scope(**self.config.backend_flags()), entered(session):
                yield session
        finally:
            session.ended()
            self.memory.step_ended(session)
            for region in session.others_code.uncalled.values() if counted and session.trace.used else ():
                why = f"it carries {own_foreign(region.module)}, which has not called the block's own"
                self.report.eager(region.path, why)
            for module in placed:
                leave(module)
            heap_trim.give_back(session.outcome.new_sizes)
            if counted and instead is None:
                self.report.call(time.perf_counter() - began)
                worker_pool.dismiss()

    def on_call(
        self, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any, session: ForwardContext
    ) -> Any:
        """What a shim does when its block is called inside a session of this engine."""
        if session.calls.backbone is None and module is self.state.root:
            self._notes(session, plain, args, kwargs)
            return self._step(self._through(plain, session), args, kwargs, session)
        region = self.table.of(module)
        if session.others_code.uncalled:
            session.others_code.note_call(module)
        if region is None or session.inside:
            return plain(*args, **kwargs)
        missing = session.missing
        if missing.uncompiled or (missing.held and not missing.only_looked_for):
            session.trace.note_eager()
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
