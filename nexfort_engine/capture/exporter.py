# SPDX-License-Identifier: Apache-2.0
"""Block -> graph: one repeated block captured once, with its weights as arguments and its sizes as symbols.

The way is torch.export in non-strict mode over the block's own Python code. What is added here: weights, buffers and
plain tensor attributes become inputs; mappings are recorded (guards/option_recorder.py), attribute reads are recorded
(shadow_module.py); the sizes, relations and ranges that the trace took for granted become conditions
(shape_recorder.py); what it does besides computing its result is listed or refused (side_effects.py); the source files
of the code that was walked through are listed with their hashes (source_hashes.py).

Nothing is lowered here, and the module is the same after as before, also when the capture fails.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any

import torch
from torch import nn

from ..guards import module_guards, option_recorder
from ..guards.call_spec import Flat, functions_in, spec_text
from ..guards.callback_sites import settled
from ..guards.collectives import facts_of, group_names, names_a_rank
from ..guards.name_resolver import Row
from ..guards.option_guards import to_json
from ..guards.option_recorder import Refused
from ..guards.scalar_inputs import Strength, StrengthUsed
from ..guards.sentinels import ValueUsed
from ..modules.boundaries import uncapturable
from ..modules.channels_last import as_held, copy_to_channels_last, is_of_order, only_convolved
from ..modules.memory_format import kind_of
from ..modules.regions import most_alike
from ..modules.tree import Hidden
from ..system.process_settings import tracing_scope
from ..system.random_state import drawn_aside
from ..system.traced_thread import own_pre_dispatch_modes
from .collectives import take_over
from .division_facts import few_simplified
from .graph_inputs import Placeholders
from .reached_names import rows_of
from .shape_recorder import check, computes_with_chosen_scale, conditions_of, noted, settle
from .side_effects import mapping_writes, refuse_random, refuse_strides, take_out_kept
from .source_hashes import hashes, operator_modules
from .trace import HeldHandedOn, Lifted, Trace
from .types import LOCK, Captured, Example
from .whole_numbers import Numbers, positive_sizes

_MAX_ADMISSIONS = 64
_MANY_LAYERS = 6  # of equal ones in a block; the same sizes come so often then that it pays to remember results' sizes


def capture(
    module: nn.Module,
    example: Example,
    *,
    dynamic: bool = True,
    weights: list[torch.Tensor] | None = None,
    hidden: Hidden | None = None,
    images: bool = False,
    device: str | None = None,
) -> Captured:
    """Capture one block at one example call.

    weights: what stands for the block's own, in the order of WeightSlots; hidden: see Shadow.
    images: they lie with channels innermost, in the graph and among its results (modules/channels_last.py). device: the
    default one. dynamic: sizes of 2 and more become symbols; otherwise every size is fixed. Raises Refused with the
    reason where no artefact can stand for the block; anything torch raises while tracing passes through.
    """
    reason = uncapturable(module)
    if reason:
        raise Refused(f"it carries {reason}")
    given = (module, example, dynamic, weights, hidden or {}, images, device)
    if images:
        try:
            return _captured(*given, told=True)
        except Exception as error:
            if not is_of_order(error):
                raise
    return _captured(*given, told=False)


def _captured(
    module: nn.Module,
    example: Example,
    dynamic: bool,
    weights: list[torch.Tensor] | None,
    hidden: Hidden,
    images: bool,
    device: str | None,
    *,
    told: bool,
) -> Captured:
    begin = functools.partial(Trace, module, example, weights, hidden, images, told, device)
    trace, numbers = begin(), Numbers()
    try:
        # under inference mode the trace's tensors would be inference tensors, which refuse in-place code
        with LOCK, torch.inference_mode(False):
            program = _export(trace, dynamic, numbers)
            if dynamic and example.ints:
                # a number that may vary is no `int` to code that asks `isinstance`: see what it does with the number
                fixed = _tensor_ops(program)
                for wanted in dict.fromkeys((Numbers.all_free(example.ints), Numbers.sizes_free(example.ints))):
                    found = _with_numbers(begin, wanted) if wanted.free else None
                    if found is not None and _alike(_tensor_ops(found[0]), fixed):
                        program, trace, numbers = found
                        break
        return _finish(program, trace, numbers)
    except Exception as error:
        # what the failure depended on
        error.guards, error.names = _guards_so_far(trace), _names_so_far(trace)  # type: ignore[attr-defined]
        raise


def _with_numbers(
    begin: Callable[[], Trace], numbers: Numbers
) -> tuple[torch.export.ExportedProgram, Trace, Numbers] | None:
    """The program in which these numbers are free, traced anew where it shows more of them; None where code objects."""
    try:
        for _ in range(2):
            trace = begin()
            program = _export(trace, True, numbers)
            before, numbers = numbers, numbers.told_by(program, _inputs(program, trace).ints)
            if numbers == before:
                return program, trace, numbers
        trace = begin()
        return _export(trace, True, numbers), trace, numbers
    except (AssertionError, AttributeError, TypeError, ValueError, RuntimeError):
        return None  # what stands for a number has not all that a number has


def _inputs(program: torch.export.ExportedProgram, trace: Trace) -> Placeholders:
    example = trace.example
    return Placeholders.of(program, len(trace.weights), len(example.tensors), len(trace.paths), len(example.ints))


def _export(trace: Trace, dynamic: bool, numbers: Numbers) -> torch.export.ExportedProgram:
    example = trace.example
    tensors = [_without_data(*meta) for meta in example.tensors]
    scales, alike = True, most_alike(trace.block) >= _MANY_LAYERS
    for _ in range(_MAX_ADMISSIONS):
        options = [look_tensor(example.mappings, p, trace.lays_held) for p in trace.paths]
        factors = [torch.tensor(value, dtype=torch.float32) for value in trace.factors()]
        args = (trace.weights, tensors, options, list(example.ints), factors)
        try:
            with (
                _hooks_taken_out(),
                tracing_scope(alike=alike),
                positive_sizes(numbers),
                few_simplified(),
                noted(scales) as answers,
            ):
                trace.take_answers(answers)
                program = _on_tracing_thread(_trace, trace, args, _dims(args, dynamic, numbers))
            if not (scales and computes_with_chosen_scale(program)):
                return program
            scales = False
        except ValueUsed as used:
            for path in (used.path, *used.further):
                trace.admit(path)
        except HeldHandedOn:
            trace.leave_held_as_it_lies()
        except StrengthUsed as used_as_it_is:
            trace.strengths.remove(used_as_it_is.place)
        except Exception as error:
            # what stands for a number is none to C code, or to code that asks for its exact type
            if not trace.strengths or not (isinstance(error, TypeError) or Strength.__name__ in str(error)):
                raise
            trace.strengths.clear()
    raise Refused(f"it uses more than {_MAX_ADMISSIONS} values of the options it is given")


def _without_data(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor whose memory went at once. A trace looks at sizes alone, and a call may be given most of a video."""
    tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def _trace(trace: Trace, args: Any, dims: Any) -> torch.export.ExportedProgram:
    with torch.no_grad(), own_pre_dispatch_modes(), drawn_aside():
        return torch.export.export(Lifted(trace), args, dynamic_shapes=dims, strict=False)


def _on_tracing_thread(call: Callable[..., Any], *args: Any) -> Any:
    """Run a trace on the one thread that does so as long as the process lives.

    torch 2.11 leaves something of the first thread that traces behind, and crashes when another traces after that one
    ended; hosts run each prompt or each device on threads that come and go.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> Any:
        if device is not None:
            torch.cuda.set_device(device)
        return call(*args)

    future = _tracing_thread().submit(copy_context().run, run)
    try:
        return future.result()
    except BaseException:
        wait([future])  # an interrupt of the caller: settings must not be put back while it traces
        raise
    finally:
        del future  # its error holds on to this frame, and both to all that was traced


@functools.cache
def _tracing_thread() -> ThreadPoolExecutor:
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nexfort-tracing")
    thread.submit(int)  # it begins here, or RuntimeError: what is given to one that cannot begin would wait in it
    return thread


@contextlib.contextmanager
def _hooks_taken_out() -> Iterator[None]:
    """Take out the process-wide hook on buffers that a failed export leaves behind: it holds the block for good."""
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = set(hooks)
    try:
        yield
    finally:
        for key in [k for k, hook in hooks.items() if k not in before and hook.__module__.startswith("torch.")]:
            del hooks[key]


def _guards_so_far(trace: Trace) -> list[list[Any]]:
    try:
        return to_json(trace.log)
    except Refused:
        return []


def _names_so_far(trace: Trace) -> list[Row]:
    try:
        return _names(trace)[0]
    except Refused:
        return []


def _names(trace: Trace) -> tuple[list[Row], str]:
    functions = functions_in(trace.example.spec)
    return rows_of(trace.block, trace.codes, trace.reads, _on_tracing_thread, functions, trace.picks.unread)


def look_tensor(mappings: Sequence[dict[Any, Any]], path: option_recorder.Path, laid: bool) -> torch.Tensor:
    """The tensor at a path of the call's mappings, as an input of the graph. laid: as `images` of `as_held`."""
    found = option_recorder.look(list(mappings), path).detach()
    if found.untyped_storage().nbytes() < found.nbytes:  # it stands for one (Example)
        dense = as_held(torch.empty(found.shape, dtype=found.dtype, device="meta"), laid)
        return _without_data(found.shape, dense.stride(), found.dtype, found.device)
    return as_held(found, laid)


def _tensor_ops(program: torch.export.ExportedProgram) -> list[tuple[str, Sequence[Any]]]:
    """The operators on tensors with their arguments.

    Indexing with plain numbers leaves slices of everything and aliases behind, others do not. A slice that ends where
    its tensor ends is an operator where the end is a number that may vary, and nothing where it is fixed.
    """
    aten = torch.ops.aten
    nodes = [n for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    whole = {n for n in nodes if n.target is aten.slice.Tensor and _shape_at_example(n) == _shape_at_example(n.args[0])}
    kept = [n for n in nodes if n not in whole and n.target is not aten.alias.default]
    return [(str(n.target), [*n.args, *n.kwargs.values()]) for n in kept]


def _shape_at_example(node: Any) -> list[int]:
    """The sizes of a node's tensor in the call that is captured; of what a tensor holds, its symbol."""
    sizes = node.meta["val"].shape
    return [s if isinstance(s, int) else s.node.hint if s.node.has_hint() else s.node.expr for s in sizes]


def _alike(one: list[tuple[str, Sequence[Any]]], other: list[tuple[str, Sequence[Any]]]) -> bool:
    """Whether two programs are the same but for what they compute themselves; defaults may be written out in one."""
    return [name for name, _ in one] == [name for name, _ in other] and all(
        all(map(_same, mine, theirs)) for (_, mine), (_, theirs) in zip(one, other, strict=True)
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    computed = any(value is None or isinstance(value, torch.fx.Node) for value in (one, other))  # None: a default
    return computed or one == other


def _dims(args: tuple[list[Any], ...], dynamic: bool, numbers: Numbers) -> Any:
    auto = torch.export.Dim.AUTO

    def of(tensor: torch.Tensor) -> Any:
        return {i: auto for i, size in enumerate(tensor.shape) if size > 1} if dynamic else {}

    weights, tensors, extra, ints, factors = args
    free = [auto if i in numbers.free else None for i in range(len(ints))]
    return [{} for _ in weights], [of(t) for t in tensors], [of(t) for t in extra], free, [{} for _ in factors]


def _finish(program: torch.export.ExportedProgram, trace: Trace, numbers: Numbers) -> Captured:
    graph, example = program.graph_module, trace.example
    if example.changes and not any(node.op == "call_function" for node in graph.graph.nodes):
        raise Refused("it computes nothing when it is called so")
    refuse_random(graph)
    settle(program)
    names = trace.names if trace.parts is None else []
    take_out_kept(graph, [names.index(e) if e in names else None for e in trace.exchanged])
    groups = take_over(graph, group_names(trace.block, trace.reads))
    inputs = _inputs(program, trace)
    refuse_strides(graph, [*inputs.tensors, *inputs.options])
    own = {w.data_ptr() for w in (*trace.weights, *trace.of_boundaries()) if w.numel()}
    if any(value.data_ptr() in own for _, value in inputs.constants):
        raise Refused("its code reaches its weights past its own attributes, so that a graph would keep them")
    for place, weight in trace.own.items():
        if not only_convolved(inputs.weights[place]):
            raise RuntimeError("its code may look at how a convolution's weight lies in memory: its strides are shown")
        if inputs.weights[place].users:
            copy_to_channels_last(graph, inputs.weights[place], weight)
    tensors = inputs.used(inputs.tensors)
    if any(node in inputs.written for node in inputs.options):
        raise Refused("it writes to a tensor of its options, whose caller would not see it")
    # over every tensor and number that the code had: it may ask for sizes of one that its graph never uses
    held = [look_tensor(example.mappings, path, trace.lays_held) for path in trace.paths]
    conditions = conditions_of(program, [*inputs.tensors, *inputs.options], inputs.ints, trace.answers, numbers)
    check(
        conditions,
        [size for size, *_ in example.tensors] + [one.shape for one in held],
        example.ints,
    )
    writes = []
    if not example.changes:
        writes = mapping_writes(trace.recordings, trace.log.nested, {i: inputs.tensors[i] for i in tensors})
    reached, only_here = _names(trace)
    weights, ints, factors = map(inputs.used, (inputs.weights, inputs.ints, inputs.strengths))
    inputs.tidy(graph, keep=inputs.options)
    return Captured(
        graph=graph,
        weights=weights,
        constants=[value for _, value in inputs.constants],
        tensors=tensors,
        options=list(trace.paths),
        ints=ints,
        strengths=[trace.strengths[i] for i in factors],
        conditions=conditions,
        guards=to_json(trace.log),
        reads=module_guards.rows_of(trace.reads),
        output=trace.output,
        mutated=[tensors.index(i) for i in tensors if inputs.tensors[i] in inputs.written],
        by_strides=[tensors.index(i) for i in tensors if inputs.written.get(inputs.tensors[i])],
        writes=writes,
        sources=hashes(trace.codes, trace.block),
        modules=operator_modules(graph),
        lasting=[trace.lasting[i] for i in weights],
        option_kinds=[kind_of(one) for one in held],
        sites=settled(graph, trace.sites.rows, [inputs.weights[i] for i in weights]),
        boundaries=list(trace.boundaries),
        groups=_facts(groups, trace),
        images=trace.images,
        lays_held=trace.lays_held,
        names=reached,
        only_here=only_here,
        changes=trace.changes,
        asked=trace.asked.rows,
    )


def _facts(groups: list[int], trace: Trace) -> list[list[int]]:
    """What the graph rests on of the groups that it speaks in."""
    if not groups:
        return []
    names, ranks = group_names(trace.block, trace.reads), names_a_rank(trace.codes)
    facts = facts_of(groups, names, ranks=ranks)
    assert facts is not None, "the groups were found a moment ago"
    return facts


def spec_key(spec: Any, flat: Flat, metas: Sequence[Any]) -> list[Any]:
    """The call's part of the primary key: structure, dtypes, ranks, memory formats; no sizes."""
    return [spec_text(spec), [list(m) for m in metas], len(flat.ints), len(flat.mappings)]
