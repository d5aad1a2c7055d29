# SPDX-License-Identifier: Apache-2.0
"""Places that code may write to by name: what each held, how to put that back, and what a graph cannot stand for.

The values are the user's: an attribute or a method of theirs may raise, or do something. So what they are goes by
their type alone, and containers are read by the methods of Python's own classes.
"""

from __future__ import annotations

import array
import collections
import numbers
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import torch

from ..guards.option_recorder import MISSING
from ..guards.value_digests import cell_contents, slots_of
from ..modules.containers import are_same, items_in, refill
from ..modules.tree import PLAIN, fields_of
from .trace_leftovers import holds_fake, tensors_in

KINDS = (list, collections.deque, dict, set)  # of containers
_ORDERED = (list, collections.deque)
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)  # that stand for any
_DEPTH = 3  # of containers in containers, where a value is plain
_OF_NUMPY = ("Generator", "RandomState")  # of random numbers
Items = list[Any]
IsGiven = Callable[[torch.Tensor], bool]


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether a value is of a class, whatever it says of its class itself."""
    return issubclass(type(value), kinds)


class Place(Protocol):
    """Where code may write. codes: the code that may."""

    @property
    def codes(self) -> Collection[types.CodeType]: ...

    def put_back(self, *, wholly: bool = False, traced: bool = False) -> None:
        """Have it hold what it held.

        Of a container those items that are data are what its code put there. traced: those alone that a trace made.
        wholly: whatever is new; another thread may have put it there.
        """

    def reasons(self, is_given: IsGiven) -> Iterable[str]:
        """Why a graph cannot stand for code that left it so. is_given: as for `NamedState.kept`."""


class Table:
    """Names in a table of globals, or attributes of an object, a class or a function."""

    def __init__(self, holder: Any, names: Iterable[str], codes: Collection[types.CodeType]) -> None:
        """holder: the table of globals itself, or whose attributes they are."""
        own = holder if type(holder) is dict else fields_of(holder)
        self._own: dict[str, Any] | None = None if is_a(holder, type) else own
        self._slots = frozenset(slots_of(type(holder)) if self._own is not holder else ())
        self.holder, self.names, self.codes = holder, tuple(names), codes
        self._read: set[str] = set()  # those that code reads as well
        self._before = [self._now(name) for name in self.names]

    def note_read(self, places: Collection[tuple[int, str]]) -> None:
        """Code reads these names, each with the `id` of what has it."""
        self._read |= {name for name in self.names if (id(self.holder), name) in places}

    def _now(self, name: str) -> Any:
        if is_a(self.holder, type):
            return type.__getattribute__(self.holder, "__dict__").get(name, MISSING)
        if self._own is not None and name in self._own:
            return self._own[name]
        if name in self._slots:
            try:
                return object.__getattribute__(self.holder, name)
            except AttributeError:
                return MISSING
        return MISSING

    def _changed(self) -> Iterator[tuple[str, Any, Any]]:
        for name, before in zip(self.names, self._before, strict=True):
            now = self._now(name)
            if _is_changed(before, now):
                yield name, before, now

    def put_back(self, *, wholly: bool = False, traced: bool = False) -> None:
        for name, before, _ in list(self._changed()):
            self._set(name, before)

    def reasons(self, is_given: IsGiven) -> Iterator[str]:
        for name, before, now in self._changed():
            yield from _reasons(f"{_name_of(self.holder)}.{name}", before, now, name in self._read, is_given)

    def _set(self, name: str, value: Any) -> None:
        if self._own is not None and name not in self._slots:
            if value is MISSING:
                self._own.pop(name, None)
            else:
                self._own[name] = value
            return
        owner: Any = type if is_a(self.holder, type) else object
        if value is MISSING:
            owner.__delattr__(self.holder, name)
        else:
            owner.__setattr__(self.holder, name, value)


class Cell:
    """A free variable of a function."""

    def __init__(self, cell: types.CellType, name: str, code: types.CodeType) -> None:
        self._cell, self._name, self.codes = cell, name, {code}
        self._before = cell_contents(cell)

    def put_back(self, *, wholly: bool = False, traced: bool = False) -> None:
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
        self._value, self._before = value, items_in(value)
        self.codes: set[types.CodeType] = set()
        self._read = self._counted = False
        self._keys: set[Any] = set()

    def note(self, code: types.CodeType, read: bool, counted: bool, keys: Collection[Any] = ()) -> None:
        """Code may change it.

        read: it may read what is in it. counted: it changes items in their place. keys: constants that it reads by.
        """
        self.codes.add(code)
        self._keys |= set(keys)
        self._read |= read
        self._counted |= counted

    def put_back(self, *, wholly: bool = False, traced: bool = False) -> None:
        now = items_in(self._value)
        if are_same(now, self._before):
            return

        def goes(item: Any) -> bool:
            return wholly or (_is_data(item) and not traced) or holds_fake(item)

        if is_a(self._value, dict):
            self._put_back_keys(dict(now), goes)
            return
        had = set(map(id, self._before))
        stays = [one for one in now if id(one) not in had and not goes(one)]
        if wholly or {*map(id, now)} >= had or all(map(_is_data, self._before)):
            refill(self._value, [*self._before, *stays])

    def _put_back_keys(self, now: dict[Any, Any], goes: Callable[[Any], bool]) -> None:
        kind: Any = collections.OrderedDict if is_a(self._value, collections.OrderedDict) else dict
        before = dict(self._before)
        for key, item in now.items():
            was = before.get(key, MISSING)
            if item is was or not goes(item):
                continue
            if was is not MISSING:
                kind.__setitem__(self._value, key, was)
            elif dict.__contains__(self._value, key):
                kind.__delitem__(self._value, key)
        for key in before.keys() - now.keys():
            if goes(before[key]):
                kind.__setitem__(self._value, key, before[key])

    def reasons(self, is_given: IsGiven) -> Iterator[str]:
        now = items_in(self._value)
        if not are_same(now, self._before) and self._is_refused(now, is_given):
            yield f"it changes a {type(self._value).__name__} that it reaches by name, and compiled code would not"

    def _is_refused(self, now: Items, is_given: IsGiven) -> bool:
        """Whether it lacks something that it had, got what was computed of arguments, or counts.

        A dict or a set that grows by something else is a cache, which code fills again. Numbers that are put into a
        list, from which the code reads nothing, count calls.
        """
        if is_a(self._value, dict):
            was, found = dict(self._before), dict(now)
            keys = {key for key, item in now if was.get(key, MISSING) is not item}
            new: Items = [found[key] for key in keys]
            lost = not was.keys() <= found.keys()
            counts = any(_is_number(was.get(key)) and _is_number(found[key]) for key in keys)
            added = keys - was.keys()
            counts |= any(type(key) is int and key == len(was) for key in added)
            counts |= any(_is_number(found[key]) for key in added & self._keys)
        else:
            had, has = set(map(id, self._before)), set(map(id, now))
            new, lost = [item for item in now if id(item) not in had], not had <= has
            counts = is_a(self._value, set) and any(type(one) is int and one == len(self._before) for one in new)
        if is_a(self._value, _ORDERED) and (self._read or any(is_a(one, torch.Tensor) for one in new)):
            return True
        return lost or counts or self._counted or any(_depends(item, is_given) for item in new)


class WrittenNumbers:
    """The numbers of a tensor or an array that code may write to."""

    def __init__(self, value: Any) -> None:
        self._value, self._version, self._before = value, _version_of(value), _copy_of(value)

    def is_changed(self) -> bool:
        """Whether somebody wrote to it."""
        if is_a(self._value, torch.Tensor):
            return self._version is None or _version_of(self._value) != self._version
        return bytes(memoryview(self._value)) != bytes(memoryview(self._before))

    def reasons(self) -> Iterator[str]:
        """Why a graph cannot stand for code that wrote to it. What it does to a tensor is part of the graph."""
        if not is_a(self._value, torch.Tensor) and self.is_changed():
            yield "it changes the numbers of an array that it reaches by name, and compiled code would not"

    def put_back(self) -> None:
        """Have it hold what it held. A trace writes to real tensors too."""
        from torch.utils._python_dispatch import _disable_current_modes

        value = self._value
        if not self.is_changed():
            return
        if not is_a(value, torch.Tensor):
            value[:] = self._before
        elif value.shape == self._before.shape:
            inference = torch.inference_mode(value.is_inference())
            with _disable_current_modes(), torch._C.DisableTorchFunction(), inference, torch.no_grad():
                value.copy_(self._before)


def is_array(value: Any) -> bool:
    """Whether a value is an array of numbers whose bytes can be compared and written back."""
    if is_a(value, (bytearray, array.array)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biufc" and value.ndim > 0


def _copy_of(value: Any) -> Any:
    if not is_a(value, torch.Tensor):
        return value[:] if is_a(value, (bytearray, array.array)) else value.copy()
    with torch.inference_mode(value.is_inference()):
        return value.detach().clone()


def _version_of(value: Any) -> int | None:
    if not is_a(value, torch.Tensor) or value.is_inference():
        return None
    return int(value._version)


class RandomNumbers:
    """The state of generators of random numbers: Python's own, NumPy's own, and further ones."""

    def __init__(self, generators: Collection[Any]) -> None:
        self._before = [(one, *_state_of(one)) for one in generators]

    def drawn(self) -> bool:
        """Whether somebody drew."""
        return any(not _are_equal(_state_of(one)[0], before) for one, before, _ in self._before)

    def put_back(self) -> bool:
        """Whether somebody drew meanwhile."""
        drawn = self.drawn()
        for _, before, put in self._before if drawn else ():
            put(before)
        return drawn


def generator_of(value: Any) -> Any:
    """The generator of random numbers that a value is, or whose method it is; None where it is none."""
    if value is random or (type(value) is types.ModuleType and value.__name__ == "numpy.random"):
        return value
    if type(value) is types.ModuleType:
        return sys.modules.get("numpy.random") if value.__name__ == "numpy" else None
    if type(value) in (types.BuiltinMethodType, types.MethodType):
        value = value.__self__
    if is_a(value, random.Random):
        return None if is_a(value, random.SystemRandom) else value
    is_numpys = type(value).__module__.startswith("numpy.random") and type(value).__name__ in _OF_NUMPY
    return value if is_numpys else None


def _state_of(generator: Any) -> tuple[Any, Callable[[Any], None]]:
    """The state of a generator, and what sets it."""
    if is_a(generator, random.Random) or generator is random:
        return generator.getstate(), generator.setstate
    if type(generator).__name__ == "Generator":
        bits = generator.bit_generator
        return bits.state, lambda state: setattr(bits, "state", state)
    return generator.get_state(), generator.set_state


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two states are equal, in which NumPy has arrays."""
    if type(one) is not type(other):
        return False
    if type(one) in (tuple, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    return one.tobytes() == other.tobytes() if type(one).__module__ == "numpy" else bool(one == other)


def _reasons(text: str, before: Any, now: Any, read: bool, is_given: IsGiven) -> Iterator[str]:
    """Why a graph cannot stand for code that puts a value in the place of another.

    What was not there, or was None, is filled once: code does so again. A number would be counted from there.
    """
    if _depends(now, is_given):
        yield f"it keeps a tensor in {text}, and compiled code would not"
    elif read and ((before is not MISSING and before is not None) or _is_number(now)):
        yield f"it counts in {text}, and compiled code would not"


def _depends(value: Any, is_given: IsGiven) -> bool:
    return any(map(is_given, tensors_in(value)))


def _is_number(value: Any) -> bool:
    if type(value) in (int, float, complex):
        return True
    return type(value).__module__ == "numpy" and is_a(value, numbers.Number)


def _is_data(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is a plain one, a number, a tensor, or a container of such."""
    if type(value) in PLAIN or _is_number(value) or is_a(value, (torch.Tensor, *_SIZES)):
        return True
    if depth and is_a(value, (*KINDS, tuple)):
        held = dict.values(value) if is_a(value, dict) else items_in(value)
        return all(_is_data(item, depth - 1) for item in list(held))
    return False


def _is_changed(before: Any, now: Any) -> bool:
    """Whether there is another value, which is no flag or object of the host's: other threads set such."""
    if now is before or (type(now) is type(before) and (type(now) in PLAIN or _is_number(now)) and now == before):
        return False
    if now is MISSING:
        return _is_data(before)
    return holds_fake(now) or (_is_data(now) and type(now) not in (bool, str, type(None)))


def _name_of(holder: Any) -> str:
    if type(holder) is dict:
        return str(holder.get("__name__"))
    kind = holder if is_a(holder, (type, types.FunctionType)) else type(holder)
    return f"{kind.__module__}.{kind.__qualname__}"
