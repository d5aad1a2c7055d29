# SPDX-License-Identifier: Apache-2.0
"""Shape conditions of an artefact: which sizes it may be called with.

A lowered graph carries no guards of its own; run at other sizes than it was made for it is wrong or fails. So the
conditions are stored as text beside it and evaluated once for every new combination of sizes: each input dimension is
a number, a symbol or an expression of symbols; ranges bound the symbols; guards are relations that the capture took as
given. Text is evaluated by a small interpreter over Python's syntax tree, never by `eval`.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Dim = int | str


def _mod(a: int, b: int) -> int:
    return a % b


_FUNCTIONS: dict[str, Any] = {
    "Mod": _mod,
    "PythonMod": _mod,
    "Min": min,
    "Max": max,
    "min": min,
    "max": max,
    "abs": abs,
    "FloorDiv": lambda a, b: a // b,
    "floor": math.floor,
    "ceil": math.ceil,
    "CeilDiv": lambda a, b: -(-a // b),
    "Eq": lambda a, b: a == b,
    "Ne": lambda a, b: a != b,
    "Not": lambda a: not a,
    "And": lambda *a: all(a),
    "Or": lambda *a: any(a),
    "TruncToInt": math.trunc,
    "IntTrueDiv": lambda a, b: a / b,
    "ToFloat": float,
    "torch.sym_float": float,
    "math.trunc": math.trunc,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.sqrt": math.sqrt,
    "torch._sym_sqrt": math.sqrt,  # how torch 2.13 and newer print it
    "round": round,
    "Where": lambda c, a, b: a if c else b,
}
_MODULES = ("torch", "math")  # where printed functions come from: no symbols
_OPERATORS: dict[type, Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Div: lambda a, b: a / b,
    ast.Mod: _mod,
    ast.Pow: lambda a, b: a**b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def evaluate(text: str, symbols: Mapping[str, int]) -> Any:
    """The value of an expression of symbols. Raises ValueError for syntax that no condition has."""
    return _value(_parse(text), symbols)


def _value(node: ast.expr, symbols: Mapping[str, int]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, bool)):
        return node.value
    if isinstance(node, ast.Name) and node.id in symbols:
        return symbols[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, symbols), _value(node.right, symbols))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        value = _value(node.operand, symbols)
        return -value if isinstance(node.op, ast.USub) else not value
    if isinstance(node, ast.BoolOp):
        values = [_value(v, symbols) for v in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        left, right = _value(node.left, symbols), _value(node.comparators[0], symbols)
        return _OPERATORS[type(node.ops[0])](left, right)
    if isinstance(node, ast.Call) and (function := _FUNCTIONS.get(ast.unparse(node.func))) is not None:
        return function(*[_value(a, symbols) for a in node.args])
    raise ValueError(f"{ast.unparse(node)!r} was found in a shape condition, expected arithmetic over {set(symbols)}")


def names(text: str) -> set[str]:
    """The symbols in an expression."""
    return {
        node.id
        for node in ast.walk(_parse(text))
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS and node.id not in _MODULES
    }


_BROKEN = "the relation {} does not hold"


def _holds(guard: str, symbols: Mapping[str, int]) -> bool:
    try:
        return bool(evaluate(guard, symbols))
    except ArithmeticError:  # a division by a number that is 0 now
        return False


def _compared(guard: str) -> tuple[bool, Sequence[ast.expr]]:
    """Whether a relation says that two numbers are equal, and both; no numbers if it says something else."""
    node = _parse(guard)
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        return isinstance(node.ops[0], ast.Eq), (node.left, *node.comparators)
    if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in ("Eq", "Ne"):
        return name == "Eq", node.args
    return False, ()


@functools.lru_cache(maxsize=4096)
def _is_of_parity(guard: str) -> bool:
    """Whether a relation says no more than that a number is even, or that it is odd."""
    _, sides = _compared(guard)
    return len(sides) == 2 and any(map(_is_half, sides)) and any(isinstance(side, ast.Constant) for side in sides)


@functools.lru_cache(maxsize=4096)
def _says_one(guard: str) -> bool | None:
    """Whether a relation says that a size made of others, such as half of one, is 1 or none; False: that it is not.

    None if it says something else, such as what is left by a division.
    """
    equal, sides = _compared(guard)
    counts = any(isinstance(side, ast.Constant) and side.value in (0, 1) for side in sides)
    return equal if counts and not any(map(_has_remainder, sides)) else None


def _has_remainder(node: ast.expr) -> bool:
    calls = (ast.unparse(one.func) for one in ast.walk(node) if isinstance(one, ast.Call))
    return any(isinstance(one, ast.Mod) for one in ast.walk(node)) or not {"Mod", "PythonMod"}.isdisjoint(calls)


def _is_half(node: ast.expr) -> bool:
    """Whether an expression is what is left of a number that is divided by 2."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Mod", "PythonMod"):
        by = node.args[-1]
    else:
        by = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) else node
    return isinstance(by, ast.Constant) and by.value == 2 and by is not node


class Conditions:
    """When an artefact may be called.

    shapes: for each tensor input the sizes as numbers or expressions; ints: the same for each integer input;
    ranges: symbol -> [least, greatest or None]; guards: relations. `as_json` and `Conditions(**json)` are inverses.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[Dim]],
        ints: Sequence[Dim] = (),
        ranges: Mapping[str, Sequence[int | None]] | None = None,
        guards: Sequence[str] = (),
    ) -> None:
        self.shapes = [list(s) for s in shapes]
        self.ints = list(ints)
        self.ranges = {k: list(v) for k, v in (ranges or {}).items()}
        self.guards = list(guards)
        self._bind = self._binding_places()

    def _binding_places(self) -> list[tuple[str, int, int]]:
        """Where each symbol stands alone: (symbol, input, dimension), or (symbol, -1, number of the int)."""
        places: dict[str, tuple[int, int]] = {}
        for i, shape in enumerate(self.shapes):
            for d, size in enumerate(shape):
                if isinstance(size, str) and size.isidentifier():
                    places.setdefault(size, (i, d))
        for i, value in enumerate(self.ints):
            if isinstance(value, str) and value.isidentifier():
                places.setdefault(value, (-1, i))
        return [(name, *place) for name, place in places.items()]

    def unbound(self) -> set[str]:
        """Symbols that no input dimension gives alone; with any, the conditions cannot be checked."""
        used: set[str] = set()
        for text in [*(d for s in self.shapes for d in s), *self.ints, *self.guards]:
            if isinstance(text, str):
                used |= names(text)
        return used - {name for name, _, _ in self._bind}

    def broken(self, shapes: Sequence[torch.Size | Sequence[int]], ints: Sequence[int] = ()) -> str | None:
        """Why a call with these sizes may not use the artefact, or None if it may."""
        for shape, expected in zip(shapes, self.shapes, strict=True):
            if len(shape) != len(expected):
                return f"rank {len(shape)} where {len(expected)} was captured"
        symbols = self._symbols(shapes, ints)
        for i, (shape, expected) in enumerate(zip(shapes, self.shapes, strict=True)):
            for d, size in enumerate(expected):
                wanted = size if isinstance(size, int) else evaluate(size, symbols)
                if shape[d] != wanted:
                    return f"size {shape[d]} of dimension {d} of input {i} where {size} was captured"
        for value, expected_int in zip(ints, self.ints, strict=True):
            wanted = expected_int if isinstance(expected_int, int) else evaluate(expected_int, symbols)
            if value != wanted:
                return f"the number {value} where {expected_int} was captured"
        for name, (least, greatest) in self.ranges.items():
            if name in symbols:
                if least is not None and symbols[name] < least:
                    return f"{name} = {symbols[name]} below {least}"
                if greatest is not None and symbols[name] > greatest:
                    return f"{name} = {symbols[name]} above {greatest}"
        for guard in self.guards:
            if not _holds(guard, symbols):
                return _BROKEN.format(guard)
        return None

    def narrow(self, shapes: Sequence[torch.Size | Sequence[int]], ints: Sequence[int] = ()) -> bool:
        """Whether a size of 1 or none was taken for a constant where the call has more.

        It may be one that code makes of the sizes given, such as a number of pairs; then a relation says so.
        """
        both = zip(shapes, self.shapes, strict=True)
        return self._breaks_one(True, shapes, ints) or any(
            expected in (0, 1) and size > expected
            for shape, captured in both
            for size, expected in zip(shape, captured, strict=False)  # ranks are for `broken`
        )

    def fixed(self, shapes: Sequence[torch.Size | Sequence[int]]) -> bool:
        """Whether a size of 2 or more was taken for a constant, as code that loops over it does, and is another now."""
        both = zip(shapes, self.shapes, strict=True)
        return any(
            isinstance(expected, int) and expected > 1 and size != expected
            for shape, captured in both
            for size, expected in zip(shape, captured, strict=False)
        )

    def wide(self, shapes: Sequence[torch.Size | Sequence[int]], ints: Sequence[int] = ()) -> bool:
        """Whether a size is 1 or none where more was captured; one that code makes of those given as well."""
        both = zip(shapes, self.shapes, strict=True)
        return self._breaks_one(False, shapes, ints) or any(
            size in (0, 1) and expected not in (0, 1)
            for shape, captured in both
            for size, expected in zip(shape, captured, strict=False)
        )

    def _breaks_one(self, one: bool, shapes: Sequence[torch.Size | Sequence[int]], ints: Sequence[int]) -> bool:
        """Whether a relation does not hold that a size is 1 or none (`one`), or that it is not."""
        relations = [guard for guard in self.guards if _says_one(guard) is one]
        if not relations or not self._same_ranks(shapes):
            return False
        symbols = self._symbols(shapes, ints)
        return not all(_holds(guard, symbols) for guard in relations)

    def other_parity(self, shapes: Sequence[torch.Size | Sequence[int]], ints: Sequence[int] = ()) -> str | None:
        """Says where the code is for an even number and the call has an odd one, or the other way round; else None."""
        if not self._same_ranks(shapes):
            return None
        symbols = self._symbols(shapes, ints)
        parities = filter(_is_of_parity, self.guards)
        return next((_BROKEN.format(guard) for guard in parities if not _holds(guard, symbols)), None)

    def _same_ranks(self, shapes: Sequence[torch.Size | Sequence[int]]) -> bool:
        return all(len(shape) == len(expected) for shape, expected in zip(shapes, self.shapes, strict=True))

    def _symbols(self, shapes: Sequence[torch.Size | Sequence[int]], ints: Sequence[int]) -> dict[str, int]:
        return {name: int(ints[d] if i < 0 else shapes[i][d]) for name, i, d in self._bind}

    def as_json(self) -> dict[str, Any]:
        return {"shapes": self.shapes, "ints": self.ints, "ranges": self.ranges, "guards": self.guards}
