# SPDX-License-Identifier: Apache-2.0
"""Places that code may write to by name: what each held, how to put that back, and what a graph cannot stand for."""

from __future__ import annotations

import collections
import pickle
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from ..guards.option_recorder import MISSING
from ..guards.value_digests import cell_contents
from ..modules.tree import PLAIN

KINDS = (list, collections.deque, dict, set)  # of containers
_ORDERED = (list, collections.deque)
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)  # that stand for any
_DEPTH = 3  # of containers in containers, where a tensor is looked for
Items = list[Any]
IsGiven = Callable[[torch.Tensor], bool]


class Place(Protocol):
    """Where code may write. codes: the code that may."""

    @property
    def codes(self) -> Collection[types.CodeType]: ...

    def put_back(self, *, objects: bool = False) -> None:
        """Have it hold what it held. objects: a container also of what is no data."""

    def reasons(self, is_given: IsGiven) -> Iterable[str]:
        """Why a graph cannot stand for code that left it so. is_given: as for `NamedState.kept`."""


class Table:
    """Names in a table of globals, or attributes of an object, a class or a function."""

    def __init__(
        self, holder: Any, own: dict[str, Any] | None, names: Collection[str], codes: Collection[types.CodeType]
    ) -> None:
        self.holder, self.names, self.codes = holder, tuple(names), codes
        self._read: set[str] = set()  # those that code reads as well
        self._own: Mapping[str, Any] = own if own is not None and not isinstance(holder, type) else vars(holder)
        self._before = [self._own.get(name, MISSING) for name in self.names]

    def note_read(self, places: Collection[tuple[int, str]]) -> None:
        """Code reads these names, each with the `id` of what has it."""
        self._read |= {name for name in self.names if (id(self.holder), name) in places}

    def _changed(self) -> Iterator[tuple[str, Any, Any]]:
        for name, before in zip(self.names, self._before, strict=True):
            now = self._own.get(name, MISSING)
            if _is_changed(before, now):
                yield name, before, now

    def put_back(self, *, objects: bool = False) -> None:
        for name, before, _ in list(self._changed()):
            self._set(name, before)

    def reasons(self, is_given: IsGiven) -> Iterator[str]:
        for name, before, now in self._changed():
            yield from _reasons(f"{_name_of(self.holder)}.{name}", before, now, name in self._read, is_given)

    def _set(self, name: str, value: Any) -> None:
        if isinstance(self.holder, type):
            if value is MISSING:
                delattr(self.holder, name)
            else:
                setattr(self.holder, name, value)
        elif isinstance(self._own, dict):
            if value is MISSING:
                self._own.pop(name, None)
            else:
                self._own[name] = value


class Cell:
    """A free variable of a function."""

    def __init__(self, cell: types.CellType, name: str, code: types.CodeType) -> None:
        self._cell, self._name, self.codes = cell, name, {code}
        self._before = cell_contents(cell)

    def put_back(self, *, objects: bool = False) -> None:
        if _is_changed(self._before, cell_contents(self._cell)):
            if self._before is MISSING:
                del self._cell.cell_contents
            else:
                self._cell.cell_contents = self._before

    def reasons(self, is_given: IsGiven) -> Iterator[str]:
        now = cell_contents(self._cell)
        if _is_changed(self._before, now):
            yield from _reasons(f"its variable {self._name}", self._before, now, True, is_given)


class Container:
    """A list, a deque, a dict or a set."""

    def __init__(self, value: Any) -> None:
        self._value, self._before = value, _items(value)
        self.codes: set[types.CodeType] = set()
        self._read = self._counted = False

    def note(self, code: types.CodeType, read: bool, counted: bool) -> None:
        """Code may change it. read: it may read what is in it. counted: it changes items in their place."""
        self.codes.add(code)
        self._read |= read
        self._counted |= counted

    def put_back(self, *, objects: bool = False) -> None:
        now = _items(self._value)
        if not _are_same(now, self._before):
            is_dict = isinstance(self._value, dict)
            was, found = ([item[1] for item in items] if is_dict else items for items in (self._before, now))
            had, has = set(map(id, was)), set(map(id, found))
            others = [one for one in (*was, *found) if (id(one) in had) != (id(one) in has)]
            if objects or all(map(_is_data, others)):
                _refill(self._value, self._before)

    def reasons(self, is_given: IsGiven) -> Iterator[str]:
        now = _items(self._value)
        if not _are_same(now, self._before) and self._is_refused(now, is_given):
            yield f"it changes a {type(self._value).__name__} that it reaches by name, and compiled code would not"

    def _is_refused(self, now: Items, is_given: IsGiven) -> bool:
        """Whether it lacks something that it had, got what was computed of arguments, or counts.

        A dict or a set that grows by something else is a cache, which code fills again. Numbers that are put into a
        list, from which the code reads nothing, count calls.
        """
        if isinstance(self._value, dict):
            was, found = dict(self._before), dict(now)
            new: Items = [item for key, item in now if was.get(key, MISSING) is not item]
            lost = not was.keys() <= found.keys()
        else:
            had, has = set(map(id, self._before)), set(map(id, now))
            new, lost = [item for item in now if id(item) not in had], not had <= has
        if isinstance(self._value, _ORDERED) and (self._read or any(isinstance(one, torch.Tensor) for one in new)):
            return True
        return lost or self._counted or any(_depends(item, is_given) for item in new)


class WrittenTensor:
    """The numbers of a tensor that code may write to. A trace has no numbers and writes none."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version, self._before = tensor, _version_of(tensor), tensor.detach().clone()

    def put_back(self) -> None:
        if _version_of(self._tensor) != self._version:
            with torch.no_grad():
                self._tensor.copy_(self._before)


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class RandomNumbers:
    """The state of generators of random numbers: Python's own, NumPy's own, and further ones."""

    def __init__(self, further: Collection[Any]) -> None:
        numpy = sys.modules.get("numpy.random")
        own = [random, *([numpy] if numpy is not None else [])]
        self._before = [(one, *_state_of(one)) for one in (*own, *further)]

    def drawn(self) -> bool:
        """Whether somebody drew."""
        return any(pickle.dumps(_state_of(one)[0]) != pickle.dumps(before) for one, before, _ in self._before)

    def put_back(self) -> bool:
        """Whether somebody drew meanwhile."""
        drawn = self.drawn()
        for _, before, put in self._before if drawn else ():
            put(before)
        return drawn


def _state_of(generator: Any) -> tuple[Any, Callable[[Any], None]]:
    """The state of a generator, and what sets it."""
    if hasattr(generator, "getstate"):
        return generator.getstate(), generator.setstate
    if hasattr(generator, "get_state"):
        return generator.get_state(), generator.set_state
    bits = generator.bit_generator
    return bits.state, lambda state: setattr(bits, "state", state)


def _reasons(text: str, before: Any, now: Any, read: bool, is_given: IsGiven) -> Iterator[str]:
    """Why a graph cannot stand for code that puts a value in the place of another.

    What was not there, or was None, is filled once: code does so again. A number would be counted from there.
    """
    if _depends(now, is_given):
        yield f"it keeps a tensor in {text}, and compiled code would not"
    elif read and ((before is not MISSING and before is not None) or type(now) in (int, float)):
        yield f"it counts in {text}, and compiled code would not"


def _tensors(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """The tensors that a value is or holds."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (*KINDS, tuple)):
        for item in _items(value) if isinstance(value, KINDS) else value:
            yield from _tensors(item, depth - 1)


def _depends(value: Any, is_given: IsGiven) -> bool:
    return any(map(is_given, _tensors(value)))


def _is_data(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is a plain one, a tensor, or a container of such."""
    if type(value) in PLAIN or isinstance(value, (torch.Tensor, *_SIZES)):
        return True
    if depth and isinstance(value, (*KINDS, tuple)):
        held = dict.values(value) if isinstance(value, dict) else value
        return all(_is_data(item, depth - 1) for item in list(held))
    return False


def _is_changed(before: Any, now: Any) -> bool:
    """Whether there is another value, which is no flag or object of the host's: other threads set such."""
    if now is before or (type(now) is type(before) and type(now) in PLAIN and now == before):
        return False
    if now is MISSING:
        return _is_data(before)
    return _is_data(now) and not isinstance(now, (bool, str, type(None)))


def _items(value: Any) -> Items:
    return list(dict.items(value)) if isinstance(value, dict) else list(value)


def _are_same(one: Items, other: Items) -> bool:
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]
    return one is other


def _refill(value: Any, items: Items) -> None:
    """Give a container what was in it; it stays the one that others hold. A class's own methods are not asked."""
    if isinstance(value, dict):
        kind: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        kind.clear(value)
        for key, item in items:
            kind.__setitem__(value, key, item)
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), items)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, items)
    else:
        collections.deque.clear(value)
        collections.deque.extend(value, items)


def _name_of(holder: Any) -> str:
    if isinstance(holder, dict):
        return str(holder.get("__name__"))
    kind = holder if isinstance(holder, (type, types.FunctionType)) else type(holder)
    return f"{kind.__module__}.{kind.__qualname__}"
