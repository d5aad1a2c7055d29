# SPDX-License-Identifier: Apache-2.0
"""State that code reaches by name and changes: what it was before a trace, put back after it, and refused where a graph
would not change it as the code does.

The places are found in bytecode before anything runs (static_reach.py): globals, free variables, attributes of objects,
classes and functions, containers, the defaults of parameters, and Python's and NumPy's generators of random numbers.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..guards.bytecode_names import ATTRIBUTE, KEY, Names, names_in
from ..guards.name_resolver import text_of
from ..guards.option_recorder import MISSING, Refused
from ..guards.value_digests import cell_contents
from ..modules.tree import fields_of
from .named_places import KINDS, Cell, Container, IsGiven, Place, RandomNumbers, Table, WrittenTensor
from .static_reach import end_of, lies_in, may_write, names_of, run_by

# methods of generators of random numbers, and what takes the next of an iterator
_TAKE = frozenset(name for name in (*dir(random.Random), "integers", "normal", "standard_normal") if name[0] != "_")
_TAKE |= {"next", "send", "__next__"}
_MOST_NUMBERS = 1 << 16  # of a tensor that is copied in case a plan writes to it
_DRAWS = "it draws random numbers from Python or NumPy, and compiled code would not"
Ran = Callable[[], Collection[types.CodeType]]


class NamedState:
    """What code of some modules may change by name, as it was when this was made."""

    def __init__(self, modules: Iterable[nn.Module], besides: Collection[str] = ()) -> None:
        """besides: names of modules whose code is left out, with what lies in them."""
        self._besides = besides
        self._containers: dict[int, Container] = {}
        self._tables: list[Table] = []
        self._cells: list[Cell] = []
        self._iterators: list[str] = []
        self._generators: list[Any] = []
        self._tensors: dict[int, WrittenTensor] = {}
        read: set[tuple[int, str]] = set()
        objects: dict[int, tuple[Any, set[types.CodeType]]] = {}
        for function, owner in run_by(modules, besides):
            code = function.__code__
            if owner is not None and not isinstance(owner, type):
                objects.setdefault(id(owner), (owner, set()))[1].add(code)
            if may_write(code):
                self._of(function, names_in(code), read)
            names = names_of(code)
            if not _TAKE.isdisjoint(names) or any(name[-1:] == "_" != name[-2:-1] for name in names):
                self._sources(function)
            for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self._container(value, code)
        for table in self._tables:
            table.note_read(read)
        for value, codes in objects.values():
            self._object(value, codes)
        self._numbers = RandomNumbers(self._generators)

    def _of(self, function: types.FunctionType, names: Names, read: set[tuple[int, str]]) -> None:
        """The places that one function may write to, and which of them it reads."""
        code, globals_ = function.__code__, function.__globals__
        if names.stored:
            self._tables.append(Table(globals_, globals_, names.stored, {code}))
            for name in names.stored:
                self._container(globals_.get(name), code)
        for name in names.rebound & set(code.co_freevars):
            cell = (function.__closure__ or ())[code.co_freevars.index(name)]
            self._cells.append(Cell(cell, name, code))
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
            if isinstance(value, KINDS):
                is_read = chain in names.whole or any(
                    one[: len(chain)] == chain and one[-1][0] == KEY for one in names.chains
                )
                self._container(value, code, read=is_read, counted=chain in names.counted)
            elif value is not MISSING and chain in names.assigned and not self._is_left(value):
                own = fields_of(value)
                if isinstance(value, type) or own is not None:
                    self._tables.append(Table(value, own, names.sets, {code}))
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
            table = Table(value, own, frozenset(own).union(*(names_in(code).sets for code in codes)), codes)
            table.note_read({(id(value), name) for name in table.names})
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
                    self._tensors.setdefault(id(one), WrittenTensor(one))
            taken = of_method if chain[-1][1] in ("__next__", "send") else value
            if isinstance(taken, Iterator):
                self._iterators.append(text_of([function.__globals__.get("__name__"), chain]))

    def _container(self, value: Any, code: types.CodeType, *, read: bool = True, counted: bool = False) -> None:
        if isinstance(value, KINDS):
            self._containers.setdefault(id(value), Container(value)).note(code, read, counted)

    def since(self) -> str | None:
        """Why a graph cannot stand for what code did since this was made; None where it can. It stays as it is."""
        if self._iterators:
            return f"it takes from the iterator {self._iterators[0]}"
        if self._numbers.drawn():
            return _DRAWS
        return next((reason for place in self._places() for reason in place.reasons(lambda _: True)), None)

    @classmethod
    def between(cls, root: nn.Module, blocks: Iterable[nn.Module], besides: Collection[str]) -> NamedState:
        """What a network's own code may change, between some blocks."""
        inside = {id(sub) for block in blocks if block is not root for sub in block.modules()}
        return cls((sub for sub in root.modules() if id(sub) not in inside), besides)

    def _refuse_iterators(self) -> None:
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
        self._refuse_iterators()
        numbers = RandomNumbers(self._generators)
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
        numbers = RandomNumbers(self._generators)
        reasons: list[str] = []
        try:
            yield
        finally:
            if numbers.put_back():
                reasons.append(_DRAWS)
            codes = set(ran())
            for place in self._places():
                if not codes.isdisjoint(place.codes):
                    found = list(place.reasons(is_given))
                    reasons += found
                    place.put_back(objects=bool(found))
        if reasons:
            raise Refused(reasons[0])
