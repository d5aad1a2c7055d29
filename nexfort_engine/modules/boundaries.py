# SPDX-License-Identifier: Apache-2.0
"""Boundaries: modules that carry code of others, which compiled code calls as they are.

A forward hook, or a forward that somebody put in the place of a module's own, is code of others. On the module of a
region it stays outside: the module's own forward is compiled, and what others hung on it calls that (OwnForward says
where it does). On a module below, it makes that module a boundary: what lies before and after it is compiled, and the
module is called in between (guards/boundary_calls.py).
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Collection, Iterator
from itertools import starmap
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from .tree import HOOKS, INTERNAL, compiled_elsewhere, is_carrier, is_shim, replaced_forward

_hooks_of = attrgetter(*HOOKS)
_MOST_LOOKED_AT = 400  # of what a replaced forward holds
_MOST_ITEMS = 64  # of a container that is looked into


def boundaries(module: nn.Module) -> tuple[str, ...]:
    """The dotted names of the modules below this one that carry code of others now."""
    return tuple(path for path, sub in module.named_modules() if path and is_carrier(sub))


def first_carrier(root: nn.Module) -> str | None:
    """The dotted name of some module below that carries code now that is neither its own nor torch's, or None."""
    return next((path for path, sub in root.named_modules() if path and is_carrier(sub) and not _is_torchs(sub)), None)


def _is_torchs(module: nn.Module) -> bool:
    """Whether what a module carries is torch's own, such as its weight norm, which counts no calls."""
    hooks = [hook for table in _hooks_of(module) for hook in table.values()]
    kinds = [hook if isinstance(hook, types.FunctionType) else type(hook) for hook in hooks]
    return replaced_forward(module) is None and all(kind.__module__.startswith("torch.nn.utils.") for kind in kinds)


def put_on(module: nn.Module) -> tuple[int, ...]:
    """The identities of the code of others that a module carries. They are not kept alive."""
    own = replaced_forward(module)
    return (id(own), *(id(hook) for table in _hooks_of(module) for hook in table.values()))


def inside(path: str, paths: Collection[str]) -> bool:
    """Whether a module's dotted name is one of these, or lies below one of them."""
    return bool(paths) and any(path == one or path.startswith(f"{one}.") for one in paths)


def uncapturable(module: nn.Module) -> str | None:
    """Why a module tree cannot be captured as it is now, or None. What carries code of others is called as it is."""
    called = boundaries(module)
    for path, sub in module.named_modules():
        if path and inside(path, called):
            continue
        at = f" on {path}" if path else ""
        if compiled_elsewhere(sub):
            return f"code of torch.compile{at}, which compiled it already"
    return None


# ---- where a replaced forward calls the module's own ---------------------------------------------------------------


class Place:
    """A place that something can be put into: an entry of a dictionary or a list, or a closure's cell."""

    __slots__ = ("_holder", "_key")

    def __init__(self, holder: Any, key: Any = None) -> None:
        self._holder, self._key = holder, key

    @property
    def name(self) -> tuple[int, Any]:
        """Equal for equal places."""
        return id(self._holder), self._key

    def get(self) -> Any:
        """What is there; None where the place is gone."""
        try:
            return self._holder.cell_contents if isinstance(self._holder, types.CellType) else self._holder[self._key]
        except (LookupError, ValueError):
            return None

    def put(self, value: Any) -> None:
        """Put something there."""
        if isinstance(self._holder, types.CellType):
            self._holder.cell_contents = value
        else:
            self._holder[self._key] = value


_Chain = tuple[tuple[Place, Any], ...]  # the places on the way to a value, and what is in them


class OwnForward:
    """Where what others put in the place of a module's forward holds the module's own, which it calls."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._replaced: Any = None
        self._found: list[tuple[Place, _Chain]] = []

    def places(self) -> list[Place]:
        """Those places as they are now; none where the module's own forward stands, or is called in no way that shows.

        Looked for again only where something on the way to them was exchanged.
        """
        replaced = replaced_forward(self._module)
        if replaced is not self._replaced or not self._found or not all(starmap(self._is_there, self._found)):
            self._replaced, self._found = replaced, [] if replaced is None else _found(self._module, replaced)
        return [place for place, _ in self._found]

    def _is_there(self, place: Place, chain: _Chain) -> bool:
        return _is_own(place.get(), self._module) and all(step.get() is value for step, value in chain)


def _is_own(value: Any, module: nn.Module) -> bool:
    """Whether a value is the class's own forward bound to this module, or the engine's shim for it."""
    if type(value) is types.MethodType:
        return value.__self__ is module and value.__func__ is type(module).forward
    return is_shim(value) and getattr(value, "nexfort_of", None) is module


def _found(module: nn.Module, replaced: Any) -> list[tuple[Place, _Chain]]:
    """Breadth first, through functions, what they are bound to, closures, partials, and plain objects."""
    found: dict[tuple[int, Any], tuple[Place, _Chain]] = {}
    due: deque[tuple[Any, _Chain]] = deque([(replaced, ())])
    seen: dict[int, Any] = {}
    while due and len(seen) < _MOST_LOOKED_AT:
        value, chain = due.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        for place, part in _parts(value, module):
            if place is not None and _is_own(part, module):
                found.setdefault(place.name, (place, chain))
            elif id(part) not in seen:
                due.append((part, (*chain, (place, part)) if place is not None else chain))
    return list(found.values())


def _parts(value: Any, module: nn.Module) -> Iterator[tuple[Place | None, Any]]:
    """What a value holds, and where, as far as it can be exchanged there."""
    if value is module:
        for name, part in list(module.__dict__.items()):
            if name not in INTERNAL and name != "forward":
                yield Place(module.__dict__, name), part
    elif isinstance(value, (nn.Module, type, types.ModuleType, torch.Tensor)) or _is_own(value, module):
        return
    elif isinstance(value, types.MethodType):
        yield from ((None, value.__func__), (None, value.__self__))
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            yield Place(cell), Place(cell).get()
        yield from _entries(value.__kwdefaults__ or {})
        yield from _entries(value.__dict__)
        yield from ((None, default) for default in value.__defaults__ or ())
    elif isinstance(value, functools.partial):
        yield from ((None, part) for part in (value.func, *value.args, *value.keywords.values()))
        yield from _entries(value.__dict__)
    elif type(value) is tuple:
        yield from ((None, part) for part in value[:_MOST_ITEMS])
    elif type(value) in (list, dict):
        yield from _entries(value)
    elif type(table := getattr(value, "__dict__", None)) is dict:
        yield from _entries(table)


def _entries(table: Any) -> Iterator[tuple[Place, Any]]:
    if len(table) <= _MOST_ITEMS:
        for key, part in list(table.items()) if isinstance(table, dict) else list(enumerate(table)):
            yield Place(table, key), part
