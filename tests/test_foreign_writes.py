# SPDX-License-Identifier: Apache-2.0
"""Nobody writes into the attributes of an object whose class is another file's: that class has a method for it.

What is looked at are names whose class can be read in the file: parameters and variables that are annotated with a
class of the engine, and variables that are made by calling one.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from test_project import ENGINE, ROOT, name_of, sources, tree

Classes = dict[str, Path | None]  # the file that defines the class of a name's object; None: the engine has none
HOLDERS = ("Optional", "Union", "Annotated", "Final")  # what may stand around a class in an annotation
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ClassDef)


def file_of(module: str) -> Path | None:
    """The file of a module of the project, by its dotted name."""
    place = ROOT.joinpath(*module.split("."))
    found = (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())
    return next(found, None) if module else None


def imported(code: ast.Module, path: Path) -> dict[str, tuple[str, str]]:
    """(module, name in it) of each name that a file imports, of types alone too; the name is "" for a module."""
    package, found = path.relative_to(ROOT).parts[:-1], dict[str, tuple[str, str]]()
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})
        elif isinstance(node, ast.Import):
            found.update({alias.asname: (alias.name, "") for alias in node.names if alias.asname})
    return found


@functools.cache
def defined(path: Path, name: str) -> Path | None:
    """The file of the engine that defines a class, by a name that another file has for it."""
    return _defined(tree(path), path, name, _imported_by(path))


@functools.cache
def _imported_by(path: Path) -> dict[str, tuple[str, str]]:
    return imported(tree(path), path)


def _defined(code: ast.Module, path: Path, name: str, names: dict[str, tuple[str, str]]) -> Path | None:
    if any(isinstance(node, ast.ClassDef) and node.name == name for node in code.body):
        return path
    module, inner = names.get(name, ("", ""))
    file = file_of(module) if inner else None
    return defined(file, inner) if file is not None and file.is_relative_to(ENGINE) else None


class Checker:
    """The writes of one file into objects of classes that other files of the engine define."""

    def __init__(self, code: ast.Module, path: Path) -> None:
        self.code, self.path, self._imported = code, path, imported(code, path)

    def found(self) -> list[str]:
        """Each write, with its line."""
        return [f"{line}: {target}" for line, target in sorted(set(self._in(self.code, {})))]

    def _class(self, node: ast.expr | None) -> Path | None:
        """The file of a class that an expression names."""
        if isinstance(node, ast.Name):
            return _defined(self.code, self.path, node.id, self._imported)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, inner = self._imported.get(node.value.id, ("", ""))
            file = file_of(f"{module}.{inner}" if inner else module)
            return defined(file, node.attr) if file is not None and file.is_relative_to(ENGINE) else None
        return None

    def _annotated(self, node: ast.expr | None) -> Path | None:
        """The file of the class of an annotation, which may be a text, and may allow for None."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._annotated(ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.BinOp):
            return self._annotated(node.left) or self._annotated(node.right)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] in HOLDERS:
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return next(filter(None, map(self._annotated, parts)), None)
        return self._class(node)

    def _made(self, node: ast.expr | None) -> Path | None:
        """The file of the class that a value is made by calling."""
        if isinstance(node, ast.IfExp):
            return self._made(node.body) or self._made(node.orelse)
        return self._class(node.func) if isinstance(node, ast.Call) else None

    def _bound(self, node: ast.AST) -> Iterator[tuple[str, Path | None]]:
        """Names that a node binds, each with the file of its class."""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, self._annotated(node.annotation)
        elif isinstance(node, ast.NamedExpr):
            yield node.target.id, self._made(node.value)
        elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
            yield node.optional_vars.id, self._made(node.context_expr)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                yield from ((name.id, self._made(value)) for name, value in pairs if isinstance(name, ast.Name))

    def _in(self, scope: ast.AST, around: Classes) -> Iterator[tuple[int, str]]:
        """The writes in a scope and in those inside. around: what names of the scopes around it stand for."""
        known, nodes = dict(around), list(_own(scope))
        if isinstance(scope, FUNCTIONS):
            args = scope.args
            more = [one for one in (args.vararg, args.kwarg) if one is not None]
            known.update({one.arg: None for one in more})
            known.update({a.arg: self._annotated(a.annotation) for a in (*args.posonlyargs, *args.args)})
            known.update({a.arg: self._annotated(a.annotation) for a in args.kwonlyargs})
        bound = [pair for node in nodes for pair in self._bound(node)]
        known.update({name: None for name, _ in bound if not isinstance(scope, FUNCTIONS) or known.get(name) is None})
        known.update({name: path for name, path in bound if path is not None})
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                path = known.get(_root(node))
                if path is not None and path != self.path:
                    yield node.lineno, ast.unparse(node)
            if isinstance(node, SCOPES):
                yield from self._in(node, around if isinstance(scope, ast.ClassDef) else known)


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """What lies in a scope; of scopes inside it only themselves."""
    due: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while due:
        node = due.pop()
        yield node
        if not isinstance(node, SCOPES):
            due += ast.iter_child_nodes(node)


def _root(node: ast.expr) -> str:
    """The name that an attribute, or an attribute of that, or of an item, begins with; "" where it begins with none."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def foreign_writes(paths: Iterable[Path]) -> list[str]:
    return [f"{name_of(path)}:{found}" for path in paths for found in Checker(tree(path), path).found()]


def test_nobody_writes_into_what_another_file_s_class_made() -> None:
    assert not foreign_writes(sources(ENGINE, ROOT / "nodes")), "give the class a method for it"


# ---- the checker -------------------------------------------------------------------------------------------

IMPORT = "from ..runtime.forward_context import ForwardContext, StepTrace\n"
FOREIGN = {
    "a parameter": "def f(one: ForwardContext):\n    one.inside = True",
    "a parameter by name alone": "def f(*, one: ForwardContext):\n    one.inside = True",
    "one that may be None": "def f(one: ForwardContext | None):\n    one.inside = True",
    "one as typing has it": "def f(one: Optional[ForwardContext]):\n    one.inside = True",
    "a text": "def f(one: 'ForwardContext'):\n    one.inside = True",
    "a text with None": "def f(one: 'None | ForwardContext'):\n    one.inside = True",
    "further down": "def f(one: ForwardContext):\n    one.trace.lists = True",
    "an item's": "def f(one: ForwardContext):\n    one.doubted[0].disabled_reason = ''",
    "in place": "def f(one: ForwardContext):\n    one.trace.lists |= True",
    "with an annotation": "def f(one: ForwardContext):\n    one.inside: bool = True",
    "one of several": "def f(one: ForwardContext):\n    one.inside, two = True, one.inside",
    "several at once": "def f(one: ForwardContext):\n    two = one.inside = True",
    "of a block": "def f(one: ForwardContext):\n    with open('x') as one.trace:\n        pass",
    "of a loop": "def f(one: ForwardContext):\n    for one.inside in (True, False):\n        pass",
    "taken away": "def f(one: ForwardContext):\n    del one.trace",
    "a variable": "def f(x):\n    one: StepTrace = x()\n    one.lists = True",
    "a variable that is made": "def f():\n    one = StepTrace()\n    one.lists = True",
    "made beside others": "def f():\n    one, two = StepTrace(), 1\n    one.lists = True",
    "made or not": "def f(x):\n    one = StepTrace() if x else None\n    one.lists = True",
    "made on the way": "def f():\n    if one := StepTrace():\n        one.lists = True",
    "of a function around": "def f(one: StepTrace):\n    def g():\n        one.lists = True",
    "in a method": "class A:\n    def f(self, one: StepTrace):\n        one.lists = True",
    "in a function that waits": "async def f(one: StepTrace):\n    one.lists = True",
    "of the file": "one = StepTrace()\none.lists = True",
    "by its module": "from ..runtime import forward_context as c\ndef f(one: c.StepTrace):\n    one.lists = True",
    "by another name": "from ..runtime.forward_context import StepTrace as T\ndef f(one: T):\n    one.lists = True",
    "by the whole name": "from nexfort_engine.config.compile_config import CompileConfig as T\n"
    "def f(one: T):\n    one.mode = 1",
    "for types alone": "if TYPE_CHECKING:\n    from .region import Region\ndef f(one: Region):\n    one.module = 1",
    "in the function": "def f():\n    from .region import Region\n    one: Region\n    one.module = 1",
    "by a file that imports it": "from ..engine import Calls\ndef f(one: Calls):\n    one.engine = None",
}
OWN = {
    "its own class": "class A:\n    pass\ndef f(one: A):\n    one.a = 1",
    "itself": "class A(ForwardContext):\n    def f(self):\n        self.inside = True",
    "of torch": "from torch import nn\ndef f(one: nn.Module):\n    one.training = True",
    "unknown": "def f(one):\n    one.inside = True",
    "several of them": "def f(one: list[ForwardContext]):\n    one.inside = True",
    "an item": "def f(one: ForwardContext):\n    one.calls.step_invariant[1] = 2",
    "a call": "def f(one: ForwardContext):\n    one.trace.note_lists()",
    "read": "def f(one: ForwardContext):\n    two = one.inside",
    "another of the name": "def f(one: ForwardContext):\n    def g(one):\n        one.inside = True",
}


def writes(text: str) -> list[str]:
    """What the checker finds in a file of dispatch/ with this text."""
    return Checker(ast.parse(IMPORT + text), ENGINE / "dispatch" / "some.py").found()


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_write_of_each_form_is_found(text: str) -> None:
    assert len(writes(text)) == 1


@pytest.mark.parametrize("text", OWN.values(), ids=OWN.keys())
def test_what_is_no_such_write_is_let_be(text: str) -> None:
    assert not writes(text)
