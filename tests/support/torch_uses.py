# SPDX-License-Identifier: Apache-2.0
"""Finds what Python code uses of torch and Triton by private names, from its syntax tree. No test lives here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

ROOTS = ("torch", "triton")
_BY_TEXT = ("getattr", "hasattr", "setattr", "delattr", "replaced")  # functions that take an attribute's name as text
_TEXT = re.compile(r"(torch|triton)(\.\w+)+\.?|_[A-Za-z]\w*")  # a name as text: a module's, or a private one


def is_private(name: str) -> bool:
    """Whether a part of a name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


class Uses:
    """What one file uses. names: dotted ones of torch and Triton. attributes: private ones of objects."""

    def __init__(self, text: str) -> None:
        self._tree = ast.parse(text)
        self._bound: dict[str, str] = {}  # names of this file -> what of torch they are
        self._others: set[str] = set()  # names of this file for what is not torch's
        self._bind()
        by_text = list(self._by_text())
        self._named = {node for _, node in by_text}
        found = {*self._found(), *(name for name, _ in by_text)}
        self.names = {name for name in found if name.partition(".")[0] in ROOTS and is_private(name)}
        self.attributes = {name for name in found if "." not in name and is_private(name)}

    def _bind(self) -> None:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    root = one.name.partition(".")[0]
                    if root in ROOTS:
                        self._bound[one.asname or root] = one.name if one.asname else root
                    else:
                        self._others.add(one.asname or root)
            elif isinstance(node, ast.ImportFrom):
                for one in node.names:
                    if not node.level and (node.module or "").partition(".")[0] in ROOTS:
                        self._bound[one.asname or one.name] = f"{node.module}.{one.name}"
                    else:
                        self._others.add(one.asname or one.name)
        for node in ast.walk(self._tree):  # aten = torch.ops.aten
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and (name := self._name(node.value))
            ):
                self._bound.setdefault(node.targets[0].id, name)

    def _name(self, node: ast.AST) -> str:
        """The dotted name of torch that an expression is, or nothing."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._bound:
            return ""
        return ".".join([self._bound[node.id], *reversed(parts)])

    def _found(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                yield from (one.name for one in node.names if "." in one.name)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield from (f"{node.module}.{one.name}" for one in node.names)
            elif isinstance(node, ast.Attribute):
                yield self._name(node) or self._attribute(node.value, node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _TEXT.fullmatch(node.value):
                yield "" if node in self._named else node.value.rstrip(".")

    def _by_text(self) -> Iterator[tuple[str, ast.expr]]:
        """What `getattr(torch._C, "_name")` and a row (torch._C, "_name", ...) name, and where the text stands."""
        for node in ast.walk(self._tree):
            parts: list[ast.expr] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_TEXT:
                parts = node.args
            elif isinstance(node, ast.Tuple):
                parts = node.elts
            if len(parts) > 1 and isinstance(parts[1], ast.Constant) and (name := self._name(parts[0])):
                yield f"{name}.{parts[1].value}", parts[1]

    def _attribute(self, owner: ast.expr, name: str) -> str:
        """A private attribute of an object that may be torch's."""
        root: ast.AST = owner
        while isinstance(root, ast.Attribute):
            root = root.value
        return "" if isinstance(root, ast.Name) and root.id in self._others else name


def defined(text: str) -> set[str]:
    """The names that a file gives something: functions, classes, variables, and attributes of `self` and `cls`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id in ("self", "cls") else set()
    return found
