# SPDX-License-Identifier: Apache-2.0
"""Block -> graph: one repeated block captured once, with its weights as arguments and its sizes as symbols.

The way is torch.export in non-strict mode over the block's own Python code. What is added here: weights, buffers and
plain tensor attributes become inputs; mappings are recorded (readset.py), attribute reads are recorded
(modulestate.py); the sizes, relations and ranges that the trace took for granted become conditions (conditions.py);
the source files of the code that was walked through are listed with their hashes.

Nothing is lowered here, and the module is the same after as before, also when the capture fails.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import modulestate, readset
from .branches import noted, relations
from .conditions import Conditions, Dim
from .readset import ReadSet, Refused, ValueUsed
from .signature import Flat, Leaves, Unsupported, flatten, spec_text, unflatten_call
from .sources import hashes, operator_modules, walked

LOCK = threading.RLock()  # export, attribute recording and Inductor's settings are process-wide: one at a time
_MAX_CONSTANT = 1 << 16  # elements; a larger tensor from outside the block is data that may change
_MAX_ADMISSIONS = 64


@dataclass
class Example:
    """One call of a block, enough to capture it: the structure, and sizes in place of tensors."""

    spec: Any
    tensors: list[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]]
    ints: list[int]
    mappings: list[dict[Any, Any]]

    @classmethod
    def of(cls, spec: Any, flat: Flat) -> Example:
        metas = [(t.shape, t.stride(), t.dtype, t.device) for t in flat.tensors]
        return cls(spec, metas, list(flat.ints), [dict(m) for m in flat.mappings])


@dataclass
class Captured:
    """A graph and everything that must be checked before its artefact is used.

    graph inputs, in order: the weights in `weights` (indices of WeightSlots), `constants`, the tensors in `tensors`
    (indices of the call's), the option tensors in `options` (paths), the ints in `ints` (indices).
    """

    graph: torch.fx.GraphModule
    weights: list[int]
    constants: list[torch.Tensor]
    tensors: list[int]
    options: list[readset.Path]
    ints: list[int]
    conditions: Conditions
    guards: list[list[Any]]
    reads: list[list[Any]]
    output: Any
    mutated: list[int]
    writes: list[list[Any]]
    sources: dict[str, str]
    modules: list[str] = field(default_factory=list)


class _Trace:
    """What one capture needs and finds."""

    def __init__(self, block: nn.Module, slots: modulestate.WeightSlots, example: Example) -> None:
        self.block, self.slots, self.example = block, slots, example
        self.log = ReadSet({})
        self.recordings: list[readset.Recording] = []
        self.admitted: dict[readset.Path, Any] = {}
        self.paths: list[readset.Path] = []  # tensors found in mappings, which become inputs
        self.output: Any = None
        self.files: set[str] = set()  # whose code it ran through
        self.answers: list[tuple[Any, Any, Any]] = []  # what its code was told about sizes


def _contents(value: Any) -> Any:
    """The identities of what lists and objects among the arguments hold: the caller would see a change of them."""
    if isinstance(value, dict) and not isinstance(value, readset.Recording):
        return [(k, _contents(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [_contents(v) for v in value]
    if type(value).__module__.partition(".")[0] == "torch" or isinstance(value, (torch.Tensor, readset.Recording)):
        return id(value)
    if not hasattr(value, "__dict__"):
        return id(value)
    return [(k, _contents(v)) for k, v in value.__dict__.items()]


class _Lifted(nn.Module):
    """The block as a function of its weights. The block hides in __dict__, so that export finds no parameters."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.__dict__["trace"] = trace  # an object of its own: export puts back what a forward assigns to its module

    def forward(self, weights: list[torch.Tensor], tensors: list[torch.Tensor], extra: list[Any], ints: list[int]):
        trace: _Trace = self.__dict__["trace"]
        given = copy.deepcopy(trace.admitted)  # lists are shown to the block, which might change them
        log = trace.log = ReadSet({**given, **dict(zip(trace.paths, extra, strict=True))})
        recordings = [readset.Recording(m, (i,), log) for i, m in enumerate(trace.example.mappings)]
        trace.recordings = recordings
        args, kwargs = unflatten_call(trace.example.spec, Leaves(tensors, ints, recordings))
        before = _contents((args, kwargs))
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        try:
            with trace.slots.replaced(weights), walked() as trace.files:
                result = trace.block(*args, **kwargs)
        except GuardOnDataDependentSymNode as error:  # export would print its graph on the user's terminal
            raise Refused("its code branches on the value of a tensor, which no graph holds") from error
        if _contents((args, kwargs)) != before or given != trace.admitted:
            raise Refused("it changes a list or an object that it is given")
        flat = Flat()
        try:
            trace.output = flatten(result, flat)
        except Unsupported as reason:
            raise Refused(f"it returns {reason}") from None
        if flat.mappings:
            raise Refused("it returns a mapping")
        if not flat.tensors:
            raise Refused("it returns no tensor")
        if flat.ints:
            raise Refused("it returns a number")
        return flat.tensors


def capture(module: nn.Module, example: Example, *, dynamic: bool = True) -> Captured:
    """Capture one block at one example call.

    dynamic: sizes of 2 and more become symbols; otherwise every size is fixed. Raises Refused with the reason where no
    artefact can stand for the block; anything torch raises while tracing passes through.
    """
    reason = modulestate.foreign(module)
    if reason:
        raise Refused(f"it carries {reason}")
    slots = modulestate.WeightSlots(module)
    trace = _Trace(module, slots, example)
    try:
        # under inference mode the trace's tensors would be inference tensors, which refuse in-place code
        with LOCK, torch.inference_mode(False), modulestate.recording(module) as reads:
            program = _export(trace, dynamic, dynamic)
            if dynamic and example.ints:
                # a number that may vary is no `int` to code that asks `isinstance`: see what it does with the number
                other = _Trace(module, slots, example)
                fixed = _export(other, dynamic, False)
                if _tensor_ops(program) != _tensor_ops(fixed):
                    program, trace = fixed, other
        return _finish(program, trace, modulestate.rows_of(reads))
    except Exception as error:
        error.guards = _guards_so_far(trace)  # type: ignore[attr-defined]  # what the failure depended on
        raise


def _export(trace: _Trace, dynamic: bool, numbers: bool) -> torch.export.ExportedProgram:
    example = trace.example
    weights = [_plain(w) for w in trace.slots.read()]
    tensors = [torch.empty_strided(s, st, dtype=dt, device=dev) for s, st, dt, dev in example.tensors]
    for _ in range(_MAX_ADMISSIONS):
        args = (weights, tensors, [look_tensor(example.mappings, p) for p in trace.paths], list(example.ints))
        try:
            with _hooks_taken_out(), noted() as trace.answers:
                return _on_tracing_thread(_trace, trace, args, _dims(args, dynamic, numbers))
        except ValueUsed as used:
            value = readset.admit(example.mappings, used.path)
            if isinstance(value, torch.Tensor):
                trace.paths.append(used.path)
            else:
                trace.admitted[used.path] = value
    raise Refused(f"it uses more than {_MAX_ADMISSIONS} values of the options it is given")


def _trace(trace: _Trace, args: Any, dims: Any) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(_Lifted(trace), args, dynamic_shapes=dims, strict=False)


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
        wait([future])  # an interrupt of the caller: the block must not be put back while it is traced
        raise


@functools.cache
def _tracing_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="nexfort-tracing")


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


def _guards_so_far(trace: _Trace) -> list[list[Any]]:
    try:
        return readset.to_json(trace.log)
    except Refused:
        return []


def look_tensor(mappings: Sequence[dict[Any, Any]], path: readset.Path) -> torch.Tensor:
    """The tensor at a path of the call's mappings, as an input of the graph."""
    return readset.look(list(mappings), path).detach().contiguous()


def _plain(weight: torch.Tensor) -> torch.Tensor:
    if type(weight) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise Refused(f"a weight is a {type(weight).__qualname__}, not a plain tensor")
    return weight.detach()


def _tensor_ops(program: torch.export.ExportedProgram) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _dims(args: tuple[list[Any], ...], dynamic: bool, numbers: bool) -> Any:
    auto = torch.export.Dim.AUTO

    def of(tensor: torch.Tensor) -> Any:
        return {i: auto for i, size in enumerate(tensor.shape) if size > 1} if dynamic else {}

    weights, tensors, extra, ints = args
    free = [auto if numbers and number > 1 else None for number in ints]
    return [{} for _ in weights], [of(t) for t in tensors], [of(t) for t in extra], free


def _finish(program: torch.export.ExportedProgram, trace: _Trace, rows: list[list[Any]]) -> Captured:
    graph = program.graph_module
    holders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    constants = _constants(program, holders)
    n_weights, n_tensors, n_extra = len(trace.slots.names), len(trace.example.tensors), len(trace.paths)
    _refuse_random(graph)
    mutated = _mutated(graph, holders)
    inputs = holders[len(constants) :]
    groups = [
        inputs[:n_weights],
        inputs[n_weights : n_weights + n_tensors],
        inputs[n_weights + n_tensors : n_weights + n_tensors + n_extra],
        inputs[n_weights + n_tensors + n_extra :],
    ]
    kept = [[i for i, node in enumerate(group) if node.users or node in mutated] for group in groups]
    if any(groups[0][i] in mutated for i in kept[0]):
        raise Refused("it changes its own weights or buffers")
    conditions = _conditions(groups, kept, program, trace)
    _check(conditions, trace, kept)
    writes = _writes(trace.recordings, groups, kept)
    if any(inner.written or inner.removed for inner in trace.log.nested):
        raise Refused("it changes a mapping inside the options it is given")
    for group, keep in zip(groups, kept, strict=True):
        for i, node in enumerate(group):
            if i not in keep:
                graph.graph.erase_node(node)
    _order(graph, constants, groups, kept)
    graph.recompile()
    return Captured(
        graph=graph,
        weights=kept[0],
        constants=[value for _, value in constants],
        tensors=kept[1],
        options=[trace.paths[i] for i in kept[2]],
        ints=kept[3],
        conditions=conditions,
        guards=readset.to_json(trace.log),
        reads=rows,
        output=trace.output,
        mutated=[kept[1].index(i) for i in kept[1] if groups[1][i] in mutated],
        writes=writes,
        sources=hashes(trace.files, trace.block),
        modules=operator_modules(graph),
    )


def _constants(
    program: torch.export.ExportedProgram, holders: list[torch.fx.Node]
) -> list[tuple[torch.fx.Node, torch.Tensor]]:
    """Literal tensors of the code (`torch.tensor(0.5)`), which export lifts to leading inputs."""
    names = program.graph_signature.inputs_to_lifted_tensor_constants
    found = []
    for node in holders:
        if node.name in names:
            value = program.constants[names[node.name]]
            if value.numel() > _MAX_CONSTANT:
                raise Refused(f"it uses a tensor of {value.numel()} elements that is neither weight nor argument")
            found.append((node, value.detach()))
    return found


def _order(graph: torch.fx.GraphModule, constants: Any, groups: Any, kept: Any) -> None:
    """Bring the placeholders into the order that Captured documents: weights first, constants after them."""
    nodes = [groups[0][i] for i in kept[0]] + [node for node, _ in constants]
    first = next((n for n in graph.graph.nodes if n.op == "placeholder"), None)
    for node in reversed(nodes):
        if node is not first:
            first.prepend(node)  # type: ignore[union-attr]
            first = node


def _refuse_random(graph: torch.fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            if _dropout_of(node) == 0.0:
                continue  # attention without dropout carries the tag as well
            raise Refused(f"it draws random numbers ({node.target}), which compiled code would draw differently")


def _dropout_of(node: torch.fx.Node) -> float | None:
    """The dropout probability an operator is called with; 0 outside training; None where it has none."""
    given = dict(node.kwargs)
    for arg, declared in zip(node.args, node.target._schema.arguments, strict=False):  # type: ignore[union-attr]
        given[declared.name] = arg
    for declared in node.target._schema.arguments:  # type: ignore[union-attr]
        if declared.name in ("dropout_p", "p"):
            if given.get("train") is False or given.get("training") is False:
                return 0.0
            return given.get(declared.name, declared.default_value)  # type: ignore[return-value]
    return None


def _mutated(graph: torch.fx.GraphModule, holders: list[torch.fx.Node]) -> set[torch.fx.Node]:
    """The inputs that the graph writes to, also through views of them."""
    found = set()
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for arg, declared in zip(node.args, schema.arguments, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                root = arg
                while isinstance(root, torch.fx.Node) and root.op == "call_function" and _is_view(root):
                    root = root.args[0]
                if root in holders:
                    found.add(root)
    return found


def _is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.args:
        return False
    first = schema.arguments[0].alias_info
    return first is not None or str(node.target).startswith(("aten.reshape", "aten.contiguous", "aten.to."))


def _dim_text(size: Any) -> Dim:
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_number else _print(expr)


def _print(expr: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    return PythonPrinter().doprint(expr)


def _conditions(groups: Any, kept: Any, program: torch.export.ExportedProgram, trace: _Trace) -> Conditions:
    """Conditions over every tensor and number of the call: code may branch on sizes of inputs its graph never uses."""
    tensors = [*groups[1], *[groups[2][i] for i in kept[2]]]
    shapes = [[_dim_text(s) for s in node.meta["val"].shape] for node in tensors]
    ints: list[Dim] = []
    for node in groups[3]:
        value = node.meta["val"]
        ints.append(value if isinstance(value, int) else _dim_text(value))
    env = _shape_env(groups)
    ranges: dict[str, list[int | None]] = {}
    guards: list[str] = []
    if env is not None:
        for symbol, bound in program.range_constraints.items():
            low = int(bound.lower) if bound.lower.is_number and int(bound.lower) > 2 else None
            high = int(bound.upper) if getattr(bound.upper, "is_Integer", False) and bound.upper < 2**62 else None
            ranges[str(symbol)] = [low, high]
        guards = _guards(env, relations(env, trace.answers))
    conditions = Conditions(shapes, ints, ranges, guards)
    if conditions.unbound():
        raise Refused(f"the sizes of its inputs depend on each other in a way that cannot be checked: {shapes}")
    return conditions


def _check(conditions: Conditions, trace: _Trace, kept: Any) -> None:
    """The call that was captured must fit its own conditions. Raises Refused where they cannot be evaluated."""
    shapes = [size for size, *_ in trace.example.tensors]
    shapes += [look_tensor(trace.example.mappings, trace.paths[i]).shape for i in kept[2]]
    try:
        reason = conditions.broken(shapes, trace.example.ints)
    except (ValueError, ArithmeticError) as error:
        reason = str(error)
    if reason:
        raise Refused(f"the sizes it was captured at do not fit what the capture took for granted: {reason}")


def _shape_env(groups: Any) -> Any:
    for group in groups:
        for node in group:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
                return value.fake_mode.shape_env
    return None


def _guards(env: Any, answers: list[Any]) -> list[str]:
    """The relations that must hold: every one that the block's own code branched on, and equalities of torch's.

    Torch's inner inequalities (is this dimension 1, is that stride larger) choose between equal results and are
    stricter than the lowered code: one measured family would be refused at batch 1 for nothing.
    """
    import sympy

    torch_folder = str(Path(torch.__file__).parent)
    found: dict[str, None] = {}
    for guard in env.guards:
        expr = env.replace(guard.expr)
        if expr in (True, sympy.true) or getattr(expr, "is_number", False):
            continue
        frame = guard.sloc.framework_loc
        inside = frame is None or str(getattr(frame, "filename", frame)).startswith(torch_folder)
        if inside and not isinstance(expr, sympy.Eq):
            continue
        found[_print(expr)] = None
    for expr in answers:
        if not (expr in (True, sympy.true) or getattr(expr, "is_number", False)):
            found[_print(expr)] = None
    return list(found)


def _writes(recordings: list[readset.Recording], groups: Any, kept: Any) -> list[list[Any]]:
    """What the block writes into its caller's mappings and can be written again: plain values, and sizes of inputs."""
    places: dict[str, list[int]] = {}
    for i in kept[1]:
        for d, size in enumerate(groups[1][i].meta["val"].shape):
            if not isinstance(size, int):
                places.setdefault(str(size.node.expr), [i, d])
    rows = []
    for number, recording in enumerate(recordings):
        if recording.removed:
            raise Refused(f"it takes {sorted(map(str, recording.removed))} out of the options it is given")
        for key, value in recording.written.items():
            text = _write_value(value, places)
            if text is None or type(key) is not str:
                raise Refused(f"it writes {key!r} into the options it is given, which could not be written again")
            rows.append([number, key, text])
    return rows


def _write_value(value: Any, places: dict[str, list[int]]) -> Any:
    if isinstance(value, torch.SymInt):
        place = places.get(str(value.node.expr))
        return {"size": place} if place else ({"plain": int(value)} if value.node.expr.is_number else None)
    if isinstance(value, (list, tuple)):
        parts = [_write_value(v, places) for v in value]
        return None if None in parts else {"tuple" if isinstance(value, tuple) else "list": parts}
    return {"plain": value} if type(value) in readset.PLAIN else None


def spec_key(spec: Any, flat: Flat, metas: Sequence[Any]) -> list[Any]:
    """The call's part of the primary key: structure, dtypes, ranks, memory formats; no sizes."""
    return [spec_text(spec), [list(m) for m in metas], len(flat.ints), len(flat.mappings)]
