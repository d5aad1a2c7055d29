# SPDX-License-Identifier: Apache-2.0
"""Tensors without data that a trace left in what its code reaches: they are found where no bytecode tells of them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..guards.value_digests import cell_contents, slots_of, table_of
from ..modules.containers import items_in, refill
from ..modules.tree import PLAIN, fields_of

_DEPTH = 5  # of values in one another
_MOST_VALUES = 20_000  # that are looked at
_PASSED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, nn.Module, torch.dtype, torch.device)
_CLOSED = ("torch", "triton", "numpy", "sympy", "nexfort_engine", "builtins")  # packages whose objects are not searched
Remove = Callable[[], Any]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that a value is or holds, in containers and objects."""
    return (tensor for tensor, _ in _search([(value, _nothing)]))


def holds_fake(value: Any) -> bool:
    """Whether a value is or holds a tensor without data, or a size that stands for any."""
    return type(value) in (torch.SymInt, torch.SymFloat, torch.SymBool) or any(map(_is_fake, tensors_in(value)))


def remove_fakes(
    functions: Iterable[types.FunctionType], names: Callable[[types.CodeType], Iterable[str]]
) -> list[Any]:
    """Take tensors without data out of all that functions reach: the globals that they name, closures and defaults.

    names: those in some code. Gives the tensors.
    """
    roots: dict[tuple[int, str], tuple[Any, Remove]] = {}
    for function in functions:
        globals_ = function.__globals__
        for name in names(function.__code__):
            if name in globals_:
                roots[id(globals_), name] = globals_[name], partial(globals_.__setitem__, name, None)
        for cell in function.__closure__ or ():
            roots[id(cell), ""] = cell_contents(cell), partial(setattr, cell, "cell_contents", None)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            roots[id(value), ""] = value, _nothing
    found = [(tensor, remove) for tensor, remove in _search(roots.values()) if _is_fake(tensor)]
    for _, remove in found:
        remove()
    return [tensor for tensor, _ in found]


def _nothing() -> None:
    """Where there is nothing that it could be taken out of."""


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return issubclass(type(tensor), FakeTensor)


def _search(roots: Iterable[tuple[Any, Remove]]) -> Iterator[tuple[torch.Tensor, Remove]]:
    """Each tensor, and what takes it out of what holds it."""
    due = [(value, remove, _DEPTH) for value, remove in roots]
    seen: set[int] = set()
    while due and len(seen) < _MOST_VALUES:
        value, remove, depth = due.pop()
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            yield value, remove
        elif kind not in PLAIN and depth and id(value) not in seen and not issubclass(kind, _PASSED):
            seen.add(id(value))
            due += [(inner, take, depth - 1) for inner, take in _parts(value, remove)]


def _parts(value: Any, remove: Remove) -> Iterator[tuple[Any, Remove]]:
    kind = type(value)
    if issubclass(kind, dict):
        yield from ((item, partial(dict.pop, value, key, None)) for key, item in items_in(value))
    elif issubclass(kind, (tuple, frozenset)):
        yield from ((item, remove) for item in items_in(value))
    elif items := items_in(value):
        yield from ((item, partial(_take_out, value, item)) for item in items)
    elif issubclass(kind, type):
        if value.__module__.partition(".")[0] not in _CLOSED:
            yield from ((item, partial(type.__delattr__, value, name)) for name, item in list(table_of(value).items()))
    elif kind.__module__.partition(".")[0] not in _CLOSED:
        fields = fields_of(value) or {}
        yield from ((item, partial(_unset, value, fields, name)) for name, item in list(fields.items()))
        for name in slots_of(kind):
            try:
                yield object.__getattribute__(value, name), partial(object.__delattr__, value, name)
            except AttributeError:
                continue


def _take_out(value: Any, item: Any) -> None:
    refill(value, [one for one in items_in(value) if one is not item])


def _unset(value: Any, fields: dict[str, Any], name: str) -> None:
    """As if nothing had been kept there yet: what the class has, or None."""
    if any(name in table_of(base) for base in type(value).__mro__):
        fields.pop(name, None)
    else:
        fields[name] = None
