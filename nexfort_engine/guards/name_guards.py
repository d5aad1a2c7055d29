# SPDX-License-Identifier: Apache-2.0
"""Dependences: what code reaches by name while it is captured, and whether all of it is still what it was.

A function that others replace (`F.scaled_dot_product_attention`, a class's `forward`), a value in a module, a function
in a registry or a closure are dependences of an artefact like an attribute of its block. `rows_of` lists them after a
capture: an address and a digest each. `Watched` holds the places of all addresses that an engine's artefacts depend on,
and compares them by identity, each once a step. Only where one differs are digests compared again.

An address is a module's name and a chain (bytecode_names.py). It begins in the globals that the code itself uses, so
that a module that was loaded anew, with a dict of its own, is not taken for the one that the code knows.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import inspect
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from ..system.torch_modes import CALL
from .bytecode_names import CELL, IMPORT, KEY, Chain
from .option_recorder import MISSING, PLAIN, Refused
from .value_digests import (
    cell_contents,
    digest,
    fields_of,
    is_library,
    is_reachable,
    plain_of,
    plain_of_class,
    table_of,
)

CLASS = "class"
Address = tuple[str, Chain]  # the name of a module ("" for an import), and how to get on from there
Row = list[Any]  # JSON: [module, [[kind, name], ...], digest]

_MOST_ITEMS = 1 << 16  # of a container whose content is compared, at about 12 ns each
_DEPTH = 4  # of containers in containers
_IN_OBJECT = 2  # of containers in an object
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.OrderedDict, collections.defaultdict, collections.deque)
# groups of places: how each is read
_TABLE, _CELL, _FIELD, _CODE, _CONTENT = range(5)
Place = tuple[int, Any, Any]  # group, holder, name
_CODE_OF = attrgetter("__code__")


class Resolver:
    """Finds the values of addresses, as the code of some classes would, and notes where it looked.

    places: what was looked at; values: what was there.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        self.places: list[Place] = []
        self.values: list[Any] = []
        self._classes: dict[tuple[str, str], type] = {}
        self._globals: dict[str, list[dict[str, Any]]] = {}
        for kind in classes:
            for base in kind.__mro__:
                self._classes.setdefault((base.__module__, base.__qualname__), base)
                if not is_library(base):
                    for value in list(vars(base).values()):
                        self.met(value)

    def met(self, value: Any) -> None:
        """Code of this function was found; its globals are those of its module from now on."""
        function = function_in(value)
        if function is not None:
            known = self._globals.setdefault(str(function.__globals__.get("__name__")), [])
            if not any(found is function.__globals__ for found in known):
                known.append(function.__globals__)

    def ends(self, address: Address) -> list[Any]:
        """The values at an address: one, or more where a module was loaded twice; MISSING for what is not there."""
        module, chain = address
        (kind, name), rest = chain[0], chain[1:]
        if kind == IMPORT:
            starts = [self._looked(_TABLE, sys.modules, name, sys.modules.get(name, MISSING))]
        elif kind == CLASS:
            starts = [self._class(module, name)]
        else:
            starts = [self._global(table, name) for table in self._tables(module)] or [MISSING]
        found: list[Any] = []
        for start in starts:
            found += self._along(start, rest)
        return found

    def _tables(self, module: str) -> list[dict[str, Any]]:
        if known := self._globals.get(module):
            return known
        loaded = sys.modules.get(module)
        return [vars(loaded)] if loaded is not None else []

    def _class(self, module: str, name: str) -> Any:
        known = self._classes.get((module, name))
        if known is not None:
            return known
        value: Any = sys.modules.get(module, MISSING)
        for part in name.split("."):
            value = getattr(value, part, MISSING) if value is not MISSING else MISSING
        return value

    def _global(self, table: dict[str, Any], name: str) -> Any:
        value = self._looked(_TABLE, table, name, table.get(name, MISSING))
        if value is MISSING:
            value = self._looked(_TABLE, vars(builtins), name, vars(builtins).get(name, MISSING))
        return value

    def _looked(self, group: int, holder: Any, name: Any, value: Any) -> Any:
        self.places.append((group, holder, name))
        self.values.append(value)
        return value

    def _along(self, value: Any, chain: Chain) -> list[Any]:
        """What lies at the end of a chain from a value; with the plain attributes of an object whose code is there."""
        more: list[Any] = []
        for kind, name in chain:
            if value is MISSING:
                break
            if isinstance(value, ContextVar):
                break  # its value counts, whatever is asked of it
            if kind == CELL:
                value = self._cell(value, name)
            elif kind == KEY:
                value = self._item(value, name)
            elif isinstance(value, types.ModuleType):
                value = self._in_module(value, name)
            elif isinstance(value, type):
                value = self._on_class(value, name)
            elif isinstance(value, (*_CONTAINERS, str, int, float, torch.Tensor)):
                break  # a method of the value: it is the value that counts
            else:
                owner = value
                value, own = self._on_object(value, name)
                if own is not None:
                    more.append(own)
                if value is MISSING or value is owner or own is not None:
                    break
        if isinstance(value, ContextVar):
            value = self._looked(_FIELD, value, "get", _field(value, "get"))
        self._note(value, _DEPTH)
        if isinstance(value, types.MethodType) and not isinstance(value.__self__, (type, nn.Module)):
            more.append(self._note_object(value.__self__))
        return [value, *more]

    def _cell(self, function: Any, name: str) -> Any:
        function = function_in(function)
        if function is None or name not in function.__code__.co_freevars or not function.__closure__:
            return MISSING
        cell = function.__closure__[function.__code__.co_freevars.index(name)]
        return self._looked(_CELL, cell, None, cell_contents(cell))

    def _item(self, value: Any, key: Any) -> Any:
        if isinstance(value, dict):
            return self._looked(_TABLE, value, key, dict.get(value, key, MISSING))
        if isinstance(value, (list, tuple)) and type(key) is int and -len(value) <= key < len(value):
            self._note_content(value, 1)
            return value[key]
        if isinstance(value, type(os.environ)) and type(key) is str:  # a mapping over another dict
            table, place = value._data, value.encodekey(key)  # type: ignore[attr-defined]
            return self._looked(_TABLE, table, place, dict.get(table, place, MISSING))
        return value

    def _in_module(self, module: types.ModuleType, name: str) -> Any:
        value = self._looked(_TABLE, vars(module), name, vars(module).get(name, MISSING))
        if value is MISSING and any(name in vars(base) for base in type(module).__mro__):
            return self._looked(_FIELD, module, name, _field(module, name))  # such as torch.backends.cudnn
        return value

    def _on_class(self, kind: type, name: str) -> Any:
        for base in kind.__mro__:
            if base is nn.Module and name in CALL:
                break  # system/torch_modes.py asks for those in each step
            table = table_of(base)
            value = self._looked(_TABLE, table, name, table.get(name, MISSING))
            if value is not MISSING:
                return value
        if is_library(type(kind)):
            return MISSING
        return self._on_class(type(kind), name)

    def _on_object(self, value: Any, name: str) -> tuple[Any, dict[str, Any] | None]:
        """An attribute of an object; and its plain attributes, where it is its class's code that would look at them."""
        fields = fields_of(value)
        if fields is not None:
            own = self._looked(_TABLE, fields, name, fields.get(name, MISSING))
            if own is not MISSING:
                return own, None
        found = self._on_class(type(value), name)
        if isinstance(found, types.MemberDescriptorType):
            return self._looked(_FIELD, value, name, _field(value, name)), None
        if is_library(type(value)):
            # a pattern's `match`: it is the object that counts
            return (value if inspect.isroutine(found) and not isinstance(value, nn.Module) else found), None
        if found is MISSING:
            return found, None
        self._note_function(found)
        return found, self._note_object(value)

    def _note(self, value: Any, depth: int) -> None:
        """A value is passed on, called or walked over: whatever reads it reads what it holds."""
        if isinstance(value, threading.local):
            raise Refused("its code reads a threading.local, and another thread captures it")
        self._note_function(value)
        if isinstance(value, _CONTAINERS):
            self._note_content(value, depth)
        elif isinstance(value, type):
            self._note_class(value)
        skipped = (types.ModuleType, types.FunctionType, types.MethodType, type, nn.Module, torch.Tensor)
        if not isinstance(value, skipped) and fields_of(value) is not None and not is_library(type(value)):
            self._note_object(value)

    def _note_class(self, kind: type) -> None:
        """A class that no name leads to: what is in it counts as it is."""
        if not is_library(kind) and not is_reachable(kind):
            for name, value in list(table_of(kind).items()):
                self._looked(_TABLE, table_of(kind), name, value)
                self._note_function(value)

    def _note_object(self, value: Any) -> dict[str, Any]:
        """The plain values that an object's methods may read from it."""
        fields = fields_of(value)
        if fields is not None:
            self._note_content(fields, _IN_OBJECT)
        for base in type(value).__mro__:
            if not is_library(base):
                for name, held in list(table_of(base).items()):
                    if type(held) in PLAIN:
                        self._looked(_TABLE, table_of(base), name, held)
        return {**plain_of_class(type(value)), **plain_of(fields or {})}

    def _note_content(self, value: Any, depth: int) -> None:
        content = _content(value)
        if len(content) > _MOST_ITEMS:
            raise Refused(f"its code reads a container of {len(content)} values, too many to compare in each step")
        self.places.append((_CONTENT, value, None))
        self.values.append(content)
        if depth > 1:
            for item in content:
                if type(item) not in PLAIN:
                    self._note(item, depth - 1)

    def _note_function(self, value: Any) -> None:
        function = function_in(value)
        if function is None:
            return
        self.met(function)
        self._looked(_CODE, function, None, function.__code__)
        for name in ("__defaults__", "__kwdefaults__"):
            if (value := getattr(function, name)) is not None:
                self._looked(_FIELD, function, name, value)
        for cell in function.__closure__ or ():
            self._looked(_CELL, cell, None, cell_contents(cell))


def function_in(value: Any) -> types.FunctionType | None:
    """The Python function that a method, a static method, a property or the like runs; None where there is none."""
    for _ in range(8):
        if isinstance(value, types.FunctionType):
            return value
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        else:
            return None
    return None


def is_container(value: Any) -> bool:
    """Whether a value is one of Python's containers."""
    return isinstance(value, _CONTAINERS)


def _import_library(row: Row) -> bool:
    """Import what code imports when it runs, where torch or Python has it. Whether there is such a module now."""
    kind, name = row[1][0]
    package = str(name).partition(".")[0]
    if kind != IMPORT or name in sys.modules or not (package == "torch" or package in sys.stdlib_module_names):
        return False
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _content(value: Any) -> tuple[Any, ...]:
    """What a container holds, in order."""
    try:
        if isinstance(value, dict):
            return (*dict.keys(value), *dict.values(value))
        return tuple(value)
    except RuntimeError:  # another thread changes it now
        return (object(),)


def classes_in(module: nn.Module) -> tuple[type, ...]:
    """The classes of a module tree, each once."""
    return tuple(dict.fromkeys(type(sub) for sub in module.modules()))


class Watched:
    """The places that an engine's artefacts depend on, each once.

    changes: how often something else was found in one of them. epoch: a number that is another one after that, and when
    other places came to be watched.
    """

    def __init__(self) -> None:
        self.epoch = self.changes = 0
        self._dependences: weakref.WeakSet[Dependence] = weakref.WeakSet()
        self._stale = False  # the places are no longer those of the dependences
        self._lock = threading.RLock()  # several threads may step at once
        self._holders: list[list[Any]] = [[] for _ in _GROUPS]
        self._names: list[list[Any]] = [[] for _ in _GROUPS]
        self._now: list[list[Any]] = [[] for _ in _GROUPS]

    def __len__(self) -> int:
        return sum(map(len, self._holders))

    def add(self, dependence: Dependence) -> None:
        """Watch the places of a dependence, which may have others than before."""
        with self._lock:
            self._dependences.add(dependence)
            self._stale = True

    def look(self) -> None:
        """Compare all places with what was in them the last time."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        if self._stale:
            self._rebuild()
            return
        for group, read in enumerate(_GROUPS):
            now = self._now[group]
            if not now:
                continue
            found = read(self._holders[group], self._names[group])
            same = map(is_, found, now) if group in _SINGLE else map(_same_items, found, now)
            if not all(same):
                self._now[group] = found
                self.epoch += 1
                self.changes += 1

    def _rebuild(self) -> None:
        self._stale = False
        before = {
            (group, id(holder), name): value
            for group, found in enumerate(zip(self._holders, self._names, self._now, strict=True))
            for holder, name, value in zip(*found, strict=True)
        }
        numbers: dict[tuple[int, int, Any], int] = {}
        self._holders, self._names = [[] for _ in _GROUPS], [[] for _ in _GROUPS]
        for dependence in list(self._dependences):
            found = []
            for group, holder, name in dependence.places:
                key = (group, id(holder), name)
                number = numbers.get(key)
                if number is None:
                    number = numbers[key] = len(self._holders[group])
                    self._holders[group].append(holder)
                    self._names[group].append(name)
                found.append((group, number))
            dependence.numbers = found
        self._now = [read(*at) for read, *at in zip(_GROUPS, self._holders, self._names, strict=True)]
        self.epoch += 1
        self.changes += any(
            key in before and not self._is_same(key[0], before[key], self._now[key[0]][number])
            for key, number in numbers.items()
        )

    @staticmethod
    def _is_same(group: int, one: Any, other: Any) -> bool:
        return one is other or (group not in _SINGLE and _same_items(one, other))

    def holds(self, dependence: Dependence) -> bool:
        """Whether the places of a dependence hold what they held when it was resolved."""
        with self._lock:
            if self._stale:
                self._rebuild()
            now = self._now
            return all(
                self._is_same(group, now[group][number], value)
                for (group, number), value in zip(dependence.numbers, dependence.values, strict=True)
            )


def _in_tables(tables: list[Any], names: list[Any]) -> list[Any]:
    return list(map(dict.get, tables, names, repeat(MISSING)))


def _in_cells(cells: list[Any], _names: list[Any]) -> list[Any]:
    return list(map(cell_contents, cells))


def _in_fields(objects: list[Any], names: list[Any]) -> list[Any]:
    return list(map(_field, objects, names))


def _field(value: Any, name: str) -> Any:
    """An attribute that a class computes, or what a context variable has. One that raises is another each time."""
    try:
        return value.get(MISSING) if isinstance(value, ContextVar) else getattr(value, name, MISSING)
    except Exception:
        return object()


def _in_functions(functions: list[Any], _names: list[Any]) -> list[Any]:
    return list(map(_CODE_OF, functions))


def _in_containers(containers: list[Any], _names: list[Any]) -> list[Any]:
    return list(map(_content, containers))


# by the number of their group
_GROUPS = (_in_tables, _in_cells, _in_fields, _in_functions, _in_containers)
_SINGLE = (_TABLE, _CELL, _FIELD, _CODE)  # whose values are compared by identity, and not item by item


def _same_items(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


class Dependence:
    """What one artefact depends on by name, for blocks of the same classes in one engine.

    places, values: where its names led through when it was resolved last, and what was there. differs: the first name
    that led to another thing than at capture.
    """

    def __init__(self, rows: Sequence[Row], classes: tuple[type, ...], watched: Watched) -> None:
        self._rows, self._classes, self._watched = rows, classes, watched
        self.places: list[Place] = []
        self.values: list[Any] = []
        self.numbers: list[tuple[int, int]] = []  # of its places among those that are watched
        self.differs: str | None = None
        self._resolve()
        self._epoch = -1

    def holds(self) -> bool:
        """Whether all names lead to what they led to at capture, as far as the engine looked."""
        if self._epoch != self._watched.epoch:
            if self.differs is not None or not self._watched.holds(self):
                self._resolve()
            self._epoch = self._watched.epoch
        return self.differs is None

    def _resolve(self) -> None:
        resolver = Resolver(self._classes)
        self.differs = next((text_of(row) for row in self._rows if not _fits(row, resolver)), None)
        before, self.places, self.values = self.places, resolver.places, resolver.values
        if self.differs is not None:  # it is resolved again on any change, and keeps nothing alive until then
            self.places, self.values = [place for place in self.places if place[0] == _TABLE], []
        if len(before) != len(self.places) or not all(map(_same_place, before, self.places)):
            self._watched.add(self)


class Epoch:
    """Holds as long as nothing that is watched changes."""

    def __init__(self, watched: Watched) -> None:
        self._watched, self._changes = watched, watched.changes

    def holds(self) -> bool:
        """Whether nothing changed since."""
        return self._watched.changes == self._changes


def _same_place(one: Place, other: Place) -> bool:
    return one[0] == other[0] and one[1] is other[1] and one[2] == other[2]


def _fits(row: Row, resolver: Resolver) -> bool:
    try:
        if digest(resolver.ends(address_of(row)))[0] == row[2]:
            return True
        return _import_library(row) and digest(resolver.ends(address_of(row)))[0] == row[2]
    except Exception:
        # code of others ran, such as a `__repr__` or a `__getattr__`: what cannot be compared is another thing
        return False


def address_of(row: Row) -> Address:
    """The address of a row."""
    return row[0], tuple((kind, name) for kind, name in row[1])


def text_of(row: Row) -> str:
    """A row's address as people would write it: torch.nn.functional.gelu."""
    module, chain = address_of(row)
    text = module if chain[0][0] != IMPORT else ""
    for kind, name in chain:
        text += f"[{name!r}]" if kind == KEY else f".{name}" if text else str(name)
    return text
