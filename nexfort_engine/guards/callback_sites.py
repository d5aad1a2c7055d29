# SPDX-License-Identifier: Apache-2.0
"""Sites: the places in a block from which functions of its options are called, found while the block is captured.

What a function gets there is written down as JSON: which of the graph's tensors, which numbers and options, and the
block's own function whose place it takes. callbacks.py puts it together again when the artefact runs.
"""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..modules.tree import PLAIN
from .callbacks import MODULE, Row, describe_target, named, operator
from .option_guards import json_path
from .option_recorder import BOOKKEEPING, Path, ReadSet, Recording, Refused, cannot_hold, where
from .scalar_inputs import Strength
from .sentinels import Place, Sentinel

_OWN = torch.dtype, torch.device, torch.layout, torch.memory_format
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType
_SITE, _SPARE = 5, 6  # places among the operator's arguments


class Sites:
    """Those of one capture, in the order of the calls: [path, arguments, arguments by name] each."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.log = ReadSet({})
        self.token: torch.Tensor | None = None  # what the last call gave for the next, so that their order stays
        self.shaping = False  # code of the block's own is run for the shapes of what it gives; nothing is recorded
        self.handed: list[tuple[Any, Row]] = []  # containers of the block's, and how they were written down

    def begin(self, log: ReadSet) -> None:
        """The block's code begins to run, perhaps once more."""
        self.rows, self.log, self.token, self.handed, self.shaping = [], log, None, [], False

    @contextlib.contextmanager
    def for_shapes(self) -> Iterator[None]:
        """Code of the block's own runs inside for the shapes of what it gives."""
        self.shaping = True
        try:
            yield
        finally:
            self.shaping = False


class Substitute:
    """Stands for the function at a path of the options. Raises Refused for all but a call in another one's place."""

    __slots__ = ("_path", "_sites", "_value")

    def __init__(self, path: Path, value: Any, sites: Sites) -> None:
        for name, own in (("_path", path), ("_value", value), ("_sites", sites)):
            object.__setattr__(self, name, own)

    def __getattribute__(self, name: str) -> Any:
        if name == "__deepcopy__":
            return lambda _memo: self
        raise Refused(_cannot_hold(self))

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        own: Any = args[0] if args else None
        if type(own) not in _FUNCTIONS:
            raise Refused(_cannot_hold(self))
        sites, path = object.__getattribute__(self, "_sites"), object.__getattribute__(self, "_path")

        def expected(first: torch.Tensor) -> list[torch.Tensor]:
            result = result_of(lambda args, kwargs: own(*args, **kwargs), args[1:], kwargs, first)
            if not isinstance(result, torch.Tensor) or result.device != first.device:
                raise Refused(f"it takes another thing than one tensor from {where(path)}")
            return [result]

        return called(sites, json_path(path), args, kwargs, expected)[0]


def called(
    sites: Sites,
    target: Row,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    expected: Callable[[torch.Tensor], list[torch.Tensor]],
    more: Callable[[], list[Any]] = list,
) -> list[torch.Tensor]:
    """The tensors that a target of `callbacks.py` gives, as results of a call in the graph. Raises Refused.

    expected: for one of the tensors that are handed over, tensors like the results. more: the rest of the site's row,
    which is known by then.
    """
    rows = _Rows(describe_target(target), sites)
    row = [target, rows.of_each(args), rows.of_items(kwargs)]
    if not rows.tensors:
        raise Refused(f"it hands no tensor to {describe_target(target)}")
    first, results = rows.tensors[0], expected(rows.tensors[0])
    if any(result.device != first.device for result in results):
        raise Refused(f"{describe_target(target)} gives back a tensor on another device than it is given one on")
    sizes = [rows.as_given(i, size) for result in results for i, size in enumerate(result.shape)]
    ranks, dtypes = [result.dim() for result in results], " ".join(str(result.dtype) for result in results)
    sites.rows.append([*row, *more()])
    number, spare = len(sites.rows) - 1, [False] * len(rows.tensors)
    after = [sites.token] if sites.token is not None else []
    *given_back, sites.token = operator()(rows.tensors, rows.numbers, sizes, ranks, dtypes, number, spare, after)
    return given_back


def _refused(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    raise Refused(_cannot_hold(self))


for _name in "repr str bytes format lt le eq ne gt ge hash bool len getitem setitem delitem iter contains".split():
    setattr(Substitute, f"__{_name}__", _refused)


def _cannot_hold(one: Substitute) -> str:
    return cannot_hold(object.__getattribute__(one, "_path"), object.__getattribute__(one, "_value"))


class _Rows:
    """Values that a substitute is called with, as JSON; `tensors` and `numbers` are those that a graph computes."""

    def __init__(self, target: str, sites: Sites) -> None:
        """target: what they are handed to, in words."""
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[torch.SymInt] = []
        self._target, self._sites = target, sites

    def of(self, value: Any) -> Row:
        kind = type(value)  # never `isinstance`, which is a use of what stands for an option
        if issubclass(kind, torch.Tensor):
            return ["tensor", _place(self.tensors, value)]
        if kind is torch.SymInt:
            return ["number", _place(self.numbers, value)]
        if kind in PLAIN:
            return ["plain", value]
        if kind in _OWN:
            return ["torch", str(value)]
        if kind is Strength:
            float(value)  # begins the capture again, with the number as it is
        if kind is Substitute or issubclass(kind, Sentinel):
            steps = object.__getattribute__(value, "_steps") if kind is Place else ()
            return ["option", json_path(object.__getattribute__(value, "_path")), list(steps)]
        if kind is tuple:
            return ["tuple", self.of_each(value)]
        if kind in _FUNCTIONS:
            return ["function", *_name_of(value)]
        if kind in (Recording, dict, list):
            return self._of_container(value)
        raise Refused(f"it hands a {kind.__qualname__} to {self._target}")

    def of_each(self, values: Any) -> list[Row]:
        return [self.of(value) for value in values]

    def of_items(self, values: dict[Any, Any]) -> list[list[Any]]:
        return [[json_path((0, key))[1], self.of(value)] for key, value in values.items()]

    def _of_container(self, value: Any) -> Row:
        """One that is handed over again is the same one to the function, which may have written to it."""
        known = next((i for i, (other, _) in enumerate(self._sites.handed) if other is value), None)
        row = self._written(value)
        if row[0] == "own":
            return row
        if known is None:
            known = len(self._sites.handed)
            self._sites.handed.append((value, row))
        elif row != self._sites.handed[known][1]:
            raise Refused(f"it changes what it has handed to {self._target} before")
        return ["made", known, row]

    def _written(self, value: Any) -> Row:
        if type(value) is Recording and self._sites.log.changeable and (value.written or value.removed):
            raise Refused(f"it hands a mapping that it changed to {self._target}")
        if type(value) is list:
            return ["list", self.of_each(value)]
        if type(value) is dict:
            return self._of_dict(value)
        changes = self.of_items(value.written), [json_path((0, key))[1] for key in value.removed]
        if value.is_copy:
            return ["copy", json_path(value._path), *changes]
        return ["own", json_path(value._path), *changes]  # what the block wrote into it is there by then

    def _of_dict(self, value: dict[Any, Any]) -> Row:
        """One that was made by walking over a mapping has what a sampler notes there for itself, as it is then."""
        source = self._source(value)
        items = self.of_items(value)
        if source is None:
            return ["dict", items, None]
        path, mapping = source
        there = [key for key in value if key in BOOKKEEPING and key in mapping and value[key] is None]
        rows = [[key, ["option", json_path((*path, key)), []] if key in there else row] for key, row in items]
        return ["dict", rows, json_path(path)]

    def _source(self, value: dict[Any, Any]) -> tuple[Path, Any] | None:
        for key, inner in value.items():
            if not issubclass(type(inner), Sentinel):
                continue
            path = object.__getattribute__(inner, "_path")
            mapping = self._sites.log.walks.get(path[:-1])
            if path[-1] == key and mapping is not None and all(k in value for k in mapping if k in BOOKKEEPING):
                return path[:-1], mapping
        return None

    def as_given(self, place: int, size: int | torch.SymInt) -> int | torch.SymInt:
        """A size of the result, at some place, as one of those of the arguments. Raises Refused where it is none.

        One that is the same in other terms counts too: that it is becomes a condition of the artefact.
        """
        if isinstance(size, int) or size.node.expr.is_number:
            return int(size)
        alike = self.tensors[0].shape[place : place + 1]
        sizes = [*alike, *(given for t in self.tensors for given in t.shape), *self.numbers]
        for given in sizes:
            if isinstance(given, torch.SymInt) and given.node.expr == size.node.expr:
                return given
        made = _computed(size.node.expr, sizes)
        if made is not None:
            return made
        for given in sizes:
            if _hint(given) == size.node.hint and size == given:
                return given
        raise Refused(f"a size of what {self._target} gives back cannot be told from its arguments'")


def _computed(expr: Any, sizes: Sequence[Any]) -> int | torch.SymInt | None:
    """A size as it is computed of others, such as half of one; None where they do not tell."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    known = {s.node.expr: s for s in reversed(sizes) if isinstance(s, torch.SymInt) and s.node.expr.is_symbol}
    if not expr.free_symbols <= known.keys():
        return None
    try:
        return sympy_interp(PythonReferenceAnalysis, known, expr)
    except NotImplementedError:
        return None


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else size.node.hint


def _place(values: list[Any], value: Any) -> int:
    """The place of a value in a list, at the end of which it is put if it is not there."""
    at = next((i for i, other in enumerate(values) if other is value), len(values))
    values += [value] if at == len(values) else []
    return at


def _name_of(function: Any) -> list[Any]:
    """[module, name, how often to look behind a wrapper]. Raises Refused where it cannot be found so."""
    names = function.__module__, function.__qualname__
    for depth in range(4):
        with contextlib.suppress(AttributeError, KeyError):
            if named(*names, depth) is function:
                return [*names, depth]
    raise Refused(f"it hands {function.__qualname__}() to code of others, which cannot be found by its name")


def result_of(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], first: torch.Tensor) -> Any:
    """What the block's own code would give, with its sizes as symbols; nothing of it is recorded.

    own: is called with such arguments, in two containers. first: one of the tensors among them.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

    if type(first) is not FakeTensor:
        raise Refused("code of others is handed what is no plain tensor")

    def other(value: Any) -> Any:
        """The same without its data, which it may change."""
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return kind(map(other, value)) if kind in (list, tuple) else value

    with _disable_current_modes(), first.fake_mode:
        return own(other(args), {key: other(value) for key, value in kwargs.items()})


# ---- the captured graph ----------------------------------------------------------------------------------------------


def settled(graph: GraphModule, rows: list[Row], weights: list[Node]) -> list[list[Row]]:
    """Give the calls of a captured graph their last arguments; the sites by number, each in the order of its calls.

    Calls that differ in numbers alone, as those of a block's layers do, have one number, so that the layers are the
    same code. weights: the graph's inputs that are such.
    """
    if not rows:
        return []
    calls = [node for node in graph.graph.nodes if node.target is operator()]
    if len(calls) != len(rows):
        raise Refused("it does not use what code of others gives back, whose call a graph would leave out")
    numbers: dict[str, int] = {}
    found: list[list[Row]] = []
    spare = _Spare(graph, weights)
    for call in calls:
        row = rows[call.args[_SITE]]
        number = numbers.setdefault(json.dumps(_masked(row)), len(numbers))
        found += [[]] if number == len(found) else []
        found[number].append(row)
        call.update_arg(_SITE, number)
        call.update_arg(_SPARE, [spare.has(given, call) for given in call.args[0]])
    graph.recompile()
    return found


def describe_sites(sites: list[list[Row]]) -> list[str]:
    """What a user should know of the functions that an artefact calls."""
    targets = list({json.dumps(target): target for rows in sites for target, *_ in rows}.values())
    layers = [target[1] for target in targets if target[:1] == [MODULE]]
    options = dict.fromkeys(describe_target(target) for target in targets if target[:1] != [MODULE])
    notes = [f"{option} is called from inside compiled blocks, as it is" for option in options]
    if layers:
        more = f" and {len(layers) - 2} more" if len(layers) > 2 else ""
        which = ", ".join(layers[:2]) + more
        notes.append(f"layers that carry code of others are called from inside compiled blocks, as they are: {which}")
    return notes


def _masked(row: Any) -> Any:
    """A site without its numbers, and without those that containers were given."""
    if not isinstance(row, list):
        return row
    if row[:1] == ["plain"] and type(row[1]) is int:
        return ["plain"]
    return ["made", _masked(row[2])] if row[:1] == ["made"] else list(map(_masked, row))


class _Spare:
    """Which tensors of a graph a function may be handed as they are, since nobody else ever reads their memory.

    Not before the call either, whose reader may come to run after it; and only what is certain to be computed into
    memory of its own: a copy, or a sum with zero, is left out when the graph is lowered, and the tensor is another one.
    """

    _COMPUTED = "linear mm addmm bmm matmul convolution conv2d layer_norm native_layer_norm rms_norm cat".split()

    def __init__(self, graph: GraphModule, weights: list[Node]) -> None:
        self._nodes = list(graph.graph.nodes)
        kept = set(weights)
        self._moving: set[Node] = set()  # what is computed of more than weights, which may be done once for all steps
        for node in self._nodes:
            if (node.op == "placeholder" and node not in kept) or self._moving & set(node.all_input_nodes):
                self._moving.add(node)
        self._same: dict[Any, int] = {}
        for node in self._nodes:
            name = str((node.target, node.args, node.kwargs))
            self._same[name] = self._same.get(name, 0) + 1

    def has(self, given: Node, call: Node) -> bool:
        """Whether one of the tensors of a call is such."""
        memory = _memory_of(given)
        family = [node for node in self._nodes if _memory_of(node) & memory]
        readers = {user for node in family for user in node.users if not _takes_another(user, memory)}
        if not family or readers - {call, *family}:
            return False
        return self._is_computed(family[0]) and family[0] in self._moving

    def _is_computed(self, node: Node) -> bool:
        name = str(node.target).split(".")
        if node.op != "call_function" or self._same[str((node.target, node.args, node.kwargs))] > 1:
            return False
        if name[0] != "aten" or len(name) < 2:  # an operator of others gives memory of its own
            return name[0] not in ("prim", "prims", "<built-in function getitem>")
        return name[1] in self._COMPUTED and (name[1] != "cat" or len(node.args[0]) > 1)  # type: ignore[arg-type]


def _takes_another(node: Node, memory: set[int]) -> bool:
    """Whether a node takes one of several results out, and not one in this memory."""
    return node.target is getitem and not _memory_of(node) & memory


def _memory_of(node: Node) -> set[int]:
    values = node.meta.get("val")
    each = values if isinstance(values, (list, tuple)) else [values]
    return {value.untyped_storage()._cdata for value in each if isinstance(value, torch.Tensor)}
