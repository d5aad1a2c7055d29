# SPDX-License-Identifier: Apache-2.0
"""Resolver: from an address, by which code reaches a value, to the value and the places on the way.

An address is a module's name and a chain (bytecode_names.py). It begins in the globals that the code itself uses, so
that a module that was loaded anew, with a dict of its own, is not taken for the one that the code knows.
"""

from __future__ import annotations

import array
import builtins
import collections
import gc
import inspect
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..modules.tree import PLAIN, fields_of
from ..system.torch_modes import CALL
from .bytecode_names import CELL, IMPORT, KEY, Chain
from .option_recorder import MISSING, Refused
from .value_digests import (
    cell_contents,
    class_named,
    is_library,
    is_reachable,
    plain_of,
    plain_of_class,
    slots_of,
    table_of,
)

CLASS = "class"
Address = tuple[str, Chain]  # the name of a module ("" for an import), and how to get on from there
Row = list[Any]  # JSON: [module, [[kind, name], ...], digest]
# groups of places: how each is read
TABLE, CELL_CONTENT, FIELD, CODE, CONTENT = range(5)
Place = tuple[int, Any, Any]  # group, holder, name

_WRAPPING = (collections.UserDict, collections.UserList, collections.ChainMap)
_VERSION = "_version"  # how often a tensor was written to
_MOST_VERSIONS = 4096
_versions: dict[int, int] = {}
_REFERENT = "()"  # what a weak reference leads to
_NUMBERS = "tobytes"  # the numbers of an array, which tells of no change
_MOST_BYTES = 1 << 16  # of an array whose numbers are compared in each step
_held: dict[bytes, bytes] = {}
_MOST_ITEMS = 1 << 16  # of a container whose content is compared, at about 12 ns each
_DEPTH = 4  # of containers in containers
_IN_OBJECT = 2  # of containers in an object
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.OrderedDict, collections.defaultdict, collections.deque)


class Resolver:
    """Finds the values of addresses, as the code of some classes would, and notes where it looked.

    places: what was looked at; values: what was there. thread_locals: the objects of which each thread has its own.
    """

    def __init__(self, classes: Iterable[type], *, deep: bool = True) -> None:
        """deep: what containers hold counts far down, as for a block's code; else less, as for that of a whole step."""
        self._deep, self._depth = deep, _DEPTH if deep else _IN_OBJECT
        self.places: list[Place] = []
        self.values: list[Any] = []
        self.thread_locals: list[threading.local] = []
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
            starts = [self._looked(TABLE, sys.modules, name, sys.modules.get(name, MISSING))]
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
        return class_named(module, name) if known is None else known

    def leads_to(self, kind: type) -> bool:
        """Whether the names of a class and of its module lead to it."""
        return self._class(kind.__module__, kind.__qualname__) is kind

    def _global(self, table: dict[str, Any], name: str) -> Any:
        value = self._looked(TABLE, table, name, table.get(name, MISSING))
        if value is MISSING:
            value = self._looked(TABLE, vars(builtins), name, vars(builtins).get(name, MISSING))
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
            value = behind(value)
            if kind == CELL:
                value = self._cell(value, name)
            elif kind == KEY:
                value = self._item(value, name)
            elif isinstance(value, types.ModuleType):
                value = self._in_module(value, name)
            elif isinstance(value, type):
                value = self._on_class(value, name)
            elif isinstance(value, threading.local):
                self.thread_locals.append(value)
                value = self._looked(FIELD, value, name, field_of(value, name))
            elif isinstance(value, (*_CONTAINERS, str, int, float, torch.Tensor)):
                # a method of the value: it is the value that counts, and what others set on a tensor
                if isinstance(value, torch.Tensor) and self._deep and not hasattr(torch.Tensor, name):
                    more.append(self._looked(FIELD, value, name, field_of(value, name)))
                break
            else:
                owner = value
                value, own = self._on_object(value, name)
                if own is not None:
                    more.append(own)
                if value is MISSING or value is owner or own is not None:
                    break
        if isinstance(value, ContextVar) and self._deep:  # hosts tell in some which prompt they are at
            value = self._looked(FIELD, value, "get", field_of(value, "get"))
        value = behind(value)
        self._note(value, self._depth)
        if type(value) is weakref.ReferenceType:  # it is not kept alive: its place has its number, and its parts count
            more.append(self._looked(FIELD, value, _REFERENT, field_of(value, _REFERENT)))
            if fields_of(referent := value()) is not None:
                self._note_content(fields_of(referent), _IN_OBJECT)
        if isinstance(value, types.MethodType) and not isinstance(value.__self__, (type, nn.Module)):
            more.append(self._note_object(value.__self__))
        return [value, *more]

    def _cell(self, function: Any, name: str) -> Any:
        function = function_in(function)
        if function is None or name not in function.__code__.co_freevars or not function.__closure__:
            return MISSING
        cell = function.__closure__[function.__code__.co_freevars.index(name)]
        return self._looked(CELL_CONTENT, cell, None, cell_contents(cell))

    def _item(self, value: Any, key: Any) -> Any:
        if isinstance(value, dict):
            return self._looked(TABLE, value, key, dict.get(value, key, MISSING))
        if isinstance(value, collections.ChainMap):
            each = [self._item(behind(one), key) for one in value.maps]
            return next((one for one in each if one is not MISSING), MISSING)
        if isinstance(value, (list, tuple)) and type(key) is int and -len(value) <= key < len(value):
            self._note_content(value, 1)
            return value[key]
        if isinstance(value, type(os.environ)) and type(key) is str:  # a mapping over another dict
            table, place = value._data, value.encodekey(key)  # type: ignore[attr-defined]
            return self._looked(TABLE, table, place, dict.get(table, place, MISSING))
        return value

    def _in_module(self, module: types.ModuleType, name: str) -> Any:
        value = self._looked(TABLE, vars(module), name, vars(module).get(name, MISSING))
        if value is MISSING and any(name in vars(base) for base in type(module).__mro__):
            return self._looked(FIELD, module, name, field_of(module, name))  # such as torch.backends.cudnn
        return value

    def _on_class(self, kind: type, name: str) -> Any:
        for base in kind.__mro__:
            if base is nn.Module and name in CALL:
                break  # system/torch_modes.py asks for those in each step
            table = table_of(base)
            value = self._looked(TABLE, table, name, table.get(name, MISSING))
            if value is not MISSING:
                return value
        if is_library(type(kind)):
            return MISSING
        return self._on_class(type(kind), name)

    def _on_object(self, value: Any, name: str) -> tuple[Any, dict[str, Any] | None]:
        """An attribute of an object; and its plain attributes, where it is its class's code that would look at them."""
        fields = fields_of(value)
        if fields is not None:
            own = self._looked(TABLE, fields, name, fields.get(name, MISSING))
            if own is not MISSING:
                return own, None
        found = self._on_class(type(value), name)
        if isinstance(found, types.MemberDescriptorType):
            return self._looked(FIELD, value, name, field_of(value, name)), None
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
            if self._deep:
                self.thread_locals.append(value)
                self._note_content(value, 1)
            return
        self._note_function(value)
        if isinstance(value, torch.Tensor) and self._deep and not isinstance(value, nn.Parameter):
            self._looked(FIELD, value, _VERSION, field_of(value, _VERSION))  # a graph keeps its numbers
            self._looked(FIELD, value, "requires_grad", value.requires_grad)
        if is_array(value) and (self._deep or _bytes_in(value) <= _MOST_BYTES):
            if _bytes_in(value) > _MOST_BYTES:
                raise Refused(f"its code reads an array of {_bytes_in(value)} bytes, too many to compare in each step")
            self._looked(FIELD, value, _NUMBERS, field_of(value, _NUMBERS))
        if isinstance(value, _CONTAINERS):
            self._note_content(value, depth)
        elif isinstance(value, type):
            self._note_class(value)
        if isinstance(value, _WRAPPING):  # libraries' classes that hold a plain container
            self._note_content(fields_of(value), 3)
        skipped = (types.ModuleType, types.FunctionType, types.MethodType, type, nn.Module, torch.Tensor)
        holds = fields_of(value) is not None or slots_of(type(value))
        if depth > 0 and holds and not isinstance(value, (*skipped, *PLAIN)) and not is_library(type(value)):
            self._note_object(value, min(depth, _IN_OBJECT))

    def _note_class(self, kind: type) -> None:
        """A class that no name leads to: what is in it counts as it is."""
        if not is_library(kind) and not is_reachable(kind):
            for name, value in list(table_of(kind).items()):
                self._looked(TABLE, table_of(kind), name, value)
                self._note_function(value)

    def _note_object(self, value: Any, depth: int = _IN_OBJECT) -> dict[str, Any]:
        """The plain values that an object's methods may read from it."""
        fields = fields_of(value)
        if fields is not None:
            self._note_content(fields, depth)
        for name in slots_of(type(value)):
            self._note(self._looked(FIELD, value, name, field_of(value, name)), depth - 1)
        for base in type(value).__mro__:
            if not is_library(base):
                for name, held in list(table_of(base).items()):
                    if type(held) in PLAIN:
                        self._looked(TABLE, table_of(base), name, held)
        own = {name: held for name, held in (fields or {}).items() if self._deep and isinstance(held, threading.local)}
        return {**plain_of_class(type(value)), **plain_of(fields or {}), **own}

    def _note_content(self, value: Any, depth: int) -> None:
        content = content_of(value)
        if len(content) > _MOST_ITEMS:
            raise Refused(f"its code reads a container of {len(content)} values, too many to compare in each step")
        self.places.append((CONTENT, value, None))
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
        self._looked(CODE, function, None, function.__code__)
        for name in ("__defaults__", "__kwdefaults__"):
            if (value := getattr(function, name)) is not None:
                self._looked(FIELD, function, name, value)
                for item in value.values() if isinstance(value, dict) else value:
                    if isinstance(item, (*_CONTAINERS, torch.Tensor)) or is_array(item):
                        self._note(item, 1)
        for cell in function.__closure__ or ():
            self._looked(CELL_CONTENT, cell, None, cell_contents(cell))


def function_in(value: Any) -> types.FunctionType | None:
    """The Python function that a method, a static method, a property or the like runs; None where there is none."""
    for _ in range(8):
        kind = type(value)  # `isinstance` would ask the value for its class, which may raise
        if issubclass(kind, types.FunctionType):
            return value  # type: ignore[no-any-return]
        if issubclass(kind, (types.MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif issubclass(kind, property):
            value = value.fget
        else:
            return None
    return None


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy's or Python's, whose numbers others may change in their place."""
    if isinstance(value, (array.array, bytearray)):
        return True
    return type(value).__module__ == "numpy" and hasattr(value, "nbytes") and hasattr(value, "flags")


def _bytes_in(value: Any) -> int:
    return int(value.nbytes) if hasattr(value, "nbytes") else len(value) * getattr(value, "itemsize", 1)


def behind(value: Any) -> Any:
    """The dict that a read-only view of one shows; any other value itself."""
    if isinstance(value, types.MappingProxyType):
        (shown,) = gc.get_referents(value)
        return shown
    return value


def is_container(value: Any) -> bool:
    """Whether a value is one of Python's containers."""
    return isinstance(value, _CONTAINERS)


def content_of(value: Any) -> tuple[Any, ...]:
    """What a container holds, in order; of a `threading.local`, what this thread has."""
    try:
        if isinstance(value, threading.local):
            value = vars(value)
        if isinstance(value, dict):
            own = (
                collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            )  # has an order of its own
            return (*own.keys(value), *own.values(value))
        return tuple(value)
    except RuntimeError:  # another thread changes it now
        return (object(),)


def _in_context(variable: ContextVar[Any]) -> Any:
    """What a context variable has, its own default included."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


def field_of(value: Any, name: str) -> Any:
    """An attribute that a class computes, or what a context variable has. One that raises is another each time."""
    try:
        if name == _NUMBERS and is_array(value):  # one object for equal numbers: places are compared by it
            if len(_held) > _MOST_VERSIONS:
                _held.clear()
            numbers = value.tobytes() if hasattr(value, "tobytes") else bytes(value)
            return _held.setdefault(numbers, numbers)
        if name == _VERSION and isinstance(
            value, torch.Tensor
        ):  # one object for equal numbers: places are compared by it
            if len(_versions) > _MOST_VERSIONS:
                _versions.clear()
            return None if value.is_inference() else _versions.setdefault(value._version, value._version)
        if type(value) is weakref.ReferenceType:
            referent = value()
            return None if referent is None else _versions.setdefault(id(referent), id(referent))
        return _in_context(value) if isinstance(value, ContextVar) else getattr(value, name, MISSING)
    except Exception:
        return object()


def classes_in(module: nn.Module) -> tuple[type, ...]:
    """The classes of a module tree, each once."""
    return tuple(dict.fromkeys(type(sub) for sub in module.modules()))


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
