# SPDX-License-Identifier: Apache-2.0
"""State that code reaches by name and changes: what it was before a trace, put back after it, and refused where a graph
would not change it as the code does.

The places are found in bytecode before anything runs (static_reach.py): globals, free variables, attributes of objects,
classes and functions, containers, the defaults of parameters, and Python's and NumPy's generators of random numbers.
"""

from __future__ import annotations

import functools
import io
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..guards.bytecode_names import ATTRIBUTE, KEY, Names, names_in
from ..guards.name_resolver import text_of
from ..guards.option_recorder import MISSING, Refused
from ..guards.value_digests import cell_contents, slots_of
from ..modules.containers import items_in
from ..modules.tree import fields_of
from ..reporting.resource_shortages import describe_error
from .named_places import (
    KINDS,
    Cell,
    Container,
    IsGiven,
    Place,
    RandomNumbers,
    Table,
    WrittenNumbers,
    generator_of,
    is_a,
    is_array,
)
from .source_hashes import module_of_code
from .static_reach import end_of, lies_in, may_write, names_of, run_by
from .trace_leftovers import remove_fakes

_MOST_NUMBERS = 1 << 16  # of a tensor or an array that is copied in case code writes to it
_DRAWS = "it draws random numbers from Python or NumPy, and compiled code would not"
Ran = Callable[[], Collection[types.CodeType]]


class NamedState:
    """What code of some modules may change by name, as it was when this was made.

    Where that cannot be told, no graph stands for the code: a value of the user's may raise at any question.
    """

    def __init__(self, modules: Iterable[nn.Module], besides: Collection[str] = ()) -> None:
        """besides: names of modules whose code is left out, with what lies in them."""
        self._besides = besides
        self._containers: dict[int, Container] = {}
        self._tables: list[Table] = []
        self._cells: list[Cell] = []
        self._iterators: list[str] = []
        self._generators: dict[int, Any] = {}
        self._written: dict[int, WrittenNumbers] = {}
        self._functions: dict[types.CodeType, types.FunctionType] = {}
        self._unknown = ""  # why it cannot be told
        read: set[tuple[int, str]] = set()
        objects: dict[int, tuple[Any, set[types.CodeType]]] = {}
        try:
            for function, owner in run_by(modules, besides):
                self._functions[function.__code__] = function
                if owner is not None and not (is_a(owner, type) and issubclass(owner, nn.Module)):
                    objects.setdefault(id(owner), (owner, set()))[1].add(function.__code__)
                self._function(function, read)
            for table in self._tables:
                table.note_read(read)
            for value, codes in objects.values():
                self._object(value, codes)
            self._numbers = RandomNumbers(self._generators.values())
        except Exception as error:
            self._unknown = f"what it changes by name cannot be told ({describe_error(error)})"
            self._numbers = RandomNumbers(())

    def _function(self, function: types.FunctionType, read: set[tuple[int, str]]) -> None:
        code = function.__code__
        if may_write(code):
            self._of(function, names_in(code), read)
        names = names_of(code)
        if not _takers().isdisjoint(names) or any(name[-1:] == "_" != name[-2:-1] for name in names):
            self._sources(function)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(value, code)

    def _of(self, function: types.FunctionType, names: Names, read: set[tuple[int, str]]) -> None:
        """The places that one function may write to, and which of them it reads."""
        code, globals_ = function.__code__, function.__globals__
        if names.stored:
            self._tables.append(Table(globals_, names.stored, {code}))
            for name in names.stored:
                self._value(globals_.get(name), code)
        for name in names.rebound & set(code.co_freevars):
            cell = (function.__closure__ or ())[code.co_freevars.index(name)]
            self._cells.append(Cell(cell, name, code))
            self._value(cell_contents(cell), code)
        for chain in names.chains:
            if len(chain) == 1:
                read.add((id(globals_), chain[0][1]))
            elif chain[-1][0] == ATTRIBUTE and (holder := end_of(function, chain[:-1])) is not MISSING:
                read.add((id(holder), chain[-1][1]))
        for chain in names.changed | names.assigned | names.unclear:
            for length in range(1, len(chain)):  # a defaultdict makes what is changed in it
                self._value(end_of(function, chain[:length]), code)
            value = end_of(function, chain)
            if is_a(value, KINDS):
                keys = {one[-1][1] for one in names.chains if one[:-1] == chain and one[-1][0] == KEY}
                read_too = chain in names.whole or bool(keys)
                found = self._containers.setdefault(id(value), Container(value))
                found.note(code, read_too, chain in names.counted, keys)
                for item in items_in(value) if chain in names.assigned else ():  # `x[key] += [1]` changes the item
                    self._value(item[1] if is_a(value, dict) else item, code)
            elif is_a(value, torch.Tensor) or is_array(value):
                self._value(value, code)
            elif value is not MISSING and chain not in names.changed - names.assigned and not self._is_left(value):
                self._attributes(value, names.sets, {code})
                if chain in names.counted:
                    read |= {(id(value), name) for name in names.sets}

    def _attributes(self, holder: Any, names: Iterable[str], codes: Collection[types.CodeType]) -> Table:
        table = Table(holder, names, codes)
        self._tables.append(table)
        for held in list((fields_of(holder) or {}).values()) if not is_a(holder, types.ModuleType) else ():
            for code in codes:
                self._value(held, code)
        return table

    def _is_left(self, holder: Any) -> bool:
        """Whether what an object holds is a module's own, or its code's that is left out."""
        kind = holder if is_a(holder, (type, types.FunctionType)) else type(holder)
        module = holder.__name__ if is_a(holder, types.ModuleType) else kind.__module__
        return is_a(holder, nn.Module) or lies_in(str(module), self._besides)

    def _object(self, value: Any, codes: Collection[types.CodeType]) -> None:
        """An object, or a class, whose methods may write to whatever it holds, or take from it."""
        held = {*(fields_of(value) or ()), *slots_of(type(value))}
        names = held.union(*(names_in(code).sets for code in codes))
        self._attributes(value, names, codes).note_read({(id(value), name) for name in names})
        if any(not _takers().isdisjoint(names_of(code)) for code in codes):
            for name, inner in list((fields_of(value) or {}).items()):
                if _is_iterator(inner):
                    self._iterators.append(f"{type(value).__module__}.{type(value).__qualname__}.{name}")

    def _sources(self, function: types.FunctionType) -> None:
        """Iterators and generators of random numbers that a function may take from, and tensors that it may write to.

        Each is the end of a chain, or what the method at its end is of.
        """
        code = function.__code__
        for chain in names_in(code).chains:
            values = [end_of(function, chain)]
            if len(chain) > 1:
                values.append(end_of(function, chain[:-1]))
            for value in values:
                self._source(value)
                if is_a(value, torch.Tensor):
                    self._value(value, code)
            taken = values[-1] if chain[-1][1] in ("__next__", "send") else values[0]
            if _is_iterator(taken):
                self._iterators.append(text_of([function.__globals__.get("__name__"), chain]))

    def _source(self, value: Any) -> None:
        generator = generator_of(value)
        if generator is not None:
            self._generators[id(generator)] = generator

    def _value(self, value: Any, code: types.CodeType) -> None:
        """A value that code may change in its place."""
        if is_a(value, KINDS):
            self._containers.setdefault(id(value), Container(value)).note(code, True, False)
        elif is_a(value, torch.Tensor):
            if not is_a(value, nn.Parameter) and value.layout is torch.strided and value.numel() <= _MOST_NUMBERS:
                self._written.setdefault(id(value), WrittenNumbers(value))
        elif is_array(value) and memoryview(value).nbytes <= _MOST_NUMBERS:
            self._written.setdefault(id(value), WrittenNumbers(value))
        else:
            self._source(value)

    def since(self) -> str | None:
        """Why a graph cannot stand for what code did since this was made; None where it can. It stays as it is."""
        if self._unknown or self._iterators:
            return self._unknown or f"it takes from the iterator {self._iterators[0]}"
        try:
            if self._numbers.drawn():
                return _DRAWS
            reasons = [reason for place in self._places() for reason in place.reasons(lambda _: True)]
            reasons += [reason for written in self._written.values() for reason in written.reasons()]
            return reasons[0] if reasons else None
        except Exception as error:
            return f"what it changes by name cannot be told ({describe_error(error)})"

    @classmethod
    def between(cls, root: nn.Module, blocks: Iterable[nn.Module], besides: Collection[str]) -> NamedState:
        """What a network's own code may change, between some blocks."""
        inside = {id(sub) for block in blocks if block is not root for sub in block.modules()}
        return cls((sub for sub in root.modules() if id(sub) not in inside), besides)

    def _refuse(self) -> None:
        """Raise Refused where code takes what cannot be put back, or where nothing can be told of it."""
        if self._unknown:
            raise Refused(self._unknown)
        if self._iterators:
            raise Refused(f"it takes from the iterator {self._iterators[0]}, and compiled code would not")

    def _places(self) -> Iterator[Place]:
        yield from self._tables
        yield from self._cells
        yield from self._containers.values()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Put back what code changed in a block, all that it put there included.

        Raises Refused, before the block, where that cannot be put back.
        """
        self._refuse()
        numbers = RandomNumbers(self._generators.values())
        problems: list[str] = []
        try:
            yield
        finally:
            _tried(numbers.put_back, problems)
            for place in self._places():
                _tried(place.put_back, problems)
            for written in self._written.values():
                _tried(written.put_back, problems)
        if problems:
            raise Refused(problems[0])

    @contextmanager
    def kept(self, ran: Ran, is_given: IsGiven) -> Iterator[None]:
        """Put back what code changed in a block, which raises Refused where a graph could not stand for that.

        ran: the code that did in the block. is_given: whether a tensor was computed of what the block was given. One
        that was not, such as a table for a size, may be kept by the code as a cache.
        """
        self._refuse()
        numbers = RandomNumbers(self._generators.values())
        reasons: list[str] = []
        try:
            yield
        finally:
            if numbers.put_back():
                reasons.append(_DRAWS)
            codes = set(ran())
            for place in self._places():
                if not codes.isdisjoint(place.codes):
                    _tried(lambda place=place: self._settle(place, is_given, reasons), reasons)  # type: ignore[misc]
            for written in self._written.values():
                reasons += written.reasons()
                _tried(written.put_back, reasons)
            _tried(lambda: self._left_over(codes, is_given, reasons), reasons)
        if reasons:
            raise Refused(reasons[0])

    @staticmethod
    def _settle(place: Place, is_given: IsGiven, reasons: list[str]) -> None:
        found = list(place.reasons(is_given))
        reasons += found
        place.put_back(wholly=bool(found), traced=True)

    def _left_over(self, codes: Collection[types.CodeType], is_given: IsGiven, reasons: list[str]) -> None:
        """What the trace left where the bytecode did not say that its code writes."""
        functions = []
        for code in codes:
            known = self._functions.get(code)
            if known is None and (module := module_of_code(code)) is not None:
                known = types.FunctionType(
                    code, vars(module), closure=tuple(types.CellType() for _ in code.co_freevars)
                )
            if known is not None:
                functions.append(known)
        if any(map(is_given, remove_fakes(functions, names_of))):
            reasons.append("it keeps a tensor in what it reaches by name, and compiled code would not")


def _tried(act: Callable[[], Any], problems: list[str]) -> None:
    """Each place is put back, whatever becomes of the others."""
    try:
        act()
    except Exception as error:
        problems.append(f"what it changed by name cannot be put back ({describe_error(error)})")


def _takers() -> frozenset[str]:
    """Methods of generators of random numbers, and what takes the next of an iterator."""
    numpy = sys.modules.get("numpy.random")
    kinds = (numpy.Generator, numpy.RandomState) if numpy is not None else ()
    return _methods_of(random.Random, *kinds)


@functools.cache
def _methods_of(*kinds: type) -> frozenset[str]:
    return frozenset(name for kind in kinds for name in dir(kind) if name[0] != "_") | {"next", "send", "__next__"}


def _is_iterator(value: Any) -> bool:
    """Files are iterators too, and code writes to them."""
    return any("__next__" in vars(base) for base in type(value).__mro__) and not is_a(value, io.IOBase)
