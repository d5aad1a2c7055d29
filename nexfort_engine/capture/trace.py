# SPDX-License-Identifier: Apache-2.0
"""Trace: a block as a function of its weights and arguments, as torch.export runs it once, and what that run finds.

The block's own code runs on a shadow (shadow_module.py) with recording mappings in the place of its options
(guards/option_recorder.py). What it asks for and may not see yet is admitted, and the run begins anew (exporter.py).
"""

from __future__ import annotations

import copy
import enum
import functools
import types
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..guards import option_recorder, scalar_inputs
from ..guards.call_spec import Flat, Leaves, fields_of, flatten_result, unflatten_call
from ..guards.callback_sites import Sites, Substitute
from ..guards.function_spec import held_by
from ..guards.given_changes import Names, rows_of
from ..guards.list_recorder import RecordedList, hand
from ..guards.option_recorder import ReadSet, Refused
from ..guards.scalar_inputs import Strength, StrengthUsed
from ..guards.sentinels import ValueUsed
from ..guards.tensor_answers import Answers
from ..modules.boundaries import boundaries
from ..modules.channels_last import to_channels_last, weights_for_capture
from ..modules.memory_format import Unsupported
from ..modules.module_keys import is_by_modules
from ..modules.tree import ABSENT, Hidden, WeightSlots, tensors_of
from ..system.torch_modes import default_device
from ..weights.subclass_unwrap import Parts
from .backend_operators import Picks, backends_by_operators
from .boundary_calls import call_as_it_is
from .named_state import NamedState
from .shadow_module import Reads, Shadow, path_of
from .shape_recorder import SizesKeptFree
from .side_effects import (
    ASKS_FOR_THREAD,
    CHANGES_GIVEN,
    HOLDS_BY_MODULES,
    ask_types,
    kept_since,
    numbers_held,
    refuse_counted,
    refuse_counting,
    tensors_held,
)
from .source_hashes import walked
from .subclass_dispatch import own_operators
from .tensor_questions import COMPARES_OTHERS, TensorQuestions, compares_any, compares_functions
from .thread_number import ThreadNumber, holds_thread

if TYPE_CHECKING:
    from .types import Example


class Trace:
    """What one capture needs and finds."""

    def __init__(
        self,
        block: nn.Module,
        example: Example,
        weights: list[torch.Tensor] | None,
        hidden: Hidden,
        images: bool = False,
        told: bool = False,
        device: str | None = None,
    ) -> None:
        """images, device: as for `capture`. told: weights of convolutions are shown with channels innermost."""
        self.block, self.example, self.hidden, self.images = block, example, hidden, images
        self.lays_held = images  # what lies in lists and mappings as well
        absent = {n for shown in hidden.values() for n, value in shown.items() if value is ABSENT}
        self.boundaries = boundaries(block)
        slots = WeightSlots(block, absent, self.boundaries)
        given = weights if weights is not None else slots.read()
        self.names = slots.names
        self.parts = Parts.of(given)  # None: all of them are plain
        self.lasting = slots.parameters if self.parts is None else self.parts.each(slots.parameters)
        plain = self.parts.take(given) if self.parts is not None else given
        assert plain is not None, "they come apart as they just did"
        self.weights = [w.detach() for w in plain]
        self.own: dict[int, torch.Tensor] = {}  # as the module holds them, those that are shown otherwise
        if told and self.parts is None:
            for place, weight in weights_for_capture(block, self.weights, self.names).items():
                self.own[place], self.weights[place] = self.weights[place], weight
        self.reads: Reads = {}
        self.log = ReadSet({})
        self.recordings: list[option_recorder.Recording] = []
        self.admitted: dict[option_recorder.Path, Any] = {}
        self.paths: list[option_recorder.Path] = []  # tensors found in mappings, which become inputs
        self.opened: set[option_recorder.Path] = set()  # lists that are read as a whole
        self.changes: list[list[Any]] = []  # of what it was given
        self.sites = Sites()
        self.output: Any = None
        self.kept: list[torch.Tensor] = []  # what it left on itself; the last outputs of the graph
        self.exchanged: list[str] = []  # and in the place of which tensor of its own; "" where there was none
        self.codes: set[types.CodeType] = set()  # that it ran
        self.picks = Picks()  # of back ends
        self.asked = TensorQuestions(Answers(), images=images)  # besides sizes
        self._real = list(zip(slots.names, slots.read(), strict=True))  # the weights
        self.shadow: Shadow | None = None
        self.device = device  # the default one of the thread that asks for the capture; another one traces
        self.answers: list[tuple[Any, Any, Any]] = []  # what its code was told about sizes
        self._modules = dict(block.named_modules())
        self.state = NamedState(block.modules())
        self.strengths = [
            (path, name, keys)
            for path, name, keys in scalar_inputs.places(block)
            if name not in hidden.get(id(self._modules[path]), ())
        ]

    def asks(self, tensors: list[Any], extra: list[Any], weights: list[Any]) -> TensorQuestions:
        """What its code asks besides sizes is noted in what this gives, of which it is shown these."""
        self.asked = TensorQuestions(self.example.answers, images=self.images)
        each = [(name, one, real) for one, (name, real) in zip(weights, self._real, strict=True)]
        self.asked.of(tensors, list(zip(self.paths, extra, strict=True)), each)
        return self.asked

    def leave_held_as_it_lies(self) -> None:
        """Tensors in lists and mappings are shown as they lie in memory, also where images are laid out anew."""
        self.lays_held = False

    def take_answers(self, answers: list[tuple[Any, Any, Any]]) -> None:
        """What its code is told about sizes comes into this list."""
        self.answers = answers

    def refuse_weights_of_others(self, parameters: list[nn.Parameter]) -> None:
        """Raise Refused where one of them is no weight of the block: a graph would keep its numbers."""
        own = set(map(id, self.block.parameters()))
        if any(id(one) not in own for one in parameters):
            raise Refused("its code uses weights of a module outside of it, whose changes a graph would not see")

    def at_boundary(self, child: nn.Module, kind: type[nn.Module], called: bool, args: Any, kwargs: Any) -> Any:
        """What a submodule gives that carries code of others."""
        return call_as_it_is(self.sites, path_of(child), child, kind, called, args, kwargs)

    def of_boundaries(self) -> list[torch.Tensor]:
        """The weights of submodules that carry code of others, which no graph may hold."""
        called = [self._modules[path] for path in self.boundaries]
        return [tensor for child in called for sub in child.modules() for _, _, tensor in tensors_of(sub)]

    def named(self, key: Any) -> Any:
        """A key of a mapping with the names of the modules that it is made of. Raises Refused for one without."""
        assert self.shadow is not None, "keys are asked for by code that runs on it"
        return self.shadow.named(key)

    def admit(self, path: option_recorder.Path) -> None:
        """Let the block use a value of its options from now on. Raises Refused where no artefact can hold it."""
        value = option_recorder.look(self.example.mappings, path)
        if type(value) is list and self.example.changes:
            self.opened.add(path)
        elif callable(value):
            self.admitted[path] = Substitute(path, value, self.sites)
        elif isinstance(option_recorder.admit(self.example.mappings, path), torch.Tensor):
            self.paths.append(path)
        else:
            self.admitted[path] = value

    def factors(self) -> list[float]:
        """The numbers at `strengths` as they are now."""
        return [scalar_inputs.look(self._modules[path].__dict__[name], keys) for path, name, keys in self.strengths]

    def standing_for(self, factors: list[torch.Tensor]) -> dict[scalar_inputs.Place, Strength]:
        """What the block is shown in their places."""
        each = zip(self.strengths, self.factors(), factors, strict=True)
        return {place: Strength(place, value, factor) for place, value, factor in each}


def contents(value: Any, *, lists: bool = True) -> Any:
    """The identities of what lists and objects among the arguments hold: the caller would see a change of them.

    lists: what lists hold counts as well.
    """
    if isinstance(value, dict) and not isinstance(value, option_recorder.Recording):
        return [(k, contents(v, lists=lists)) for k, v in value.items()]
    if type(value) is RecordedList or (type(value) is list and not lists):
        return id(value)
    if isinstance(value, (list, tuple)):
        return [contents(v, lists=lists) for v in value]
    if type(value).__module__.partition(".")[0] == "torch" or isinstance(
        value, (torch.Tensor, option_recorder.Recording, enum.Enum)
    ):
        return id(value)
    if isinstance(value, types.FunctionType):
        return [contents(one, lists=lists) for one in held_by(value)]
    if isinstance(value, functools.partial):
        return [contents(one, lists=lists) for one in (value.func, value.args, value.keywords)]
    if isinstance(value, types.MethodType):
        return [contents(one, lists=lists) for one in (value.__func__, value.__self__)]
    fields = fields_of(value)
    return id(value) if fields is None else [(k, contents(v, lists=lists)) for k, v in fields.items()]


Kept = list[tuple[tuple[str, str], dict[str, Any], Any]]  # path and name, the attributes where it lies, itself


def _put_in(module: nn.Module, places: Sequence[tuple[str, str, str]], containers: Sequence[Any]) -> Kept:
    """Have a shadow hold what stands for containers of the block's own."""
    found = []
    for (path, name, _), container in zip(places, containers, strict=True):
        table = module.get_submodule(path).__dict__
        table[name] = container
        found.append(((path, name), table, container))
    return found


def is_computed_of(tensor: torch.Tensor, given: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor was made by the trace that is under way, of the numbers of some that it was given.

    One that was made of their sizes was not. Weights are given: several blocks may share what one keeps by name.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    assert mode is not None, "only a trace makes tensors that are asked about"
    slots = [get_proxy_slot(one, mode.tracer, None) for one in (tensor, *given)]
    last, *starts = [None if slot is None else slot.proxy.node for slot in slots]
    due, seen = [last] if last is not None else [], set[Any]()
    while due:
        node = due.pop()
        if node in starts:
            return True
        if node not in seen:
            seen.add(node)
            due += [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), (torch.Tensor, type(None)))]
    return False


class HeldHandedOn(Exception):
    """A block gives what lies in a list, which has to be the very tensor, and no copy that lies otherwise."""


def _shares_memory(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Whether a result is a given tensor or a view of one."""
    theirs = {tensor.untyped_storage()._cdata for tensor in given}
    return any(one.layout is torch.strided and one.untyped_storage()._cdata in theirs for one in results)


def _refuse_others(reads: Reads, kept: Kept) -> None:
    """Raise Refused where others were put in their places; what was read of them is a read of what they hold alone."""
    for place, table, container in kept:
        reads.pop(place, None)
        if table.get(place[1]) is not container:
            raise Refused("it puts another container in the place of one that it keeps things in")


class Lifted(nn.Module):
    """The block as a function of its weights. The block hides in __dict__, so that export finds no parameters."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.__dict__["trace"] = trace  # an object of its own: export puts back what a forward assigns to its module

    def forward(
        self,
        weights: list[torch.Tensor],
        tensors: list[torch.Tensor],
        extra: list[Any],
        ints: list[int],
        factors: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        trace: Trace = self.__dict__["trace"]
        given = copy.deepcopy(trace.admitted)  # lists are shown to the block, which might change them
        shown = {**given, **dict(zip(trace.paths, extra, strict=True))}
        log = trace.log = ReadSet(shown, hand if trace.example.changes else None, trace.opened, trace.named)
        try:
            found = self._run(trace, log, given, weights, tensors, extra, ints, factors)
        except Exception:
            if log.wanted:  # it went on with what it may not see yet
                raise ValueUsed(*log.wanted) from None
            raise
        if log.wanted:
            raise ValueUsed(*log.wanted)
        return found

    def _run(
        self,
        trace: Trace,
        log: ReadSet,
        given: dict[option_recorder.Path, Any],
        weights: list[torch.Tensor],
        tensors: list[torch.Tensor],
        extra: list[Any],
        ints: list[int],
        factors: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        recordings: list[Any] = [
            RecordedList(m, (i,), log) if type(m) is list else option_recorder.Recording(m, (i,), log)
            for i, m in enumerate(trace.example.mappings)
        ]
        trace.recordings = [one for one in recordings if not isinstance(one, RecordedList)]
        own = recordings[len(recordings) - len(trace.example.own) :]
        trace.sites.begin(log)
        args, kwargs = unflatten_call(trace.example.spec, Leaves(tensors, ints, recordings))
        before = contents((args, kwargs))
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        try:
            whole = trace.parts.together(weights) if trace.parts is not None else weights
            standing = trace.standing_for(factors)
            shadow = trace.shadow = Shadow(
                trace.block, whole, trace.hidden, standing, trace.boundaries, trace.at_boundary
            )
            kept = _put_in(shadow.module, trace.example.own, own)
            trace.reads, before_it = shadow.reads, tensors_held(shadow.module)
            counted = numbers_held(shadow.module)
            calls = SizesKeptFree()
            thread = ThreadNumber(trace.example.thread)
            asked = trace.asks(tensors, extra, whole)
            scopes = (calls, own_operators(), default_device(trace.device), thread.told(), asked.told())
            of_given = functools.partial(is_computed_of, given=[*tensors, *extra, *weights])
            with trace.state.kept(lambda: trace.codes, of_given), walked() as trace.codes, ExitStack() as stack:
                for scope in scopes:
                    stack.enter_context(scope)
                trace.picks = stack.enter_context(backends_by_operators())
                # not by a call of the module: fx takes those over, with a parameter `mod` that may be the block's too
                result = shadow.module.forward(*args, **kwargs)
            shadow.settle()
            refuse_counted(counted)
            trace.refuse_weights_of_others(calls.parameters)
            asks_types = ask_types(trace.codes)
            shown = [path for path, kind in log.kinds.items() if kind == "int"] if asks_types else []
            compares = any(map(compares_any, trace.codes))
            if compares or asks_types:
                shown += log.stood_for(foreign=compares)
            substituted = any(type(one) is Substitute for one in trace.admitted.values())
            if substituted and any(map(compares_functions, trace.codes)):
                raise Refused(COMPARES_OTHERS)
            if shown:  # from now on as they are
                raise ValueUsed(*shown)
            _refuse_others(trace.reads, kept)
            # what it reads is a guard by its value, which would hold for another thread; containers that are leaves of
            # the call say which entry is this thread's own
            if thread.asked and (not trace.example.changes or any(map(holds_thread, trace.reads.values()))):
                raise Refused(ASKS_FOR_THREAD)
            if any(map(is_by_modules, trace.reads.values())):
                raise Refused(HOLDS_BY_MODULES)
        except GuardOnDataDependentSymNode as error:  # export would print its graph on the user's terminal
            raise Refused("its code branches on the value of a tensor, which no graph holds") from error
        except RuntimeError as error:
            if ".numpy() is not supported" not in str(error):
                raise
            raise Refused("its code takes the values of a tensor out for numpy, which no graph holds") from error
        for place, strength in standing.items():
            if strength.used:
                raise StrengthUsed(place)
        if contents((args, kwargs)) != before or given != trace.admitted:
            raise Refused(CHANGES_GIVEN)
        flat = Flat()
        try:
            where = next((tensor.device for tensor in (*tensors, *weights)), torch.device("cpu"))
            trace.output = flatten_result(result, flat, where)
        except Unsupported as reason:
            raise Refused(f"it returns {reason}") from None
        if trace.lays_held and _shares_memory(flat.tensors, extra):
            raise HeldHandedOn
        if trace.example.changes:
            held = {id(tensor): path for path, tensor in zip(trace.paths, extra, strict=True)}
            trace.changes = rows_of(log.changes, Names(tensors, held, flat.tensors, log.key))
        results, every = [*flat.tensors, *tensors, *extra], WeightSlots(trace.block).read()
        asked.finish(trace.codes, results, trace.example.spec, trace.reads, every)
        if len(flat.tensors) == len(flat.ints):  # those that carry numbers
            raise Refused("it returns no tensor")
        refuse_counting(trace.reads, shadow.module)
        trace.kept, trace.exchanged = kept_since(before_it, shadow.module)
        others = [*weights, *tensors, *extra, *trace.kept]
        return (to_channels_last(flat.tensors, others) if trace.images else flat.tensors) + trace.kept
