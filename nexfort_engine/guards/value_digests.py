# SPDX-License-Identifier: Apache-2.0
"""Digests of values: equal in two processes exactly when code cannot tell the values apart.

A function is its bytecode, defaults and closure cells, without file names, line numbers and addresses. A native
function is its module, name and distribution version. An object is its class and attributes. A value of which none of
this can be written down has a digest of its own that holds in this process only.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import gc
import hashlib
import inspect
import itertools
import json
import re
import secrets
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..cache.key import package_version
from ..modules.tree import PLAIN, fields_of
from .option_recorder import MISSING

_DEPTH, _SHALLOW = 6, 4  # of values in values: in what a block's code reaches, and in what a whole step's does
_MOST_NUMBERS = 1 << 16  # of a tensor whose numbers are hashed
_PROCESS = secrets.token_hex(8)
_STDLIB = sysconfig.get_path("stdlib")
_SEQUENCES = (list, tuple, torch.Size, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType)
_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)  # classes of Python's own whose objects are the host's data
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_PLAIN_OR_CODE = (*PLAIN, types.FunctionType, types.BuiltinFunctionType, type, list, tuple, dict, set, frozenset)
_OF_CLASSES = frozenset("__dict__ __weakref__ __doc__ __module__ __qualname__ __firstlineno__".split())
_NATIVE_PACKAGES = ("torch", "builtins")  # their versions are in the key

_numbers = itertools.count()
_functions: weakref.WeakKeyDictionary[Callable[..., Any], tuple[Any, str, bool]] = weakref.WeakKeyDictionary()
_here: dict[
    int, tuple[Any, int]
] = {}  # id -> (what keeps it or tells of its end, number) of what cannot be written down


def digest(value: Any, *, deep: bool = True) -> tuple[str, bool]:
    """The digest of a value (16 hex digits), and whether it means the same in another process."""
    writer = _Writer()
    text = json.dumps(writer.of(value, _DEPTH if deep else _SHALLOW), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16], writer.lasts


@functools.lru_cache(maxsize=8192)
def code_digest(code: types.CodeType) -> str:
    """The digest of a code object; the minor version of Python is in the key."""
    parts = [code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags]
    parts += [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount]
    parts += [getattr(code, "co_exceptiontable", b""), list(map(_constant, code.co_consts))]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return ["set", *sorted(map(repr, map(_constant, value)))]
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    return [type(value).__name__, repr(value)]


class _Writer:
    """Writes one value. `is_step_invariant`: whether all of it can be compared in another process."""

    def __init__(self) -> None:
        self.lasts = True
        self._inside: list[int] = []  # what is being written: values may hold themselves

    def of(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return ["float", value.hex()] if kind is float else value
        if value is MISSING:
            return ["absent"]
        if kind in (bytes, complex):
            return [kind.__name__, repr(value)]
        if isinstance(value, _TORCHS):
            return ["torch", str(value)]
        if id(value) in self._inside:
            return ["again", len(self._inside) - self._inside.index(id(value))]
        self._inside.append(id(value))
        try:
            return self._compound(value, kind, depth)
        finally:
            self._inside.pop()

    def _compound(self, value: Any, kind: type, depth: int) -> Any:
        if kind is types.FunctionType:
            return self._function(value)
        if isinstance(value, type):
            return self._type(value)
        if isinstance(value, types.ModuleType):
            return ["package", value.__name__]
        if depth <= 0:
            return self._only_here(value)
        each = functools.partial(self.of, depth=depth - 1)
        if kind in _SEQUENCES or _is_named_tuple(value):
            return [kind.__name__, *map(each, tuple(value))]
        if kind in (set, frozenset):
            return ["set", *sorted(map(each, tuple(value)), key=repr)]
        if kind in _MAPPINGS:
            return ["dict", *[[each(k), each(v)] for k, v in list(value.items())]]
        if isinstance(value, threading.local):  # what this thread has of it
            return ["thread", *_name(kind), [[name, each(held)] for name, held in sorted(vars(value).items())]]
        if kind is range or kind is slice:
            return [kind.__name__, repr(value)]
        if isinstance(value, types.MethodType):
            return ["method", each(value.__func__), each(value.__self__)]
        if isinstance(value, weakref.ReferenceType):
            return ["weak", each(value())]
        if isinstance(value, functools.partial):
            return ["partial", *map(each, (value.func, value.args, value.keywords))]
        if isinstance(value, (staticmethod, classmethod)):
            return [kind.__name__, each(value.__func__)]
        if isinstance(value, property):
            return ["property", *map(each, (value.fget, value.fset, value.fdel))]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value, each)
        try:
            return self._other(value, kind, each)
        except Exception:  # its own code raises when it is asked
            return self._only_here(value)

    def _function(self, function: types.FunctionType) -> Any:
        """By what it does; `functools.wraps` copies names, so those of its code and its globals count."""
        cells = tuple(map(cell_contents, function.__closure__ or ()))
        state = (function.__code__, function.__defaults__, function.__kwdefaults__, *cells)
        known = _functions.get(function)
        if known is not None and len(known[0]) == len(state) and all(map(lambda a, b: a is b, known[0], state)):
            self.lasts &= known[2]
            return known[1]
        code = function.__code__
        inner = _Writer()
        inner._inside = self._inside
        parts = [inner.of(part, _DEPTH - 1) for part in (function.__defaults__, function.__kwdefaults__, list(cells))]
        name = getattr(code, "co_qualname", code.co_name)
        found = ["function", function.__globals__.get("__name__"), name, code_digest(code), *parts]
        text = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
        self.lasts &= inner.lasts
        # inside another value its text may point back to that
        if len(self._inside) == 1 and not _holds_mutable(state[1:]):
            _functions[function] = (state, text, inner.lasts)
        return text

    def _type(self, value: type) -> Any:
        """By its name; one that no name leads to also by what it holds."""
        found: list[Any] = ["type", value.__module__, value.__qualname__]
        if is_library(value) or is_reachable(value):
            return found
        held = {name: value for name, value in vars(value).items() if name not in _OF_CLASSES}
        return [*found, [[name, self.of(held[name], 1)] for name in sorted(held)]]

    def _tensor(self, value: torch.Tensor) -> Any:
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        if not plain or value.numel() > _MOST_NUMBERS or value.device.type == "meta":
            return self._only_here(value)
        bits = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        found = hashlib.sha256(bytes(bits.tolist())).hexdigest()[:16]
        lies = list(value.stride()), isinstance(value, nn.Parameter), value.requires_grad
        return ["tensor", str(value.dtype), list(value.shape), str(value.device), found, *lies]

    def _module(self, value: nn.Module, each: Callable[[Any], Any]) -> Any:
        rows = []
        for path, sub in value.named_modules():
            held = [*sub._parameters.items(), *sub._buffers.items()]
            tensors = [[n, list(t.shape), str(t.dtype)] for n, t in held if t is not None]
            fields = [[n, each(v)] for n, v in sorted(sub.__dict__.items()) if type(v) in PLAIN]
            rows.append([path, *_name(type(sub)), tensors, fields])
        return ["module", rows]

    def _other(self, value: Any, kind: type, each: Callable[[Any], Any]) -> Any:
        wrapped = getattr(value, "__wrapped__", None) if callable(value) else None
        if wrapped is not None:  # functools.lru_cache and its like
            return ["wrapped", *_name(kind), each(wrapped)]
        if inspect.isroutine(value) or _is_native_function(value):
            return ["native", *native_name(value)]
        if isinstance(value, enum.Enum):
            return ["enum", *_name(kind), value.name]
        if isinstance(value, (int, float, str)):
            return ["scalar", *_name(kind), str(value)]
        fields = fields_of(value)
        if kind.__module__ == "numpy" and hasattr(value, "tobytes"):  # an array
            bits = hashlib.sha256(value.tobytes()).hexdigest()[:16]
            return ["array", *_name(kind), str(value.dtype), str(getattr(value, "shape", "")), bits]
        if is_library(kind) and kind not in _NAMESPACES:
            text = f"{value.flags} {value.pattern}" if kind is re.Pattern else repr(value)
            return ["library", *_name(kind), "" if text.startswith("<") or " object at 0x" in text else text]
        if fields is None and not _written_in_python(kind):
            text = repr(value)
            return ["opaque", *_name(kind), text] if "0x" not in text else self._only_here(value)
        slots = {name: getattr(value, name, MISSING) for name in slots_of(kind)}
        held = {**plain_of_class(kind), **slots, **(fields or {})}
        found = ["object", *_name(kind), [[name, each(held[name])] for name in sorted(held)]]
        if isinstance(value, dict):
            found.append([[each(key), each(item)] for key, item in list(dict.items(value))])
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            items = map(each, tuple(value))
            found.append(list(items) if not isinstance(value, (set, frozenset)) else sorted(items, key=repr))
        return found

    def _only_here(self, value: Any) -> Any:
        """What cannot be written down: it is itself, in this process."""
        self.lasts = False
        known = _here.get(id(value))
        if known is None or (isinstance(known[0], weakref.ref) and known[0]() is not value):
            try:
                held: Any = weakref.ref(value)
            except TypeError:
                held = value
            known = _here[id(value)] = held, next(_numbers)
        return ["here", _PROCESS, known[1]]


def cell_contents(cell: Any) -> Any:
    """What a closure cell holds, MISSING where nothing was put in yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def table_of(kind: type) -> dict[str, Any]:
    """The attribute table of a class: one object, where `vars` gives a view of it each time, slower by four times."""
    (table,) = gc.get_referents(vars(kind))
    return table  # type: ignore[no-any-return]


def plain_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some attributes that are plain values, functions or containers."""
    return {name: value for name, value in list(fields.items()) if isinstance(value, _PLAIN_OR_CODE)}


def slots_of(kind: type) -> tuple[str, ...]:
    """The names of the slots of a class that is no library's, its bases' included."""
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__ if not is_library(base)]
    names = [name for one in found for name in ((one,) if isinstance(one, str) else one)]
    return tuple(name for name in names if isinstance(name, str) and not name.startswith("__"))


def plain_of_class(kind: type) -> dict[str, Any]:
    """The plain values that a class and its bases hold, libraries' left out."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not is_library(base):
            found |= {
                name: value for name, value in list(vars(base).items()) if type(value) in PLAIN and name[:2] != "__"
            }
    return found


def _written_in_python(kind: type) -> bool:
    return bool(kind.__flags__ & _HEAP_TYPE) and any("__slots__" in vars(base) for base in kind.__mro__)


def _is_native_function(value: Any) -> bool:
    """Whether a function of a class that a library for native code has for them: its module has it by its name."""
    if (
        not callable(value)
        or isinstance(value, type)
        or fields_of(value) is not None
        or _written_in_python(type(value))
    ):
        return False
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    return isinstance(name, str) and getattr(sys.modules.get(str(module)), name, None) is value


def native_name(value: Any) -> list[str]:
    """Module, name and distribution version of a function that is not written in Python."""
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    module = getattr(value, "__module__", None) or getattr(owner, "__module__", None) or getattr(owner, "__name__", "")
    package = str(module).partition(".")[0]
    known = package in _NATIVE_PACKAGES or package in sys.stdlib_module_names
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__qualname__)
    return [str(module), str(name), "" if known or not package else package_version(package)]


def is_library(kind: type) -> bool:
    """Whether a class is torch's, Triton's or Python's own: what its objects hold is their own business."""
    package = kind.__module__.partition(".")[0]
    return package in ("torch", "triton", "numpy", "sympy") or package in sys.stdlib_module_names


def is_reachable(kind: type) -> bool:
    """Whether the names of a class and of its module lead to it."""
    return class_named(kind.__module__, kind.__qualname__) is kind


def class_named(module: str, name: str) -> Any:
    """What the name of a class leads to in its module, or MISSING."""
    value: Any = sys.modules.get(module, MISSING)
    for part in name.split("."):
        value = getattr(value, part, MISSING)
    return value


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _holds_mutable(values: tuple[Any, ...]) -> bool:
    """Whether something in a function's defaults or cells could change in its place."""
    flat: list[Any] = []
    for value in values:
        flat += value if type(value) is tuple else [value]
    # what is remembered is kept alive by it, so nothing that could hold a model either
    return any(type(value) not in (*PLAIN, types.CodeType) and value is not MISSING for value in flat)
