# SPDX-License-Identifier: Apache-2.0
"""Whole steps as CUDA graphs: one launch a step instead of a thousand, for each combination of sizes in use.

The second call at some sizes is captured, the backbone's own code between the regions included; later calls copy their
inputs into the graph's slots, replay, and hand out copies of the outputs. A graph is only replayed while everything it
took in without looking stays as it was: the addresses of all weights, the options the network and its regions read, the
attributes of their modules. Otherwise the step runs region by region, and is captured again the next time. Weights that
the host keeps elsewhere are held at their addresses for the length of a step, if all of them stay there (residence.py).

Refused, with the reason in the report: patches and ControlNets (code of others, which may do anything), regions that
run eager, and calls whose values cannot be fed in from outside.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import readset
from .artefact import Binding
from .driver import trim_graph_memory
from .flags import launched_by_address
from .guards import checker, to_json
from .modulestate import Forwards
from .parts import places
from .readset import BOOKKEEPING, PLAIN, ReadSet, Recording, Refused, ValueUsed
from .rehearsal import rehearsed
from .report import named
from .residence import Residence
from .signature import Flat, Leaves, Unsupported, flatten, flatten_call, unflatten, unflatten_call

if TYPE_CHECKING:
    from .engine import Engine
    from .session import Session

log = logging.getLogger("nexfort")

MOST_GRAPHS = 4  # combinations of sizes kept; each holds the activations of a step
_MOST_ADMISSIONS = 16
_MOST_REHEARSALS = 3
_NOWHERE = torch.device("meta")
_ELSEWHERE = "no CUDA graph: the host keeps weights elsewhere, and not all of them stay on the GPU"


@dataclass
class _Step:
    """One combination of sizes: first what its calls read, then its graph."""

    check: Callable[[list[Any]], bool]
    bindings: list[tuple[Binding, Callable[[list[Any]], bool]]]
    pointers: list[Any]
    glue: _Glue
    output: Any
    outputs: list[torch.Tensor]  # as long as there is no graph they only say what will be there
    graph: Any = None
    slots: list[torch.Tensor] = field(default_factory=list)


class _Glue:
    """What lies between the regions, as flat lists: plain attributes, submodules, hooks, replaced forwards.

    Compared on every step. A region itself is looked at too: with a forward of others no stand-in is put there, so
    that its artefact is not asked.
    """

    def __init__(self, root: torch.nn.Module, regions: list[torch.nn.Module]) -> None:
        inside = {id(sub) for region in regions for sub in region.modules()}
        outside = [sub for sub in root.modules() if id(sub) not in inside or sub is root]
        self._attributes = [(s.__dict__, k, v) for s in outside for k, v in s.__dict__.items() if type(v) in PLAIN]
        self._values = [v for _, _, v in self._attributes]
        self._children = [(s._modules, name) for s in outside for name in s._modules]
        self._modules = [table.get(name) for table, name in self._children]
        self._hooks = [table for s in outside for table in (s._forward_hooks, s._forward_pre_hooks)]
        self._bare = Forwards([*outside, *regions])
        self.hooked = any(self._hooks) or self._bare.replaced()

    def unchanged(self) -> bool:
        """Whether everything is as it was."""
        if any(self._hooks) or [own.get(name) for own, name, _ in self._attributes] != self._values:
            return False
        if self._bare.replaced():
            return False
        return [table.get(name) for table, name in self._children] == self._modules


class _Steps(OrderedDict[Any, _Step]):
    """The graphs, the one used longest ago first. Their memory is given back when they all go."""

    def clear(self) -> None:
        """Drop them all."""
        there = any(step.graph is not None for step in self.values())
        super().clear()
        if there and _fragile():
            trim_graph_memory(torch.cuda.current_device())

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.clear()


class StepGraphs:
    """The CUDA graphs of one engine. Used by one thread at a time; a second one runs region by region."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._steps = _Steps()
        self._refused: dict[Any, str] = {}
        self._rehearsed: dict[Any, int] = {}  # how often a step showed a reason why its capture would fail
        self._pool: Any = None
        self._residence: Residence | None = None
        self._busy = False

    def release(self) -> None:
        """Give the graphs and their memory back."""
        self._steps.clear()
        self._pool = None
        self._residence = None

    @property
    def residence(self) -> Residence:
        """Where the network's weights are."""
        if self._residence is None:
            self._residence = Residence(self.engine.root, self.engine.lender)
        return self._residence

    def call(self, plain: Callable[..., Any], args: Any, kwargs: Any, session: Session) -> Any:
        """Run one step: replayed, captured, or region by region (then observed for the next time)."""
        flat = Flat()
        try:
            spec = flatten_call(args, kwargs, flat)
        except Unsupported as error:
            return self._plainly(f"the backbone is called with {error}", plain, args, kwargs)
        reason = self._unfit(flat)
        if reason is not None or self._busy:
            return self._plainly(reason, plain, args, kwargs)
        key = (spec, tuple([(t.shape, t.stride(), t.dtype, t.device) for t in flat.tensors]), tuple(flat.ints))
        if key in self._refused:
            return self._plainly(self._refused[key], plain, args, kwargs)
        self._busy = True
        try:
            return self._step(key, spec, flat, plain, session)
        finally:
            self._busy = False

    def _step(self, key: Any, spec: Any, flat: Flat, plain: Callable[..., Any], session: Session) -> Any:
        step = self._steps.get(key)
        if step is not None:
            with self.residence.held(flat.tensors[0].device) as weights:
                if weights is not None and step.check(flat.mappings) and places(weights) == step.pointers:
                    self._steps.move_to_end(key)
                    self.engine.cancel()
                    if step.graph is not None:
                        # what only decides whether the result counts is compared while the GPU is at work
                        result = self._replay(step, flat)
                        if self._holds(step, flat):
                            return result
                    elif self._holds(step, flat):
                        with self.engine.apart():
                            return self._capture(key, step, spec, flat, plain, session)
            if weights is None:
                return self._fetched(spec, flat, plain, session)
            del self._steps[key]
        return self._observe(key, spec, flat, plain, session)

    # -- conditions --------------------------------------------------------------------------------------

    def _plainly(self, reason: str | None, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if reason:
            self.engine.report.note(f"no CUDA graph: {reason}")
        return plain(*args, **kwargs)

    def _unfit(self, flat: Flat) -> str | None:
        if not flat.tensors or any(t.device.type != "cuda" for t in flat.tensors):
            return "not every input is on the GPU"
        if torch.cuda.is_current_stream_capturing():
            return ""
        return self.engine.unquiet(flat.mappings)

    def _holds(self, step: _Step, flat: Flat) -> bool:
        if not self.residence.sound() or not step.glue.unchanged():
            return False
        maps = flat.mappings[:1] * 4
        return all(check(maps) and binding.state.unchanged() for binding, check in step.bindings)

    # -- the ways ----------------------------------------------------------------------------------------

    def _fetched(self, spec: Any, flat: Flat, plain: Callable[..., Any], session: Session) -> Any:
        """Run region by region, because weights have to be fetched; graphs are kept if they come to lie as they did."""
        args, kwargs = unflatten_call(spec, Leaves(flat.tensors, flat.ints, flat.mappings))
        result = plain(*args, **kwargs)
        if session.fetched or not self.residence.settle(flat.tensors[0].device):
            self._steps.clear()  # memory is short: that of graphs is the first to go
            self.engine.report.note(_ELSEWHERE)
        return result

    def _observe(self, key: Any, spec: Any, flat: Flat, plain: Callable[..., Any], session: Session) -> Any:
        """Run region by region, noting what is read; the next call of this kind may be captured."""
        self._residence = None  # the network may have other layers than before
        admitted: dict[Any, Any] = {}
        for _ in range(_MOST_ADMISSIONS):
            reads = ReadSet(admitted)
            session.used, session.ran_eager, session.fetched = [], False, False
            try:
                with rehearsed() if _fragile() else nullcontext(lambda: None) as problem:
                    result = self._run(spec, flat.tensors, flat, reads, plain)
                break
            except ValueUsed as used:
                try:
                    value = readset.admit(flat.mappings, used.path)
                except Refused as refusal:
                    return self._refuse(key, f"the backbone: {refusal}", spec, flat, plain)
                if isinstance(value, torch.Tensor):
                    what = f"the backbone uses the tensor {readset.where(used.path)}"
                    return self._refuse(key, what, spec, flat, plain)
                admitted[used.path] = value
            except Refused as refusal:
                return self._refuse(key, f"the backbone: {refusal}", spec, flat, plain)
        else:
            return self._refuse(key, "the backbone uses too many options", spec, flat, plain)
        if session.ran_eager:
            # not for good: what ran eager while something was compiled may run compiled the next time
            self.engine.report.note("no CUDA graph: a region ran eager")
            return result
        if session.fetched or not self.residence.settle(flat.tensors[0].device):
            self.engine.report.note(_ELSEWHERE)
            return result
        if reason := problem():
            # a first step may also fetch weights; what the network's own code does it does each time
            self._rehearsed[key] = self._rehearsed.get(key, 0) + 1
            if self._rehearsed[key] >= _MOST_REHEARSALS:
                self._refused[key] = reason
            return result
        outputs = Flat()
        try:
            rows, output = to_json(reads), flatten(result, outputs)
            if outputs.ints or outputs.mappings:
                raise Refused("the backbone returns more than tensors")
        except Refused as refusal:
            self._refused[key] = str(refusal)
            return result
        glue = _Glue(self.engine.root, [region.module for region in self.engine.regions])
        if glue.hooked:
            self.engine.report.note("no CUDA graph: a module carries a forward hook or a replaced forward")
            return result
        with self.residence.held(flat.tensors[0].device) as weights:
            if weights is None:  # they went away again
                return result
            checks = self._region_checks(session, flat)
            self._steps[key] = _Step(
                checker(rows), checks, places(weights), glue, output, _empty(outputs.tensors, _NOWHERE)
            )
        while len(self._steps) > MOST_GRAPHS:
            self._steps.popitem(last=False)
        return result

    def _refuse(self, key: Any, reason: str, spec: Any, flat: Flat, plain: Callable[..., Any]) -> Any:
        self._refused[key] = reason
        args, kwargs = unflatten_call(spec, Leaves(flat.tensors, flat.ints, flat.mappings))
        return self._plainly(reason, plain, args, kwargs)

    def _run(self, spec: Any, tensors: Any, flat: Flat, reads: ReadSet, plain: Callable[..., Any]) -> Any:
        recordings = [Recording(m, (i,), reads) for i, m in enumerate(flat.mappings)]
        args, kwargs = unflatten_call(spec, Leaves(tensors, flat.ints, recordings))
        return plain(*args, **kwargs)

    def _region_checks(self, session: Session, flat: Flat) -> list[Any]:
        """For every binding that ran: the guards on options that can be asked of the backbone's own options.

        What the network itself writes into its options on the way follows from its inputs, and is not there yet when
        a step begins: guards that do not hold then are about such keys.
        """
        maps = flat.mappings[:1] * 4
        found = []
        for binding in {id(b): b for b in session.used}.values():
            rows = [r for r in binding.artefact.guards if r[0] != "keys" and r[1][-1:] and r[1][-1] not in BOOKKEEPING]
            rows = [r for r in rows if maps and checker([r])(maps)]
            found.append((binding, checker(rows)))
        return found

    def _capture(
        self, key: Any, step: _Step, spec: Any, flat: Flat, plain: Callable[..., Any], session: Session
    ) -> Any:
        slots, outputs = _empty(flat.tensors, flat.tensors[0].device), _empty(step.outputs, flat.tensors[0].device)
        for slot, tensor in zip(slots, flat.tensors, strict=True):
            slot.copy_(tensor)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        session.ran_eager = session.fetched = False
        try:
            # what cudaMallocAsync gives for a graph is not yet memory to those who ask the driver
            with (
                launched_by_address() if _fragile() else nullcontext(),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                args, kwargs = unflatten_call(spec, Leaves(slots, flat.ints, [dict(m) for m in flat.mappings]))
                _write(plain(*args, **kwargs), outputs, step.output)
            if session.ran_eager or session.fetched:
                raise Refused("a region ran eager, or on weights that were fetched for it")
            step.graph, step.slots, step.outputs = graph, slots, outputs
            return self._replay(step, flat)  # the first may still find that there is no memory
        except torch.OutOfMemoryError:
            self._steps.clear()  # the memory of graphs is the first to go
            return self._refuse(key, "there was no memory for one", spec, flat, plain)
        except Exception as error:
            self._steps.pop(key, None)
            if isinstance(error, self.engine.stops()):
                raise
            # code of the host that waits for the GPU or copies from the CPU cannot be captured
            log.debug("Nexfort: capturing a CUDA graph failed", exc_info=True)
            return self._refuse(key, f"capturing it failed: {named(error)}", spec, flat, plain)

    @staticmethod
    def _replay(step: _Step, flat: Flat) -> Any:
        for slot, tensor in zip(step.slots, flat.tensors, strict=True):
            if slot.data_ptr() != tensor.data_ptr():
                slot.copy_(tensor)
        step.graph.replay()
        return unflatten(step.output, Leaves([t.clone() for t in step.outputs]))


def _fragile() -> bool:
    """Whether a capture that fails would end the process."""
    return torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def _empty(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors laid out as these are, with nothing in them."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors]


def _write(result: Any, outputs: list[torch.Tensor], output: Any) -> None:
    """Copy what a step returns to where it is read after each replay. Raises Refused: it is not what it was.

    The tensors that the step made belong to the graph, and go with this call.
    """
    made = Flat()
    if flatten(result, made) != output or [t.shape for t in made.tensors] != [t.shape for t in outputs]:
        raise Refused("the backbone returns something else than the time before")
    for place, tensor in zip(outputs, made.tensors, strict=True):
        place.copy_(tensor)
