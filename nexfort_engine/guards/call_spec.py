# SPDX-License-Identifier: Apache-2.0
"""The signature of one call of a block: its structure, and what of it is data.

A call `block(*args, **kwargs)` is flattened into a hashable *spec* (the structure with every plain Python value in it),
the tensors, the integers (they become dynamic inputs, so that a size passed as a number costs no new artefact) and the
mappings (`transformer_options` and its like, which are guarded by what is read from them, see option_recorder.py).

Functions among the arguments are taken apart as well (function_spec.py): their code is in the spec, and what they hold
is flattened. A mapping that is reached twice, as an argument and in a function's cell, stays one mapping, and a
function that is reached twice stays one function.

The flattening is our own, not pytree's: it needs no registration for dataclasses and plain objects that host blocks
pass around, keeps `torch.Size` apart from a tuple, and is cheap enough to run before every call.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..modules.memory_format import Unsupported, format_of
from ..modules.module_keys import Given
from .enum_members import Member
from .function_spec import FunctionCode, NamedFunction, held_by, is_named, is_native, names_of, native_text
from .list_recorder import Cursor, RecordedList
from .option_recorder import Recording

TENSOR = "T"  # a tensor: its dtype, rank and memory format are in the metas, its sizes are conditions
INT = "I"  # an int: data; whether it may vary is among the conditions
MAPPING = "M"  # a dict: guarded by its read-set
LIST = "L"  # a list that the block changes, or another one of such a block: guarded by its read-set as well
SIZE = "S"  # a number that a block works out of sizes and returns; an empty tensor with as many rows carries it
_SAME = "M="  # a dict that was met before, by its number
_SAME_FUNCTION = "F="
_METHOD, _NAMED, _MEMBER = "method", "named", "member"

_READS = frozenset("get items keys values __getitem__ __missing__ __contains__ __iter__ __len__ __bool__".split())


class Flat:
    """The leaves of one call, in order: `tensors`, `ints`, `mappings`; each mapping once.

    lists: they are leaves too, and lie among the mappings; otherwise they are taken apart. root: the block that is
    called, None where its modules do not count. own: where the block has containers that it may keep something in;
    those lie behind all others.
    """

    __slots__ = ("functions", "inside", "ints", "lists", "mappings", "own", "tensors")

    def __init__(self, *, lists: bool = False, root: nn.Module | None = None) -> None:
        self.lists = lists
        self.own: tuple[tuple[str, str, str], ...] = ()
        self.tensors: list[torch.Tensor] = []
        self.ints: list[int] = []
        self.mappings = Given(root)
        self.functions: list[Any] = []  # those that are done
        self.inside: list[Any] = []  # the functions that are being flattened

    @classmethod
    def of(
        cls,
        tensors: list[torch.Tensor],
        ints: list[int],
        mappings: list[Any],
        *,
        lists: bool = False,
        own: tuple[tuple[str, str, str], ...] = (),
    ) -> Flat:
        """A call of these leaves."""
        made = cls(lists=lists)
        made.tensors, made.ints, made.own = tensors, ints, own
        made.mappings += mappings
        return made

    def add_own(self, own: tuple[tuple[str, str, str], ...], mappings: list[Any]) -> None:
        """The block has containers of its own at these places; `mappings` are those that are there now."""
        self.own = own
        self.mappings += mappings

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Have what a function gives for each tensor in the tensor's place."""
        self.tensors = list(map(function, self.tensors))


_PLAIN = (type(None), bool, str, float, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


def flatten(value: Any, into: Flat) -> Any:
    """Flatten one value; leaves go `into`, the hashable spec is returned. Raises Unsupported with the type's name."""
    kind: type = type(value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        into.tensors.append(value)
        return TENSOR
    if value is None or kind is bool:
        return ("=", value)
    if kind is int:
        into.ints.append(value)
        return INT
    if isinstance(value, float):
        return ("=", value, repr(value))  # 1.0 is not True, and -0.0 is not 0.0: code can tell
    if isinstance(value, enum.Enum):
        return (_MEMBER, Member(value))
    if isinstance(value, _PLAIN):
        return ("=", value)
    if kind is list and into.lists:
        return _flatten_leaf(value, into, LIST)
    if kind is list or kind is tuple or kind is torch.Size:
        return (kind, *[flatten(v, into) for v in value])
    if isinstance(value, dict):
        if kind is not dict and not _is_read_as_dict(kind):
            raise Unsupported(f"an argument of type {kind.__qualname__}, a mapping with ways of its own to be read")
        if type(value) is Recording and into.lists:
            raise Unsupported("a mapping of which is noted what is read, and which it may change")
        return _flatten_leaf(value.real() if type(value) is Recording else value, into, MAPPING)
    return _flatten_object(value, into)


def _flatten_leaf(value: Any, into: Flat, sign: str) -> Any:
    for number, known in enumerate(into.mappings):
        if known is value:
            return (_SAME, number)
    into.mappings.append(value)
    return sign


@functools.cache
def _is_read_as_dict(kind: type) -> bool:
    """Whether a class of mappings is read as a dict is: what records reads of one stands for no other."""
    own = [vars(base) for base in kind.__mro__ if base not in (dict, OrderedDict, Recording, object)]
    return not any(name in _READS for names in own for name in names)


def flatten_result(value: Any, into: Flat, device: torch.device | None = None) -> Any:
    """Flatten what a block returns: as `flatten`, and a new dict by its keys. Raises Unsupported.

    With a device, a number that depends on the sizes of the inputs becomes a tensor of shape (number, 0) there, among
    the tensors, for a graph returns tensors alone; `ints` gets it too. Other numbers are the same in each call. A
    mapping that the block was given comes back as itself to the caller, which no copy can be.
    """
    if device is not None and isinstance(value, torch.SymInt):
        into.tensors.append(torch.empty((value, 0), device=device))
        into.ints.append(value)  # type: ignore[arg-type]
        return SIZE
    if device is not None and type(value) is int:
        return ("=", value)
    if type(value) is dict and all(type(key) is str for key in value):
        return (dict, tuple(value), *[flatten_result(v, into, device) for v in value.values()])
    if isinstance(value, dict):
        raise Unsupported(
            "a mapping that it was given" if type(value) is Recording else "a mapping with other keys than text"
        )
    if type(value) is RecordedList:
        raise Unsupported("a list that it was given")
    if type(value) is Cursor:
        value.as_it_is()
    if type(value) in (list, tuple):
        return (type(value), *[flatten_result(v, into, device) for v in value])
    spec = flatten(value, into)
    if into.mappings:
        raise Unsupported("an object that holds a mapping")
    if holds_function(spec):
        raise Unsupported("a function")
    return spec


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any], into: Flat) -> Any:
    """Flatten the arguments of a call. Raises Unsupported, naming the argument's type."""
    return (len(args), tuple(kwargs), *[flatten(v, into) for v in args], *[flatten(v, into) for v in kwargs.values()])


def unflatten_call(spec: Any, leaves: Leaves) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that `flatten_call` took apart."""
    count, names = spec[0], spec[1]
    values = [unflatten(s, leaves) for s in spec[2:]]
    return tuple(values[:count]), dict(zip(names, values[count:], strict=True))


def _flatten_object(value: Any, into: Flat) -> Any:
    kind = type(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Unsupported("a number that depends on the sizes of the inputs")
    if isinstance(value, tuple):  # a namedtuple
        return (kind, *[flatten(v, into) for v in value])
    if kind in (types.FunctionType, functools.partial, types.MethodType):
        return _flatten_function(value, into)
    if is_native(value):
        return ("=", value)
    if isinstance(value, torch.nn.Module) or callable(value) or isinstance(value, (torch.Generator, Mapping)):
        raise Unsupported(f"an argument of type {kind.__qualname__}, which is neither data nor a plain value")
    fields = fields_of(value)
    if fields is None or not (dataclasses.is_dataclass(value) or kind.__module__ != "builtins"):
        raise Unsupported(f"an argument of type {kind.__qualname__}, whose content cannot be listed")
    names = tuple(fields)
    return (kind, names, *[flatten(fields[n], into) for n in names])


def _flatten_function(value: Any, into: Flat) -> Any:
    if any(value is one for one in into.inside):
        raise Unsupported("a function that holds itself")
    for number, known in enumerate(into.functions):
        if known is value:
            return (_SAME_FUNCTION, number)
    into.inside.append(value)
    try:
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, *value.keywords.values(), *vars(value).values())
            spec = (functools.partial, (tuple(value.keywords), tuple(vars(value))), *[flatten(p, into) for p in parts])
        elif isinstance(value, types.MethodType):
            spec = (_METHOD, flatten(value.__func__, into), flatten(value.__self__, into))
        else:
            spec = (is_named(value) and _flatten_named(value, into)) or _flatten_python(value, into)
    finally:
        into.inside.pop()
    into.functions.append(value)
    return spec


def _flatten_python(value: types.FunctionType, into: Flat) -> tuple[Any, ...]:
    code, (defaults, keywords, fields, cells) = FunctionCode.of(value), held_by(value)
    parts = (defaults, tuple((keywords or {}).values()), tuple(fields.values()), *cells)
    names = (tuple(keywords) if keywords is not None else None, tuple(fields), names_of(value))
    return (code, names, *[flatten(part, into) for part in parts])


def _flatten_named(value: types.FunctionType, into: Flat) -> tuple[Any, ...] | None:
    """A function as itself, with the numbers that it holds; None where it holds what varies or is guarded."""
    own = Flat()
    own.inside = into.inside
    spec = _flatten_python(value, own)
    return None if own.tensors or own.mappings else (_NAMED, NamedFunction(value), spec, ("=", tuple(own.ints)))


def _unflatten_function(spec: Any, leaves: Leaves) -> Any:
    kind = spec[0]
    if kind == _SAME_FUNCTION:
        return leaves.functions[spec[1]]
    if kind == _NAMED:
        made: Any = spec[1].function
    elif kind is functools.partial:
        (named, fields), (function, args, *rest) = spec[1], [unflatten(part, leaves) for part in spec[2:]]
        made = functools.partial(function, *args, **dict(zip(named, rest, strict=False)))
        vars(made).update(zip(fields, rest[len(named) :], strict=True))
    elif kind == _METHOD:
        function, owner = (unflatten(part, leaves) for part in spec[1:])
        made = types.MethodType(function, owner)
    else:
        (named, fields, names), parts = spec[1], [unflatten(part, leaves) for part in spec[2:]]
        keywords = dict(zip(named, parts[1], strict=True)) if named is not None else None
        made = kind.made(parts[0], keywords, dict(zip(fields, parts[2], strict=True)), parts[3:])
        made.__name__, made.__qualname__, made.__module__ = names
    leaves.functions.append(made)
    return made


def _is_of_function(kind: Any) -> bool:
    """Whether a spec that begins so stands for a function."""
    return isinstance(kind, FunctionCode) or kind in (functools.partial, _METHOD, _NAMED, _SAME_FUNCTION)


def functions_in(spec: Any) -> Iterator[FunctionCode]:
    """The code of each Python function among what a spec stands for, those that functions hold included."""
    if isinstance(spec, tuple) and spec and spec[0] != "=":
        if isinstance(spec[0], FunctionCode):
            yield spec[0]
        for part in spec[1:]:
            yield from functions_in(part)


def holds_function(spec: Any) -> bool:
    """Whether a function is among what a spec stands for."""
    if not isinstance(spec, tuple) or not spec or spec[0] == "=":
        return isinstance(spec, tuple) and len(spec) == 2 and callable(spec[1]) and is_native(spec[1])
    return _is_of_function(spec[0]) or any(map(holds_function, spec[1:]))


def fields_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, those in slots too; None if it may hold what cannot be seen from Python."""
    made_by = type(value).__new__
    if made_by not in (object.__new__, types.SimpleNamespace.__new__) and not isinstance(made_by, types.FunctionType):
        return None  # such as a random.Random
    own = getattr(value, "__dict__", None)
    kinds = [kind for kind in type(value).__mro__[:-1] if "__slots__" in vars(kind)]
    if own is None and len(kinds) < len(type(value).__mro__) - 1:
        return None
    slots = [vars(kind)["__slots__"] for kind in kinds]
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some) if name != "__dict__"]
    if not names:
        return own
    if any(name.startswith("__") for name in names):  # stored under another name
        return None
    return {**{name: getattr(value, name) for name in names if hasattr(value, name)}, **(own or {})}


def unflatten(spec: Any, leaves: Leaves) -> Any:
    """The value that `flatten` took apart, from its spec and the leaves in the same order."""
    if spec == TENSOR:
        return next(leaves.tensors)
    if spec == INT:
        return next(leaves.ints)
    if spec == SIZE:
        return next(leaves.tensors).shape[0]
    if spec in (MAPPING, LIST):
        leaves.given.append(next(leaves.mappings))
        return leaves.given[-1]
    kind = spec[0]
    if kind == "=":
        return spec[1]
    if kind == _MEMBER:
        return spec[1].member
    if kind == _SAME:
        return leaves.given[spec[1]]
    if _is_of_function(kind):
        return _unflatten_function(spec, leaves)
    if kind is list:
        return [unflatten(s, leaves) for s in spec[1:]]
    if kind is tuple or kind is torch.Size:
        items = [unflatten(s, leaves) for s in spec[1:]]
        # a torch.Size cannot hold symbolic ints; a tuple serves wherever a block reads sizes from it
        return tuple(items) if any(type(i) is not int for i in items) else kind(items)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return kind(*[unflatten(s, leaves) for s in spec[1:]])
    if kind is dict:
        return {name: unflatten(part, leaves) for name, part in zip(spec[1], spec[2:], strict=True)}
    new = kind.__new__(kind)
    for name, part in zip(spec[1], spec[2:], strict=True):
        object.__setattr__(new, name, unflatten(part, leaves))
    return new


class Leaves:
    """Iterators over the leaves of a call, consumed by `unflatten` in order."""

    def __init__(self, tensors: Any, ints: Any = (), mappings: Any = ()) -> None:
        self.tensors, self.ints, self.mappings = iter(tensors), iter(ints), iter(mappings)
        self.given: list[Any] = []  # the mappings that were taken so far
        self.functions: list[Any] = []  # and the functions


def of_its_own(value: Any, twice: bool = False) -> Any:
    """Arguments with tensors of their own, which the callee may change. `twice`: at batch 2 where they have batch 1."""
    if isinstance(value, torch.Tensor):
        return _copy(value, twice and value.ndim > 0 and value.shape[0] == 1)
    if type(value) in (list, tuple):
        return type(value)(of_its_own(v, twice) for v in value)
    if isinstance(value, dict):
        return {k: of_its_own(v, twice) for k, v in value.items()}
    return value


def _copy(value: torch.Tensor, twice: bool) -> torch.Tensor:
    """A copy, or two rows of the same, that lies in memory as the tensor does: a part of its channels has gaps.

    Torch's own would be without them, and regions that are called with it would seem to be called with another format.
    """
    plain = type(value) is torch.Tensor and value.layout == torch.strided
    shape, strides = list(value.shape), list(value.stride()) if plain else []
    expanded = any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=plain))
    if not plain or expanded or not value.numel() or value.is_contiguous():
        return torch.cat([value, value]) if twice else value.clone()
    if twice:
        row = sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True)) + 1
        shape[0], strides[0] = 2, row if format_of(value) == "l" else max(strides[0], row)
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def changeable(spec: Any) -> Iterator[type]:
    """The classes of what the callee could change of a call, tensors and mappings aside: lists, objects."""
    if not isinstance(spec, tuple) or not spec or spec[0] == "=":
        return
    kind = spec[0]
    if isinstance(kind, type) and not issubclass(kind, tuple):
        yield kind
    for part in spec[1:]:
        yield from changeable(part)


def stateful(spec: Any) -> str | None:
    """Why a call cannot be made again: it is handed what it may change and `of_its_own` does not copy. Or None."""
    if holds_function(spec):
        return "it is called with a function, which may change what it holds"
    kind = next((kind for kind in changeable(spec) if kind is not list), None)
    return None if kind is None else f"it is called with a {kind.__qualname__}, which it may change"


def spec_text(spec: Any) -> str:
    """A spec as text that is the same in every process: types by their qualified name."""
    if isinstance(spec, str):
        return spec
    if isinstance(spec, tuple) and spec:
        if spec[0] == "=":
            return f"={native_text(spec[1]) if is_native(spec[1]) else repr(spec[1])}"
        head = f"{spec[0].__module__}.{spec[0].__qualname__}" if isinstance(spec[0], type) else repr(spec[0])
        return head + "(" + ",".join(spec_text(s) for s in spec[1:]) + ")"
    return repr(spec)
