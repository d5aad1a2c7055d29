# SPDX-License-Identifier: Apache-2.0
"""The locks of the project: where the code makes them, and in which order threads take them in a process that runs.

`made` reads the source. `install` has to be called before the project's modules are imported; it puts recording locks
in the places of those that the project's code makes, and leaves the locks of others alone.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOCKS = tuple(
    f"threading.{kind}" for kind in ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier")
)
KINDS = (*LOCKS, "filelock.FileLock")

edges: set[tuple[str, str]] = set()  # (held, taken): a thread that held one waited for the other
takers: dict[str, set[str]] = {}  # names of the threads that waited for a lock, by the lock
_thread = threading.local()


@functools.cache
def made(path: Path) -> dict[range, str]:
    """The locks that a file makes, by the lines of the statement: `Class.attribute`, or a module's own name."""
    return {range(node.lineno, (node.end_lineno or node.lineno) + 1): name for name, node in assigned(path, KINDS)}


def assigned(path: Path, kinds: Collection[str]) -> Iterator[tuple[str, ast.stmt]]:
    """What a file assigns that makes one of these: `Class.attribute` or a variable's own name, and the statement."""
    for node, kind, is_inside in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            for one, value in _each(target, node.value):
                if any(called in kinds for called in names_in(value)):
                    of = kind if isinstance(one, ast.Attribute) or not is_inside else ""
                    own = one.attr if isinstance(one, ast.Attribute) else ast.unparse(one)
                    yield f"{of}.{own}" if of else own, node


def statements(tree: ast.AST, kind: str = "", is_inside: bool = False) -> Iterator[tuple[ast.stmt, str, bool]]:
    """Every statement of a file, the class that it is in, and whether it is inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node, kind, is_inside
        if isinstance(node, ast.ClassDef):
            yield from statements(node, node.name, False)
        else:
            yield from statements(node, kind, is_inside or isinstance(node, ast.FunctionDef))


def names_in(value: ast.AST) -> set[str]:
    """Names that an expression uses, those of a module with its name: `threading.Lock`. Not what it hands to a call."""
    found = {ast.unparse(value)} if isinstance(value, (ast.Attribute, ast.Name)) else set()
    inner = [node for node in ast.iter_child_nodes(value) if getattr(node, "arg", None) in (None, "default_factory")]
    return found.union(*map(names_in, inner))


def _each(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment, each with what it is given."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def _maker(frame: Any) -> str | None:
    """`path name` of the lock that the project's code makes in a frame; None where others make one."""
    if frame.f_code is threading.Condition.__init__.__code__:  # it makes its lock there
        frame = frame.f_back
    while Path(frame.f_code.co_filename).parent.name == "filelock":  # its classes are made by a class of its own
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "tests") or ".venv" in path.parts:
        return None
    for lines, name in made(path).items():
        if frame.f_lineno in lines:
            return f"{path.relative_to(ROOT).as_posix()} {name}"
    raise AssertionError(f"{path}:{frame.f_lineno} makes a lock that `made` does not find")


def _taking(lock: Any, name: str) -> None:
    """A thread begins to wait for a lock."""
    held = _thread.__dict__.setdefault("held", [])
    takers.setdefault(name, set()).add(threading.current_thread().name)
    if all(lock is not other for other, _ in held):
        edges.update((of, name) for _, of in held)


def _taken(lock: Any, name: str) -> None:
    _thread.__dict__.setdefault("held", []).append((lock, name))


def _left(lock: Any) -> None:
    held = _thread.held
    del held[max(place for place, (other, _) in enumerate(held) if other is lock)]


class _Recorded:
    """A lock that records what its taker holds. A try that does not wait is no edge: it cannot lock anybody up."""

    def __init__(self, lock: Any, name: str) -> None:
        self._lock, self._name = lock, name

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As the lock's own."""
        if blocking:
            _taking(self, self._name)
        got = self._lock.acquire(blocking, timeout)
        if got:
            _taken(self, self._name)
        return got

    def release(self) -> None:
        """As the lock's own."""
        self._lock.release()
        _left(self)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def install() -> None:
    """Record from now on."""
    import filelock

    def recording(make: Callable[[], Any]) -> Callable[[], Any]:
        def lock() -> Any:
            name = _maker(sys._getframe(1))
            return make() if name is None else _Recorded(make(), name)

        return lock

    class FileLock(filelock.FileLock):  # type: ignore[misc,valid-type]  # which one goes by the system
        """As filelock's, which others derive from."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.__dict__["of"] = _maker(sys._getframe(1))
            super().__init__(*args, **kwargs)

        def acquire(self, *args: Any, **kwargs: Any) -> Any:
            """As filelock's."""
            if (name := self.__dict__["of"]) is None:
                return super().acquire(*args, **kwargs)
            _taking(self, name)
            got = super().acquire(*args, **kwargs)
            _taken(self, name)
            return got

        def release(self, *args: Any, **kwargs: Any) -> None:
            """As filelock's."""
            super().release(*args, **kwargs)
            if self.__dict__["of"] is not None and any(other is self for other, _ in _thread.held):
                _left(self)

    threading.Lock, threading.RLock = recording(threading.Lock), recording(threading.RLock)  # type: ignore[misc]
    filelock.FileLock = FileLock  # type: ignore[misc]


def told() -> str:
    """What was recorded, as JSON."""
    return json.dumps({"edges": sorted(edges), "takers": {name: sorted(them) for name, them in takers.items()}})
