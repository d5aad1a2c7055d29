# SPDX-License-Identifier: Apache-2.0
"""Substitutes: functions in a call's options that a block calls in the place of one of its own.

ComfyUI gives `optimized_attention_override` the attention that it would have called, and the arguments for that: what
comes back is shaped as that attention's result is. This is all that an artefact needs to know. It calls the function
that is in the options at that moment, with what the block's own code would hand it, and goes on with the result.
Nothing of the function is traced or kept, so that exchanging one for another costs no compile.

A function that is called in another way, without one of the block's own as its first argument, may give back anything:
such a block runs eager. So does one whose function keeps tensors that it is handed, which compiled code writes over,
changes those that the block still uses, or gives back something of another shape.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .guards import from_json_path, json_path
from .readset import BOOKKEEPING, MISSING, PLAIN, Path, Place, Recording, Refused, Sentinel, cannot_hold, look, where
from .strengths import Strength

_OWN = torch.dtype, torch.device, torch.layout, torch.memory_format
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType
_Row = list[Any]  # a value as JSON: what kind it is, and what it is made of


class Strayed(Exception):
    """A function did what no artefact can follow. The text is the reason; `path` is where it lies."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{where(path)} {what}")
        self.path = path


class Raised(Exception):
    """The function at `path` raised `error`, which is nobody's business but the caller's."""

    def __init__(self, path: Path, error: BaseException) -> None:
        super().__init__(str(error))
        self.path, self.error = path, error


# ---- while a block is captured ---------------------------------------------------------------------------------------


class Sites:
    """The places in one capture from which substitutes are called: [path, arguments, arguments by name] each."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.recordings: list[Recording] = []  # the call's own mappings

    def begin(self, recordings: list[Recording]) -> None:
        """The block's code begins to run, perhaps once more."""
        self.rows, self.recordings = [], recordings


class Substitute:
    """Stands for the function at a path of the options. Raises Refused for all but a call in another one's place."""

    def __init__(self, path: Path, value: Any, sites: Sites) -> None:
        self.__dict__.update(_path=path, _value=value, _sites=sites)

    def __getattr__(self, name: str) -> Any:
        raise Refused(cannot_hold(self._path, self._value))

    def __deepcopy__(self, _memo: Any) -> Substitute:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = args[0] if args else None
        if type(own) not in _FUNCTIONS:
            raise Refused(cannot_hold(self._path, self._value))
        rows = _Rows(self._path, self._sites.recordings)
        site = [json_path(self._path), rows.of(list(args))[1], rows.of(kwargs)[1]]
        if not rows.tensors:
            raise Refused(f"it hands no tensor to {where(self._path)}")
        first = rows.tensors[0]
        expected = _result_of(own, args[1:], kwargs, first)
        if not isinstance(expected, torch.Tensor) or expected.device != first.device:
            raise Refused(f"it takes another thing than one tensor from {where(self._path)}")
        sizes = [rows.as_given(i, size) for i, size in enumerate(expected.shape)]
        self._sites.rows.append(site)
        return operator()(
            rows.tensors, rows.numbers, sizes, expected.dtype, len(self._sites.rows) - 1, [False] * len(rows.tensors)
        )


class _Rows:
    """Values that a substitute is called with, as JSON; `tensors` and `numbers` are those that a graph computes."""

    def __init__(self, path: Path, recordings: list[Recording]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[torch.SymInt] = []
        self._path, self._recordings = path, recordings

    def of(self, value: Any) -> _Row:
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
        if kind is Substitute:
            return ["option", json_path(value._path), []]
        if issubclass(kind, Sentinel):
            steps = object.__getattribute__(value, "_steps") if kind is Place else ()
            return ["option", json_path(object.__getattribute__(value, "_path")), list(steps)]
        if kind is Recording:
            return self._of_mapping(value)
        if kind in (list, tuple):
            return [kind.__name__, [self.of(v) for v in value]]
        if kind is dict:
            return ["dict", self._items(value), _source(value)]
        if kind in _FUNCTIONS:
            return ["function", *_name_of(value)]
        raise Refused(f"it hands a {kind.__qualname__} to {where(self._path)}")

    def _of_mapping(self, value: Recording) -> _Row:
        """The caller's own mapping where the block left it as it was, else a copy with what the block changed."""
        path, changed = value._path, value.written or value.removed
        if not changed and (len(path) > 1 or any(value is own for own in self._recordings)):
            return ["mapping", json_path(path)]
        return ["copy", json_path(path), self._items(value.written), [json_path((0, key))[1] for key in value.removed]]

    def _items(self, value: dict[Any, Any]) -> list[Any]:
        return [[json_path((0, key))[1], self.of(inner)] for key, inner in value.items()]

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
        for given in sizes:
            if size == given:
                return given
        raise Refused(f"a size of what {where(self._path)} gives back is none of its arguments'")


def _place(values: list[Any], value: Any) -> int:
    """The place of a value in a list, at the end of which it is put if it is not there."""
    at = next((i for i, other in enumerate(values) if other is value), len(values))
    values += [value] if at == len(values) else []
    return at


def _source(value: Mapping[Any, Any]) -> list[Any] | None:
    """The path of the mapping that a dict was made of by walking over it, or None."""
    for key, inner in value.items():
        if issubclass(type(inner), Sentinel):
            path = object.__getattribute__(inner, "_path")
            if path[-1] == key:
                return json_path(path[:-1])
    return None


def _name_of(function: Any) -> list[Any]:
    """[module, name, how often to look behind a wrapper]. Raises Refused where it cannot be found so."""
    names = function.__module__, function.__qualname__
    for depth in range(4):
        with contextlib.suppress(AttributeError, KeyError):
            if _named(*names, depth) is function:
                return [*names, depth]
    raise Refused(f"it hands {function.__qualname__}() to code of others, which cannot be found by its name")


def _named(module: str, name: str, depth: int) -> Any:
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    for _ in range(depth):
        found = found.__wrapped__
    return found


def _result_of(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: torch.Tensor) -> Any:
    """What the block's own function would give, with its sizes as symbols; nothing of it is recorded.

    first: one of the tensors that it is called with.
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
        return own(*other(args), **{key: other(value) for key, value in kwargs.items()})


def settled(graph: GraphModule, rows: list[_Row]) -> list[list[_Row]]:
    """Give each call of a captured graph its last two arguments; the sites by number, each in the order of its calls.

    Calls one behind the other that differ in numbers alone, as those of a block's layers do, have one number, so that
    the layers are the same code. Which tensors nobody uses after a call is noted: a function may change those, of
    others it gets copies.
    """
    calls = [node for node in graph.graph.nodes if node.target is _operator_if_any()]
    before = _before(graph, calls)
    found: list[tuple[str, list[int]]] = []
    for i, call in enumerate(calls):
        text = json.dumps(_masked(rows[call.args[4]]))
        at = next((n for n, (t, those) in enumerate(found) if t == text and those[-1] in before[call]), len(found))
        found += [(text, [])] if at == len(found) else []
        found[at][1].append(i)
        call.update_arg(5, [not _memory_of([given]) & _used_after(graph, call) for given in call.args[0]])
        call.meta["nexfort_site"] = at
    sites = [[rows[calls[i].args[4]] for i in those] for _, those in found]
    for call in calls:
        call.update_arg(4, call.meta.pop("nexfort_site"))
    if calls:
        graph.recompile()
    return sites


def told(sites: list[list[_Row]]) -> list[str]:
    """What a user should know of the functions that an artefact calls."""
    paths = dict.fromkeys(where(from_json_path(path)) for rows in sites for path, *_ in rows)
    return [f"{path} is called from inside compiled blocks, as it is" for path in paths]


def _masked(row: Any) -> Any:
    """A site without its numbers."""
    if isinstance(row, list):
        return ["plain"] if row[:1] == ["plain"] and type(row[1]) is int else list(map(_masked, row))
    return row


def _before(graph: GraphModule, calls: list[Node]) -> dict[Node, set[int]]:
    """For each node the calls, by their number, whose result it depends on."""
    found: dict[Node, set[int]] = {}
    for node in graph.graph.nodes:
        found[node] = set().union(*(found[given] for given in node.all_input_nodes))
        found[node] |= {i for i, call in enumerate(calls) if call in node.all_input_nodes}
    return found


def _used_after(graph: GraphModule, call: Node) -> set[int]:
    """The memory of a graph's inputs, and of all that is used after a call."""
    nodes = list(graph.graph.nodes)
    later = {given for node in nodes[nodes.index(call) + 1 :] for given in node.all_input_nodes}
    return _memory_of([*later, *(node for node in nodes if node.op == "placeholder")])


def _memory_of(nodes: list[Node]) -> set[int]:
    values = [node.meta.get("val") for node in nodes]
    return {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}


# ---- while an artefact runs ------------------------------------------------------------------------------------------


def still_there(mappings: list[dict[Any, Any]], path: Path) -> Callable[[list[Any]], bool]:
    """Whether mappings have the very function that these have there. It is not kept alive."""
    function = look(mappings, path)
    try:
        found: Callable[[], Any] = weakref.ref(function)
    except TypeError:  # of a class with slots
        found = lambda: function  # noqa: E731
    return lambda others: (kept := found()) is not None and look(others, path) is kept


@dataclass
class _Call:
    """One call of an artefact: its mappings, the places that it calls functions from, and that one of them raised."""

    mappings: list[dict[Any, Any]]
    sites: list[list[_Row]]
    count: Counter[int]  # of calls by the number of their site
    raised: Raised | None = None

    def next(self, site: int) -> _Row:
        """The row of a call."""
        self.count[site] += 1
        return self.sites[site][self.count[site] - 1]


_current: ContextVar[_Call] = ContextVar("nexfort_substitutes")


@contextlib.contextmanager
def called_with(mappings: list[dict[Any, Any]], sites: list[list[_Row]], changed: list[torch.Tensor]) -> Iterator[None]:
    """Inside the block an artefact finds its substitutes in these mappings. What one raises comes out as Raised.

    changed: what the artefact writes to, put back as it was where a function strayed, so that the block can run.
    """
    before = [tensor.clone() for tensor in changed]
    call = _Call(mappings, sites, Counter())
    token = _current.set(call)
    try:
        yield
    except Strayed:
        for tensor, was in zip(changed, before, strict=True):
            tensor.copy_(was)
        raise
    except BaseException:
        if call.raised is not None:
            raise call.raised from None
        raise
    finally:
        _current.reset(token)


def _substitute(
    given: list[torch.Tensor],
    numbers: list[int],
    size: list[int],
    dtype: torch.dtype,
    site: int,
    spare: list[bool],
) -> torch.Tensor:
    call = _current.get()
    row = call.next(site)
    path = from_json_path(row[0])
    tensors = [tensor if own else _copy(tensor) for tensor, own in zip(given, spare, strict=True)]
    copies = [tensor for tensor, own in zip(tensors, spare, strict=True) if not own]
    held, versions = list(map(_holders, tensors)), [copy._version for copy in copies]
    result = _called(call, row, tensors, numbers)
    if type(result) is not torch.Tensor:
        raise Strayed(path, f"gives back a {type(result).__qualname__} and not a tensor")
    if (list(result.shape), result.dtype, result.device) != (list(size), dtype, given[0].device):
        found = f"{result.dtype} {list(result.shape)} on {result.device}"
        raise Strayed(path, f"gives back {found}, and not {dtype} {list(size)} on {given[0].device}")
    is_own = _holders(result) == _alone() and not result.storage_offset()  # code that follows writes over it
    result = result.contiguous() if is_own else result.clone(memory_format=torch.contiguous_format)
    if list(map(_holders, tensors)) != held:
        raise Strayed(path, "keeps a tensor that it is given")
    if [copy._version for copy in copies] != versions:
        raise Strayed(path, "changes a tensor that the block uses afterwards")
    return result


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that counts how often it is changed, which tensors of inference mode do not."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def _called(call: _Call, row: _Row, tensors: list[torch.Tensor], numbers: list[int]) -> Any:
    path, args, kwargs = row
    built = _Built(call.mappings, tensors, numbers)
    function = look(call.mappings, from_json_path(path))
    try:
        return function(*[built.of(arg) for arg in args], **{key: built.of(arg) for key, arg in kwargs})
    except BaseException as error:
        call.raised = Raised(from_json_path(path), error)
        raise


def _holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How many hold on to a tensor, in C++ and Python, and to its memory."""
    return tensor._use_count(), sys.getrefcount(tensor), _uses(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


_uses = torch._C._storage_Use_Count  # type: ignore[attr-defined]


@functools.cache
def _alone() -> tuple[int, int, int]:
    """What `_holders` says of a tensor that one local variable holds and nobody else."""
    probe = torch.empty(1)
    return _holders(probe)


class _Built:
    """Values again from what _Rows wrote down."""

    def __init__(self, mappings: list[dict[Any, Any]], tensors: list[torch.Tensor], numbers: list[int]) -> None:
        self._mappings, self._tensors, self._numbers = mappings, tensors, numbers

    def of(self, row: _Row) -> Any:
        kind, value, *rest = row
        if kind == "tensor":
            return self._tensors[value]
        if kind == "number":
            return self._numbers[value]
        if kind == "plain":
            return value
        if kind == "torch":
            return _torch_s(value)
        if kind == "option":
            return functools.reduce(lambda inner, step: inner[step], rest[0], self._look(value))
        if kind == "mapping":
            return self._look(value)
        if kind == "function":
            importlib.import_module(value)
            return _named(value, *rest)
        if kind == "dict":
            return self._dict(value, rest[0])
        if kind == "copy":
            left = {key: inner for key, inner in self._look(value).items() if key not in map(_key, rest[1])}
            return {**left, **self._dict(rest[0], None)}
        items = [self.of(inner) for inner in value]
        return tuple(items) if kind == "tuple" else items

    def _look(self, path: list[Any]) -> Any:
        return look(self._mappings, from_json_path(path))

    def _dict(self, items: list[Any], source: list[Any] | None) -> dict[Any, Any]:
        """What a sampler notes for itself comes and goes without a guard: as it is now, where it was walked over."""
        made = {_key(key): self.of(row) for key, row in items}
        made = {key: value for key, value in made.items() if value is not MISSING}
        if source is not None:
            now = self._look(source)
            made |= {key: now[key] for key in now if key in BOOKKEEPING and key not in made}
        return made


def _key(raw: Any) -> Any:
    return tuple(raw) if isinstance(raw, list) else raw


def _torch_s(text: str) -> Any:
    """A dtype, layout or memory format by its name, or a device."""
    name = text.removeprefix("torch.")
    return getattr(torch, name) if name != text else torch.device(text)


# ---- the operator ----------------------------------------------------------------------------------------------------


@functools.cache
def operator() -> Any:
    """`nexfort::substitute`: the function of a site, called with tensors and numbers; its result has `size`, `dtype`.

    spare: which of the tensors it may change. What loads or unpacks code that calls it asks for it first.
    """
    library = torch.library.Library("nexfort", "FRAGMENT")
    library.define(
        "substitute(Tensor[] given, SymInt[] numbers, SymInt[] size, ScalarType dtype, int site, bool[] spare)"
        " -> Tensor"
    )
    library.impl("substitute", _substitute, "CompositeExplicitAutograd")
    torch.library.register_fake("nexfort::substitute", _fake, lib=library)
    operator.library = library  # type: ignore[attr-defined]  # the operator goes with it
    return torch.ops.nexfort.substitute.default


def _operator_if_any() -> Any:
    return operator() if hasattr(operator, "library") else None


def _fake(given: Any, _numbers: Any, size: Any, dtype: Any, _site: Any, _spare: Any) -> Any:
    return given[0].new_empty(size, dtype=dtype)
