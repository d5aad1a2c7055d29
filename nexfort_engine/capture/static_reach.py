# SPDX-License-Identifier: Apache-2.0
"""What code may change by name, as far as its bytecode says so before it runs: globals, items, attributes, containers.

The walk begins at the forward of each class and goes on to methods of the class and to functions that a name leads to.
Functions that code computes, or that objects bring along, are not followed.
"""

from __future__ import annotations

import collections
import dis
import functools
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..guards.bytecode_names import CELL, CHANGING, GLOBAL, KEY, Chain, names_in
from ..guards.name_resolver import function_in
from ..guards.option_recorder import MISSING
from ..guards.value_digests import cell_contents, is_library, table_of
from ..modules.tree import PLAIN, fields_of
from .source_hashes import is_host_code

_MOST_FUNCTIONS = 2000
_MOST_ITEMS = 256  # of a registry whose functions are followed
_STORES = (
    "STORE_GLOBAL",
    "DELETE_GLOBAL",
    "STORE_SUBSCR",
    "DELETE_SUBSCR",
    "STORE_SLICE",
    "STORE_ATTR",
    "DELETE_ATTR",
    "STORE_DEREF",
)
_WRITES = frozenset(number for name, number in dis.opmap.items() if name.startswith(_STORES))
_ORDERED = (list, collections.deque)
_CONTAINERS = (*_ORDERED, dict, set)
Written = tuple[Any, str | None]  # a table or an object, and the name that is written in it; None: any of its names


def functions_of(kinds: Iterable[type], modules: Collection[str] = ()) -> Iterator[types.FunctionType]:
    """The functions of the host that a forward of these classes may run. modules: only those of these, where given."""
    return (
        function for function, _ in walk([pair for kind in kinds for pair in _methods(kind, ("forward",))], modules)
    )


def run_by(modules: Iterable[nn.Module], besides: Collection[str] = ()) -> Iterator[tuple[types.FunctionType, Any]]:
    """The functions that some modules may run by their forward, and those that are attributes of theirs; as `walk`."""
    starts: dict[tuple[int, int], tuple[Any, Any]] = {}
    for module in modules:
        for number, pair in enumerate(_methods(type(module), ("forward",))):
            starts[number, id(type(module))] = pair
        for value in list(module.__dict__.values()):
            if (function := function_in(value)) is not None:
                starts[-1, id(function)] = None, function
    return walk(list(starts.values()), (), besides)


def walk(
    due: list[tuple[Any, Any]], modules: Collection[str] = (), besides: Collection[str] = ()
) -> Iterator[tuple[types.FunctionType, Any]]:
    """Each function with the class, or the object reached by name, whose method it is; None for another function.

    due: those to begin with. modules: only those of these, where given. besides: none of these, nor of what lies in
    them. Functions that others wrap are walked too, whoever wrote the wrapper.
    """
    seen: set[tuple[int, types.CodeType]] = set()
    while due and len(seen) < _MOST_FUNCTIONS:
        owner, value = due.pop()
        if (inner := _wrapped(value)) is not None:
            due.append((owner, inner))
        function = function_in(value)
        if function is None or (id(owner), function.__code__) in seen:
            continue
        seen.add((id(owner), function.__code__))
        if not is_host_code(function.__code__):
            due += [
                (owner, one) for one in map(cell_contents, function.__closure__ or ()) if function_in(one) is not None
            ]
            continue
        module = str(function.__globals__.get("__name__"))
        if (modules and module not in modules) or lies_in(module, besides):
            continue
        yield function, owner
        names = _outline(function.__code__)[0]
        if owner is not None:
            due += _methods(owner, names)
        for found in _named(function, names):
            due.append((None, found))
            due += _brought(found, names)


def _brought(found: Any, names: Collection[str]) -> Iterator[tuple[Any, Any]]:
    """The functions that a value by a name brings along: a registry's, an object's, a class's."""
    kind = type(found)
    if issubclass(kind, (list, tuple, dict)):
        base: Any = next(one for one in (list, tuple, dict) if issubclass(kind, one))
        if base.__len__(found) <= _MOST_ITEMS:
            yield from ((None, item) for item in list(dict.values(found) if base is dict else base.__iter__(found)))
    elif issubclass(kind, type):
        yield from _methods(found, {*names, "__init__", "__new__", "__post_init__"})
    elif not issubclass(kind, (nn.Module, torch.Tensor, types.ModuleType, *PLAIN)) and function_in(found) is None:
        yield from _methods(found, {*names, "__call__"})
        fields = fields_of(found) or {}
        yield from ((None, fields[name]) for name in names if name in fields)


def _wrapped(value: Any) -> Any:
    """What a partial calls, and what a decorator says that it wraps."""
    if type(value) is functools.partial:
        return value.func
    if type(value) in (types.FunctionType, functools._lru_cache_wrapper):
        return value.__dict__.get("__wrapped__")
    return None


def _methods(owner: Any, names: Collection[str]) -> Iterator[tuple[Any, Any]]:
    """The methods of these names that a class, or the class of an object, has, its bases' own of each name included."""
    kind = owner if issubclass(type(owner), type) else type(owner)
    for base in type.__getattribute__(kind, "__mro__"):
        if not is_library(base):
            table = table_of(base)
            yield from ((owner, table[name]) for name in names if name in table)


def written_by(kinds: Iterable[type]) -> list[Written]:
    """What the code of these classes writes to by name."""
    found: list[Written] = []
    for function in functions_of(kinds):
        if not _outline(function.__code__)[1]:
            continue
        names = names_in(function.__code__)
        found += [(function.__globals__, name) for name in names.stored]
        for chain in names.changed | names.assigned:
            value = end_of(function, chain)
            if value is not MISSING and value is not None:
                found += [(holder, None) for holder in (value, fields_of(value)) if holder is not None]
    return found


def set_for_blocks(between: Collection[type], blocks: Collection[type]) -> list[Written]:
    """What the code between some blocks writes by name and their own reads; what they write as well is their cache."""
    written = written_by(between)
    if not written:
        return []
    own = {(id(holder), name) for holder, name in written_by(blocks)}
    written = [one for one in written if (id(one[0]), one[1]) not in own]
    named: set[tuple[int, str]] = set()
    values: set[int] = set()
    for function in functions_of(blocks):
        for chain in names_in(function.__code__).chains:
            if chain[0][0] == GLOBAL:
                named.add((id(function.__globals__), chain[0][1]))
            for length in range(1, len(chain) + 1):
                value = end_of(function, chain[:length])
                values.update(map(id, (value, fields_of(value))))
    values.discard(id(None))
    return [one for one in written if (id(one[0]) in values if one[1] is None else (id(one[0]), one[1]) in named)]


def takes_out(kinds: Collection[type]) -> bool:
    """Whether code of the modules of some classes takes something out of a container that it reaches by name."""
    own = {base.__module__ for kind in kinds for base in kind.__mro__ if not is_library(base)}
    return any(taken for *_, taken in _changed_by(functions_of(kinds, own)))


def _changed_by(functions: Iterable[types.FunctionType]) -> Iterator[tuple[Any, types.CodeType, bool]]:
    """The containers that some functions may change by name, and whether they take something out.

    Of dicts and sets those that may lose something.
    """
    for function in functions:
        writes = _outline(function.__code__)[1]
        if not writes:
            continue
        names = names_in(function.__code__)
        for chain in names.changed:
            kind = type(value := end_of(function, chain))
            if kind in _ORDERED or (kind in _CONTAINERS and chain in names.taken):
                yield value, function.__code__, chain in names.taken


@functools.lru_cache(maxsize=8192)
def _outline(code: types.CodeType) -> tuple[frozenset[str], frozenset[int]]:
    """The names in code, functions inside it included, and which of its instructions may write by one.

    It takes a hundredth of the time of reading chains, which few functions need.
    """
    names, writes = set(code.co_names), set(code.co_code[::2]) & _WRITES
    if not CHANGING.isdisjoint(names):
        writes.add(-1)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            inner = _outline(const)
            names |= inner[0]
            writes |= inner[1]
    return frozenset(names), frozenset(writes)


def lies_in(module: str, packages: Collection[str]) -> bool:
    """Whether a module is one of some, or lies in one."""
    return any(f"{module}.".startswith(f"{one}.") for one in packages)


def may_write(code: types.CodeType) -> bool:
    """Whether code has an instruction that may write by a name."""
    return bool(_outline(code)[1])


def names_of(code: types.CodeType) -> frozenset[str]:
    """The names in code, functions inside it included."""
    return _outline(code)[0]


def _named(function: types.FunctionType, names: Collection[str]) -> Iterator[Any]:
    """What the names in a function's code may lead to: globals, closure cells, and attributes of modules among them."""
    due = [function.__globals__[name] for name in names if name in function.__globals__]
    due += map(cell_contents, function.__closure__ or ())
    seen: set[int] = set()
    while due:
        value = due.pop()
        if issubclass(type(value), types.ModuleType):
            if id(value) not in seen and value.__name__.partition(".")[0] not in ("torch", *sys.stdlib_module_names):
                seen.add(id(value))
                due += [vars(value)[name] for name in names if name in vars(value)]
        else:
            yield value


def end_of(function: types.FunctionType, chain: Chain) -> Any:
    """What a chain of a function's code leads to now, as far as no code has to run; MISSING where that is not known."""
    (kind, name), rest = chain[0], chain[1:]
    if kind == GLOBAL:
        value = function.__globals__.get(name, MISSING)
    elif kind == CELL and name in function.__code__.co_freevars and function.__closure__:
        value = cell_contents(function.__closure__[function.__code__.co_freevars.index(name)])
    else:
        return MISSING
    for step, name in rest:
        if step == KEY:
            value = dict.get(value, name, MISSING) if issubclass(type(value), dict) else MISSING
        elif issubclass(type(value), type):
            value = _on_class(value, name)
        else:
            found = (fields_of(value) or {}).get(name, MISSING)
            value = _on_class(type(value), name) if found is MISSING and value is not MISSING else found
            if issubclass(type(value), (property, types.MemberDescriptorType, types.GetSetDescriptorType)):
                value = MISSING  # its code would have to run
    return value


def _on_class(kind: type, name: str) -> Any:
    mro = type.__getattribute__(kind, "__mro__")
    return next((table_of(base)[name] for base in mro if name in table_of(base)), MISSING)
