# SPDX-License-Identifier: Apache-2.0
"""State that code reaches by name and changes: what it was before a trace, put back after it, and refused where a graph
would not change it as the code does.

The places are found in bytecode before anything runs (static_reach.py): globals, free variables, attributes of objects,
classes and functions, containers, the defaults of parameters, and Python's and NumPy's generators of random numbers.
"""

from __future__ import annotations

import collections
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ..guards.bytecode_names import ATTRIBUTE, KEY, Names, names_in
from ..guards.name_resolver import text_of
from ..guards.option_recorder import MISSING, Refused
from ..guards.value_digests import cell_contents
from ..modules.tree import PLAIN, fields_of
from .static_reach import end_of, functions_of, lies_in, may_write, names_of, objects_of

_ORDERED = (list, collections.deque)
_KINDS = (list, collections.deque, dict, set)
# methods of generators of random numbers, and what takes the next of an iterator
_TAKE = frozenset((*dir(random.Random), "integers", "normal", "next", "send", "__next__", "standard_normal"))
_TAKE = frozenset(name for name in _TAKE if name[0] != "_" or name == "__next__")
_MOST_NUMBERS = 1 << 16  # of a tensor that is copied in case a plan writes to it
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)  # that stand for any
_DEPTH = 3  # of containers in containers, where a tensor is looked for
Items = list[Any]
Ran = Callable[[], Collection[types.CodeType]]
IsGiven = Callable[[torch.Tensor], bool]


class NamedState:
    """What code of some classes may change by name, as it was when this was made."""

    def __init__(self, kinds: Collection[type], besides: Collection[str] = ()) -> None:
        """besides: names of modules whose code is left out, with what lies in them."""
        self._besides = besides
        self._containers: dict[int, _Container] = {}
        self._tables: list[_Table] = []
        self._cells: list[_Cell] = []
        self._iterators: list[str] = []
        self._generators: list[Any] = []
        self._tensors: dict[int, _Numbers] = {}
        read: set[tuple[int, str]] = set()
        for function in functions_of(kinds, besides=besides):
            code = function.__code__
            if may_write(code):
                self._of(function, names_in(code), read)
            names = names_of(code)
            if not _TAKE.isdisjoint(names) or any(name[-1:] == "_" != name[-2:-1] for name in names):
                self._sources(function)
            for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self._container(value, code)
        for table in self._tables:
            table.read = {name for name in table.names if (id(table.holder), name) in read}
        for value, codes in objects_of(kinds, besides):
            self._object(value, codes)

    def _of(self, function: types.FunctionType, names: Names, read: set[tuple[int, str]]) -> None:
        """The places that one function may write to, and which of them it reads."""
        code, globals_ = function.__code__, function.__globals__
        if names.stored:
            self._tables.append(_Table(globals_, globals_, names.stored, {code}))
            for name in names.stored:
                self._container(globals_.get(name), code)
        for name in names.rebound & set(code.co_freevars):
            cell = (function.__closure__ or ())[code.co_freevars.index(name)]
            self._cells.append(_Cell(cell, name, code))
            self._container(cell_contents(cell), code)
        for chain in names.chains:
            if len(chain) == 1:
                read.add((id(globals_), chain[0][1]))
            elif chain[-1][0] == ATTRIBUTE and (holder := end_of(function, chain[:-1])) is not MISSING:
                read.add((id(holder), chain[-1][1]))
        for chain in names.changed | names.assigned:
            for length in range(1, len(chain)):  # a defaultdict makes what is changed in it
                self._container(end_of(function, chain[:length]), code)
            value = end_of(function, chain)
            if isinstance(value, _KINDS):
                is_read = chain in names.whole or any(
                    one[: len(chain)] == chain and one[-1][0] == KEY for one in names.chains
                )
                self._container(value, code, read=is_read, counted=chain in names.counted)
            elif value is not MISSING and chain in names.assigned and not self._is_left(value):
                own = fields_of(value)
                if isinstance(value, type) or own is not None:
                    self._tables.append(_Table(value, own, names.sets, {code}))
                    if chain in names.counted:
                        read |= {(id(value), name) for name in names.sets}

    def _is_left(self, holder: Any) -> bool:
        """Whether what an object holds is a module's own, or its code's that is left out."""
        kind = holder if isinstance(holder, (type, types.FunctionType)) else type(holder)
        module = holder.__name__ if isinstance(holder, types.ModuleType) else kind.__module__
        return isinstance(holder, nn.Module) or lies_in(str(module), self._besides)

    def _object(self, value: Any, codes: Collection[types.CodeType]) -> None:
        """An object whose methods may write to whatever it holds."""
        own = fields_of(value)
        if own is not None:
            table = _Table(value, own, frozenset(own).union(*(names_in(code).sets for code in codes)), codes)
            table.read = table.names
            self._tables.append(table)
            for held in list(own.values()):
                for code in codes:
                    self._container(held, code)

    def _sources(self, function: types.FunctionType) -> None:
        """Iterators and generators of random numbers that a function may take from, and tensors that it may write to.

        Those that name such tensors are the end of a chain, or what the method at its end is of.
        """
        for chain in names_in(function.__code__).chains:
            value = end_of(function, chain)
            of_method = end_of(function, chain[:-1]) if len(chain) > 1 else MISSING
            for one in (value, of_method):
                if isinstance(one, random.Random) or hasattr(one, "bit_generator"):
                    self._generators.append(one)
                if isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter) and one.numel() <= _MOST_NUMBERS:
                    self._tensors.setdefault(id(one), _Numbers(one))
            taken = of_method if chain[-1][1] in ("__next__", "send") else value
            if isinstance(taken, Iterator):
                self._iterators.append(text_of([function.__globals__.get("__name__"), chain]))

    def _container(self, value: Any, code: types.CodeType, *, read: bool = True, counted: bool = False) -> None:
        if isinstance(value, _KINDS):
            known = self._containers.setdefault(id(value), _Container(value))
            known.codes.add(code)
            known.read |= read
            known.counted |= counted

    def _refuse_iterators(self) -> None:
        if self._iterators:
            raise Refused(f"it takes from the iterator {self._iterators[0]}, and compiled code would not")

    def _places(self) -> Iterator[_Place]:
        yield from self._tables
        yield from self._cells
        yield from self._containers.values()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Put back what code changed in a block, all that it put there included.

        Raises Refused, before the block, where that cannot be put back.
        """
        self._refuse_iterators()
        numbers = _Random(self._generators)
        try:
            yield
        finally:
            numbers.put_back()
            for place in self._places():
                place.put_back()
            for tensor in self._tensors.values():
                tensor.put_back()

    @contextmanager
    def kept(self, ran: Ran, is_given: IsGiven) -> Iterator[None]:
        """Put back what code changed in a block, which raises Refused where a graph could not stand for that.

        ran: the code that did in the block. is_given: whether a tensor was computed of what the block was given. One
        that was not, such as a table for a size, may be kept by the code as a cache. What other threads change
        meanwhile is gone.
        """
        self._refuse_iterators()
        numbers = _Random(self._generators)
        reasons: list[str] = []
        try:
            yield
        finally:
            if numbers.put_back():
                reasons.append("it draws random numbers from Python or NumPy, and compiled code would not")
            codes = set(ran())
            for place in self._places():
                if not codes.isdisjoint(place.codes):
                    reasons += place.settled(is_given)
        if reasons:
            raise Refused(reasons[0])


class _Place(Protocol):
    """Where code may write. codes: the code that may."""

    @property
    def codes(self) -> Collection[types.CodeType]: ...

    def put_back(self) -> None:
        """Have it hold what it held."""

    def settled(self, is_given: IsGiven) -> Iterable[str]:
        """The same, and say why a graph could not stand for the code, if it cannot."""


class _Table:
    """Names in a table of globals, or attributes of an object, a class or a function."""

    def __init__(
        self, holder: Any, own: dict[str, Any] | None, names: Collection[str], codes: Collection[types.CodeType]
    ) -> None:
        self.holder, self.names, self.codes = holder, tuple(names), codes
        self.read: Collection[str] = ()  # of these names, those that code reads as well
        self._own: Mapping[str, Any] = own if own is not None and not isinstance(holder, type) else vars(holder)
        self._before = [self._own.get(name, MISSING) for name in self.names]

    def _changed(self) -> Iterator[tuple[str, Any, Any]]:
        for name, before in zip(self.names, self._before, strict=True):
            now = self._own.get(name, MISSING)
            if _is_changed(before, now):
                yield name, before, now

    def put_back(self) -> None:
        for name, before, _ in list(self._changed()):
            self._set(name, before)

    def settled(self, is_given: IsGiven) -> Iterator[str]:
        for name, before, now in self._changed():
            yield from _reasons(f"{_name_of(self.holder)}.{name}", before, now, name in self.read, is_given)
        self.put_back()

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


class _Cell:
    """A free variable of a function."""

    def __init__(self, cell: types.CellType, name: str, code: types.CodeType) -> None:
        self._cell, self._name, self.codes = cell, name, {code}
        self._before = cell_contents(cell)

    def put_back(self) -> None:
        if _is_changed(self._before, cell_contents(self._cell)):
            if self._before is MISSING:
                del self._cell.cell_contents
            else:
                self._cell.cell_contents = self._before

    def settled(self, is_given: IsGiven) -> Iterator[str]:
        now = cell_contents(self._cell)
        if _is_changed(self._before, now):
            yield from _reasons(f"its variable {self._name}", self._before, now, True, is_given)
            self.put_back()


class _Container:
    """A list, a deque, a dict or a set.

    read: its code may read what is in it. counted: it changes items in their place.
    """

    def __init__(self, value: Any) -> None:
        self._value, self._before = value, _items(value)
        self.codes: set[types.CodeType] = set()
        self.read = self.counted = False

    def put_back(self) -> None:
        now = _items(self._value)
        if not _are_same(now, self._before):
            is_dict = isinstance(self._value, dict)
            was, found = ([item[1] for item in items] if is_dict else items for items in (self._before, now))
            had, has = set(map(id, was)), set(map(id, found))
            if all(_is_data(one) for one in (*was, *found) if (id(one) in had) != (id(one) in has)):
                _refill(self._value, self._before)

    def settled(self, is_given: IsGiven) -> Iterator[str]:
        now = _items(self._value)
        if not _are_same(now, self._before):
            if self._is_refused(now, is_given):
                kind = type(self._value).__name__
                yield f"it changes a {kind} that it reaches by name, and compiled code would not"
                _refill(self._value, self._before)
            self.put_back()

    def _is_refused(self, now: Items, is_given: IsGiven) -> bool:
        """Whether it lacks something that it had, got what was computed of arguments, or counts.

        A dict or a set that grows by something else is a cache, which code fills again. Numbers that are put into a
        list, from which the code reads nothing, count calls.
        """
        if isinstance(self._value, dict):
            keys = dict(now)
            lost = any(key not in keys for key, _ in self._before)
            given = any(_depends(item, is_given) for key, item in now)
            return lost or given or self.counted
        if self.read and isinstance(self._value, _ORDERED):
            return True
        if isinstance(self._value, _ORDERED) and any(isinstance(one, torch.Tensor) for one in now[len(self._before) :]):
            return True
        return any(_depends(item, is_given) for item in now) or not {*map(id, self._before)} <= {*map(id, now)}


class _Numbers:
    """The numbers of a tensor that code may write to. A trace has no numbers and writes none."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version, self._before = tensor, _version_of(tensor), tensor.detach().clone()

    def put_back(self) -> None:
        if _version_of(self._tensor) != self._version:
            with torch.no_grad():
                self._tensor.copy_(self._before)


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class _Random:
    """The state of generators of random numbers: Python's own, NumPy's own, and further ones."""

    def __init__(self, further: Collection[Any]) -> None:
        numpy = sys.modules.get("numpy.random")
        own = [random, *([numpy] if numpy is not None else [])]
        self._before = [(one, *_state_of(one)) for one in (*own, *further)]

    def put_back(self) -> bool:
        """Whether somebody drew meanwhile."""
        drawn = False
        for generator, before, put in self._before:
            if repr(_state_of(generator)[0]) != repr(before):
                put(before)
                drawn = True
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


def _traced(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """What a trace made in a value: tensors without data, and sizes that stand for any."""
    if isinstance(value, torch.Tensor):
        from torch._subclasses.fake_tensor import FakeTensor

        if isinstance(value, FakeTensor):
            yield value
    elif isinstance(value, _SIZES):
        yield value
    elif depth and isinstance(value, (*_KINDS, tuple)):
        for item in _items(value) if isinstance(value, _KINDS) else value:
            yield from _traced(item, depth - 1)


def _depends(value: Any, is_given: IsGiven) -> bool:
    return any(isinstance(one, torch.Tensor) and is_given(one) for one in _traced(value))


def _is_data(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is a plain one, a tensor, or a container of such."""
    if type(value) in PLAIN or isinstance(value, (torch.Tensor, *_SIZES)):
        return True
    if depth and isinstance(value, (*_KINDS, tuple)):
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
