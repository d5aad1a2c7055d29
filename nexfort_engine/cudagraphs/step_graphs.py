# SPDX-License-Identifier: Apache-2.0
"""Whole steps as CUDA graphs: one launch a step instead of a thousand, for each combination of sizes in use.

The second call at some sizes is captured, the backbone's own code between the regions included, or a later one where
pictures have few steps (few_steps.py). Calls after it copy their inputs into the graph's slots, those tensors of their
options too that the backbone uses, replay, and hand out copies of the outputs. A graph is only replayed while
everything it took in without looking stays as it was: the addresses of all weights, the options the network and its
regions read, the attributes of their modules. Otherwise the step runs region by region, and is captured again the next
time. Weights that the host keeps elsewhere are held at their addresses for the length of a step, if all of them stay
there (weights/residency.py).

Refused, with the reason in the report: patches and ControlNets (code of others, which may do anything), regions that
run eager, code that counts (capture/named_state.py), and calls whose values cannot be fed in from outside.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..capture.named_state import NamedState
from ..capture.reached_names import rows_of
from ..capture.source_hashes import walked
from ..guards import option_recorder
from ..guards.call_spec import Flat, flatten, flatten_call, holds_function
from ..guards.name_guards import Dependence
from ..guards.name_resolver import classes_in
from ..guards.option_guards import checker, to_json
from ..guards.option_recorder import Path, ReadSet, Recording, Refused
from ..guards.sentinels import ValueUsed
from ..modules.memory_format import Unsupported
from ..modules.tree import Slot
from ..reporting.report import named
from ..runtime.artifact import Binding
from ..runtime.engine_state import EngineState
from ..runtime.fault_attribution import UNSEEN, is_passed_on
from ..runtime.forward_context import ForwardContext
from ..runtime.lru_mapping import Recent
from ..system.capture_stream import CaptureStream, capture_stream
from ..system.cuda_graph_pool import GraphMemory, fragile, pool_bytes
from ..weights.residency import Residency
from ..weights.subclass_unwrap import places
from . import memory_budget
from .backoff import Backoff
from .capture_check import CaptureCheck
from .channels_last_cat import JoinedAsRows
from .few_steps import FewSteps
from .graph_capture import captured
from .host_constants import Answering, Remembering
from .invariant_cache import StepInvariants
from .module_fingerprint import ModuleFingerprint
from .step_call import StepCall, empty_as, overlaps, separate, used_options, write_result
from .step_graph import NOWHERE, Observed, StepGraph, in_places, metas_of, region_checks, serials_of

log = logging.getLogger("nexfort")

DEVICE = "cuda"  # the type of device that has graphs
MOST_GRAPHS = 4  # combinations of sizes kept; each holds the activations of a step
_MOST_ADMISSIONS = 16
_MOST_FAILURES = 3
_MOST_CALLS = 512  # combinations of sizes of which is remembered why there is no graph
_PART_KEPT = 24  # of the weights' bytes, of what is made of prompts for all combinations of sizes together, or
_LEAST_KEPT = 100 << 20  # bytes
_MADE_ANEW = "what is made of a prompt is made in each step: {}"
_TOO_MUCH = "with those of other sizes it would hold more of the GPU than an uncompiled step takes"
_HOOKED = "no CUDA graph: a module carries a forward hook or a replaced forward"
_ELSEWHERE = "no CUDA graph: the host keeps weights elsewhere, and not all of them stay on the GPU"


class StepGraphs:
    """The CUDA graphs of one engine. Used by one thread at a time; a second one runs region by region."""

    def __init__(
        self,
        state: EngineState,
        blocks: Callable[[], list[nn.Module]],
        released_weights: Callable[[list[Binding]], list[Slot]],
    ) -> None:
        """blocks: the modules of the regions. spared: weights that a step with these bindings does not need."""
        self.state, self._blocks, self._released_weights = state, blocks, released_weights
        self._steps: OrderedDict[Any, StepGraph] = OrderedDict()  # the one used longest ago first
        self._refused: Recent[Any, str] = Recent(_MOST_CALLS)
        self._failed: Recent[Any, int] = Recent(_MOST_CALLS)  # how often a step could not be captured for what may pass
        self._fed: dict[Any, list[Path]] = {}  # by the structure of a call: tensors of its options that are inputs
        # calls whose step-invariant values were written to: what lasts is to them as the rest
        self._alike: Recent[Any, None] = Recent(_MOST_CALLS)
        # calls whose graph grew the memory of all beyond the budget: captured alone the next time
        self._alone: Recent[Any, None] = Recent(_MOST_CALLS)
        self._memory = GraphMemory()
        self._stream: CaptureStream | None = None  # to run and to capture on; None: the caller's, and torch's
        self._watched = state.known.watched
        self._in_use = threading.Lock()
        self._few, self._backoff = FewSteps(state), Backoff(lambda: sum(map(len, state.known.artefacts.values())))

    def release(self) -> bool:
        """Give the graphs and their memory back, to be captured again when wanted. Whether there were any."""
        held = any(step.graph is not None for step in self._steps.values())
        self._steps.clear()
        self._memory.give_back()
        return held

    @contextmanager
    def idle(self) -> Iterator[bool]:
        """Whether no step is under way; then none begins inside the block."""
        is_idle = self._in_use.acquire(blocking=False)
        try:
            yield is_idle
        finally:
            if is_idle:
                self._in_use.release()

    def call(self, plain: Callable[..., Any], args: Any, kwargs: Any, session: ForwardContext) -> Any:
        """Run one step: replayed, captured, or region by region (then observed for the next time)."""
        try:
            call = self._call_of(args, kwargs, session)
            reason, key = self._unfit(call), call.key()
            if reason is None and key in self._refused:
                reason = self._refused[key]
        except Unsupported as error:
            reason = f"the backbone is called with {error}"
        except Exception as error:
            if is_passed_on(error, self.state.hooks.stops()):
                raise
            reason = UNSEEN.format(named(error))
        if reason is not None:
            return self._plainly(reason, plain, args, kwargs)
        if not self._in_use.acquire(blocking=False):  # another thread is in a step: its slots are not to be touched
            return plain(*args, **kwargs)
        try:
            self._few.begins(args, kwargs)
            return self._step(key, call, plain, session)
        finally:
            self._in_use.release()

    def _step(self, key: Any, call: StepCall, plain: Callable[..., Any], session: ForwardContext) -> Any:
        step, flat = self._steps.get(key), call.flat
        if step is not None:
            with step.residency.held(flat.tensors[0].device) as weights:
                there = weights is not None and places(weights) == step.pointers
                if weights is not None and there and step.is_kept(self.state.version) and step.check(flat.mappings):
                    self._steps.move_to_end(key)
                    self.state.hooks.cancel()
                    if step.graph is not None:
                        # what only decides whether the result counts is compared while the GPU is at work
                        result = step.replay(call)
                        if step.holds(flat, weights):
                            step.note_replay()
                            session.outcome.note_replay()
                            return result
                    elif step.holds(flat, weights):
                        if self._few.waits(key):
                            return call.plainly(plain)
                        with self.state.hooks.apart():
                            return self._capture(key, step, call, plain, session)
            if weights is None:
                return self._fetched(step, call, plain, session)
            del self._steps[key]
            self._backoff.ended(key, replayed=step.replayed)
        if self._few.waits(key) or self._backoff.waits(key):
            return call.plainly(plain)
        self._few.mark(key)
        return self._observe(key, call, plain, session)

    # -- conditions --------------------------------------------------------------------------------------

    def _call_of(self, args: Any, kwargs: Any, session: ForwardContext) -> StepCall:
        """A call taken apart. Raises Unsupported."""
        flat = Flat()
        spec = flatten_call(args, kwargs, flat)
        if holds_function(spec):  # a replay would not call it
            raise Unsupported("an argument of type function")
        step_invariant = self._step_invariant(flat.tensors, session)
        flat.map_tensors(separate)
        return StepCall.of(spec, flat, self._fed.get(spec, []), step_invariant, session.modes)

    def _plainly(self, reason: str | None, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if reason:
            self.state.report.note(f"no CUDA graph: {reason}")
        return plain(*args, **kwargs)

    def _unfit(self, call: StepCall) -> str | None:
        flat = call.flat
        if not flat.tensors or any(t.device.type != DEVICE for t in call.tensors):
            return "not every input is on the GPU"
        if torch.cuda.is_current_stream_capturing():
            return ""
        if len(flat.mappings) > 1:
            return "the backbone takes several mappings, and what its regions read is known of one"
        return self.state.unquiet(flat.mappings)

    # -- the ways ----------------------------------------------------------------------------------------

    def _fetched(self, step: StepGraph, call: StepCall, plain: Callable[..., Any], session: ForwardContext) -> Any:
        """Run region by region, because weights have to be fetched; graphs are kept if they come to lie as they did."""
        result = call.plainly(plain)
        if session.trace.fetched or session.trace.ran_eager or not step.residency.settle(call.tensors[0].device):
            self.release()  # memory is short: that of graphs is the first to go
            self.state.report.note(_ELSEWHERE)
        return result

    def _observe(self, key: Any, call: StepCall, plain: Callable[..., Any], session: ForwardContext) -> Any:
        """Run region by region, noting what is read; the next call of this kind may be captured."""
        flat, reason = call.flat, None  # why there is no graph
        admitted: dict[Path, Any] = {}
        before: dict[Path, torch.Tensor] = {}
        state = NamedState.between(self.state.root, self._blocks(), self.state.hooks.accounts)
        for _ in range(_MOST_ADMISSIONS):
            reads, invariants = ReadSet(admitted), self._invariants(call)
            watching = CaptureCheck() if fragile() else Remembering()
            try:
                observed = session.observed(watching, invariants)
                with self._running(), invariants or nullcontext(), watching, walked() as codes, observed as trace:
                    recordings = [Recording(m, (i,), reads) for i, m in enumerate(flat.mappings)]
                    args, kwargs = call.arguments(in_places(flat.tensors, invariants), recordings)
                    result = plain(*args, **kwargs)
                break
            except ValueUsed as used:
                path = used.path
            except Refused as refusal:
                reason = f"the backbone: {refusal}"
                break
            try:
                admitted[path] = value = option_recorder.admit(flat.mappings, path)
            except Refused as refusal:
                reason = f"the backbone: {refusal}"
                break
            if isinstance(value, torch.Tensor):
                before[path] = value.clone()
        else:
            reason = "the backbone uses too many options"
        if reason is not None:
            return self._refuse(key, reason, call, plain)
        if invariants is not None and invariants.reason:  # what was written to may have been an answer by then
            return self._without_invariants(key, invariants, call, plain)
        try:
            options = used_options(trace.looked_up, flat, before)
        except Refused as refusal:
            self._refused[key] = str(refusal)
            return result
        if not set(options) <= set(call.fed):
            known = self._fed.get(call.spec, [])  # of calls of other kinds too: each has its own of them
            self._fed[call.spec] = list(dict.fromkeys(known + options))
            call = StepCall.of(call.spec, flat, self._fed[call.spec], call.step_invariant, call.modes)
            reason, key = self._unfit(call), call.key()
            self._few.mark(key)
            if reason:
                self._refused[key] = reason
                return result
        if trace.releases_weights:
            return result  # the next step leases less; it is the one to look at
        kept = serials_of(trace.used)  # before it is asked what they spare: another thread may let go of them
        residency = Residency(self.state.root, self.state.provider, self._released_weights(trace.used))
        if trace.lists:
            self._refused[key] = trace.unrepeatable
        if reason := trace.unrepeatable:
            self._in_vain(key, f"no CUDA graph: {reason}")
        elif reason := state.since():
            self._fails(key, reason)  # a table is made in one step, and is there in the next
        elif trace.fetched or not residency.settle(flat.tensors[0].device):
            self._in_vain(key, _ELSEWHERE, passing=True)
        elif watching.reason:  # a first step may also fetch weights; its own code does the same each time
            self._fails(key, watching.reason)
        elif getattr(watching, "foreign", False) and self._takes_a_stream(flat.tensors[0].device):
            pass  # the next step is observed on it: a capture that fails would end the process
        else:
            seen = Observed(trace, reads, codes, residency, kept, watching.sent, invariants)
            self._expect(key, call, seen, result)
        return result

    def _expect(self, key: Any, call: StepCall, seen: Observed, result: Any) -> None:
        """A step ran that could be captured: the next of its kind is, if all is as it is now."""
        outputs, flat, invariants, residency = Flat(), call.flat, seen.invariants, seen.residency
        try:
            rows, output = to_json(seen.reads), flatten(result, outputs)
            reached, kinds = rows_of(self.state.root, seen.codes)[0], classes_in(self.state.root)
            names = Dependence(reached, kinds, self._watched, deep=False)
            if outputs.ints or outputs.mappings or any(map(overlaps, outputs.tensors)):
                raise Refused("the backbone returns more than tensors of their own")
            if invariants is not None and any(map(invariants.is_step_invariant, outputs.tensors)):
                invariants = None  # its caller may write to what it was given
                self._alike[key] = None
                self.state.report.note(_MADE_ANEW.format("the backbone returns some of it"))
        except Refused as refusal:
            self._refused[key] = str(refusal)
            return
        fingerprint = ModuleFingerprint(self.state.root, self._blocks())
        if fingerprint.hooked:
            return self._in_vain(key, _HOOKED, passing=True)
        with residency.held(flat.tensors[0].device) as weights:
            if weights is None:  # they went away again
                return self._backoff.in_vain(key, passing=True)
            self._steps[key] = StepGraph(
                checker(rows),
                region_checks(seen.trace, flat),
                residency,
                places(weights),
                fingerprint,
                metas_of(weights),
                output,
                empty_as(outputs.tensors, NOWHERE),
                seen.sent,
                kept=seen.kept,
                version=self.state.version(),
                invariants=invariants if invariants is not None and invariants.observed(call.made_of) else None,
                names=names,
            )
        while len(self._steps) > MOST_GRAPHS:
            self._steps.popitem(last=False)

    def _in_vain(self, key: Any, note: str, *, passing: bool = False) -> None:
        self.state.report.note(note)
        self._backoff.in_vain(key, passing=passing)

    def _fails(self, key: Any, reason: str) -> None:
        """Count a failure that may pass; after some it counts for good."""
        self._failed[key] = self._failed.get(key, 0) + 1
        if self._failed[key] >= _MOST_FAILURES:
            self._refused[key] = reason

    def _refuse(self, key: Any, reason: str, call: StepCall, plain: Callable[..., Any]) -> Any:
        result = call.plainly(plain)  # first: what eager refuses as well says nothing of other calls
        self._refused[key] = reason
        self.state.report.note(f"no CUDA graph: {reason}")
        return result

    def _capture(
        self, key: Any, step: StepGraph, call: StepCall, plain: Callable[..., Any], session: ForwardContext
    ) -> Any:
        device, invariants = call.tensors[0].device, step.invariants
        slots, outputs = in_places(empty_as(call.tensors, device), invariants), empty_as(step.outputs, device)
        answering, fills = Answering(step.sent), self.state.config.option("cuda.fill_kernels", True) is True

        def run() -> bool:
            args, kwargs = call.with_tensors(slots)
            with invariants or nullcontext(), JoinedAsRows(), answering:  # which steps aside only where it is the last
                return write_result(plain(*args, **kwargs), outputs, step.output)

        self._steps.pop(key, None)  # until it is there
        before = pool_bytes(self._memory)
        try:
            for slot, tensor in zip(slots, call.tensors, strict=True):
                slot.copy_(tensor)
            if invariants is not None:
                made, _ = captured(self._memory, invariants.program(), fills=fills, stream=self._stream)
                invariants.take_graph(made, launch=fragile())  # the next graph may use what it took and keeps
            with session.observed(answering, invariants, capturing=True) as trace:
                graph, fits = captured(self._memory, run, fills=fills, stream=self._stream)
            if answering.reason:
                raise Refused(answering.reason)
            if invariants is not None and invariants.reason:
                return self._without_invariants(key, invariants, call, plain)
            if trace.unrepeatable or trace.fetched or not fits:
                raise Refused("a block ran uncompiled, on weights fetched for it, or something else came back")
            if not set(map(id, trace.looked_up)) <= set(map(id, slots)):
                raise Refused("a block took a tensor of the options that is no input")
            step.captured(graph, slots, outputs)
            if not step.is_prepared():
                return call.plainly(plain)  # what was prepared was let go of meanwhile: not with this graph
            result = step.replay(call)  # the first may still find that there is no memory
            self._steps[key] = step
            self._keep_within(key, before)
            return result
        except Exception as error:
            if isinstance(error, self.state.hooks.stops()):
                raise
            log.debug("Nexfort: capturing a CUDA graph failed", exc_info=True)
            if memory_budget.no_memory(error):
                self.release()
                self._fails(key, "there was no memory for one")
                reason = None
            elif self._takes_a_stream(device):
                self._steps[key] = step  # a library may have nothing ready on torch's stream
                with self._running():
                    return call.plainly(plain)
            else:  # code of the host that waits for the GPU or copies from the CPU cannot be captured
                reason = f"capturing it failed: {named(error)}"
        return call.plainly(plain) if reason is None else self._refuse(key, reason, call, plain)

    def _keep_within(self, key: Any, before: int) -> None:
        """See that graphs of several sizes hold no more than the budget beside what the largest needs alone.

        before: bytes that they held before this one. It is captured first the next time, so that the others find room
        in its memory; where that does not help, steps of this kind are no graphs.
        """
        weights, held = self._weights(), pool_bytes(self._memory)
        if memory_budget.allows(weights + held, weights + max(before, held - before)):
            return
        self.release()
        if key in self._alone:
            self._refused[key] = _TOO_MUCH
            self.state.report.note(f"no CUDA graph: {_TOO_MUCH}")
        self._alone[key] = None

    def _weights(self) -> int:
        return sum(weight.nbytes for weight in self.state.root.parameters())

    def _takes_a_stream(self, device: torch.device) -> bool:
        """Take a stream for the engine alone, if it has none; whether it has one now and had none."""
        had, self._stream = self._stream, self._stream or capture_stream(device)
        return had is None and self._stream is not None

    @contextmanager
    def _running(self) -> Iterator[None]:
        """What runs inside the block can be captured afterwards, on the stream that it runs on."""
        if self._stream is None:
            return (yield)
        # a library may move what it keeps for the stream, which they read; what makes invariants is captured once
        self._steps = OrderedDict((key, step) for key, step in self._steps.items() if step.invariants is None)
        for step in self._steps.values():
            step.forget()
        with self._stream.active():
            yield

    # -- what lasts --------------------------------------------------------------------------------------

    def _step_invariant(self, tensors: list[torch.Tensor], session: ForwardContext) -> dict[int, Hashable]:
        """The names of those of a call's tensors that the host has one for, and what it says of the weights now."""
        names = session.calls.step_invariant if self.state.lowering.prompt_once else {}
        version = self.state.version() if names else None
        if version is None:
            return {}
        return {place: (names[id(tensor)][1], version) for place, tensor in enumerate(tensors) if id(tensor) in names}

    def _invariants(self, call: StepCall) -> StepInvariants | None:
        """What keeps what a step makes of tensors that last, if any do."""
        if not call.step_invariant or call.key() in self._alike:
            return None
        for key, step in list(self._steps.items()):
            if step.graph is None and step.invariants is not None and step.version != self.state.version():
                del self._steps[key]  # it holds on to weights that may be no more
        least = min(_LEAST_KEPT, memory_budget.beside(call.tensors[0].device))
        most = max(least, self._weights() // _PART_KEPT)
        held = sum(step.invariants.bytes for step in self._steps.values() if step.invariants is not None)
        return StepInvariants.of(call, most - held, self.state.hooks.apart)

    def _without_invariants(
        self, key: Any, invariants: StepInvariants, call: StepCall, plain: Callable[..., Any]
    ) -> Any:
        """Run a step as it was called: from now on nothing that steps of this kind make of a prompt is kept."""
        self._alike[key] = None
        self.state.report.note(_MADE_ANEW.format(invariants.reason))
        return call.plainly(plain)
