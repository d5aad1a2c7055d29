# SPDX-License-Identifier: Apache-2.0
"""Functions as arguments of a block: what they do is their code, and what they hold is data like other arguments.

A block may be called with a function that was defined in the step, such as an attention with its masks in closure
cells. It is another object in each step and the same code. `FunctionCode` stands for the code: equal where module,
name and the digest of the code are equal, in this process and in others. A function that its module's names lead to
is itself, since code may ask whether it was given that one.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Sequence
from typing import Any

from ..modules.memory_format import Unsupported
from .option_recorder import MISSING
from .value_digests import cell_contents, class_named, code_digest, native_name

_known: dict[tuple[int, int], FunctionCode] = {}  # by the ids of a code object and its globals, which it keeps alive
_MOST_KNOWN = 4096


class FunctionCode:
    """A function without its defaults and closure cells."""

    __slots__ = ("_hash", "code", "globals", "text")

    def __init__(self, code: types.CodeType, in_module: dict[str, Any]) -> None:
        self.code, self.globals = code, in_module
        name = getattr(code, "co_qualname", code.co_name)
        self.text = f"{in_module.get('__name__')}.{name}:{code_digest(code)}"
        self._hash = hash(self.text)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is FunctionCode and self.text == other.text)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def of(cls, function: types.FunctionType) -> FunctionCode:
        """That of a function. Raises Unsupported where it assigns variables that it shares with its maker, and where
        its globals are no loaded module's: no name leads to them.
        """
        module = sys.modules.get(function.__globals__.get("__name__", ""))
        if getattr(module, "__dict__", None) is not function.__globals__:
            raise Unsupported("a function whose globals are those of no loaded module")
        key = (id(function.__code__), id(function.__globals__))
        found = _known.get(key)
        if found is None:
            name = _assigned_outside(function.__code__)
            if name is not None:
                raise Unsupported(f"a function that assigns {name}, a variable of the code that made it")
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            found = _known[key] = cls(function.__code__, function.__globals__)
        return found

    def made(self, defaults: Any, keywords: Any, fields: dict[str, Any], cells: Sequence[Any]) -> types.FunctionType:
        """A function of this code that holds these values."""
        closure = tuple(map(types.CellType, cells))
        new = types.FunctionType(self.code, self.globals, self.code.co_name, defaults, closure)
        new.__kwdefaults__ = keywords
        new.__dict__.update(fields)
        return new


class NamedFunction:
    """A function that its module's names lead to."""

    __slots__ = ("function", "text")

    def __init__(self, function: types.FunctionType) -> None:
        self.function, self.text = function, f"{function.__module__}.{function.__qualname__}"

    def __eq__(self, other: object) -> bool:
        return type(other) is NamedFunction and self.function is other.function

    def __hash__(self) -> int:
        return id(self.function)

    def __repr__(self) -> str:
        return self.text


def held_by(function: types.FunctionType) -> tuple[Any, Any, dict[str, Any], list[Any]]:
    """Defaults, keyword defaults, attributes and what its cells hold. Raises Unsupported for a cell that is empty."""
    cells = list(map(cell_contents, function.__closure__ or ()))
    if any(held is MISSING for held in cells):
        raise Unsupported("a function with a variable that has no value yet")
    return function.__defaults__, function.__kwdefaults__, vars(function), cells


def is_named(function: types.FunctionType | type) -> bool:
    """Whether the names of a function or class and of its module lead to it."""
    name = function.__qualname__
    if function.__module__ is None or "<" in name:
        return False
    try:
        return class_named(function.__module__, name) is function
    except Exception:  # the code of a module or a class that computes its attributes
        return False


def names_of(function: types.FunctionType) -> tuple[str, ...]:
    """The names that a function has as attributes, `functools.wraps` gives it those of another one."""
    return function.__name__, function.__qualname__, function.__module__


def is_native(value: Any) -> bool:
    """Whether a value is a function that is not written in Python and belongs to no object."""
    owner = getattr(value, "__self__", None)
    native = isinstance(value, types.BuiltinFunctionType)
    return native and (owner is None or isinstance(owner, (types.ModuleType, type)))


def native_text(value: Any) -> str:
    """A native function as text that is the same in every process."""
    return " ".join(native_name(value))


def _assigned_outside(code: types.CodeType) -> str | None:
    """The first variable of its maker that a function's code, or a function defined in it, assigns or deletes."""
    due = [code]
    while due:
        inner = due.pop()
        for one in dis.get_instructions(inner):
            if one.opname in ("STORE_DEREF", "DELETE_DEREF") and one.argval in set(code.co_freevars) & {
                *inner.co_freevars
            }:
                return str(one.argval)
        due += [const for const in inner.co_consts if isinstance(const, types.CodeType)]
    return None
