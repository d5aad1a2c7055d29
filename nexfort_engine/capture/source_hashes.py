# SPDX-License-Identifier: Apache-2.0
"""What code a capture walked through: the host's source files with their hashes, and the packages of its operators.

An artefact is only as good as the Python code it was traced from. These lists are in its manifest and are compared
before it is loaded, without importing anything.
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import hashlib
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .code_monitor import CodeMonitor

_TORCH = os.path.join(Path(torch.__file__).parent, "")
_ENGINE = os.path.join(Path(__file__).parent.parent, "")
_STDLIB = sysconfig.get_path("stdlib")
_NO_FILES = ("<frozen", "<eval_with_key")  # code that was in no file: Python's own, and graphs as fx writes them
# what torch's tracing itself runs through; torch's own version is in the key
_TRACERS = ("sympy", "mpmath", "numpy", "networkx", "triton", "typing_extensions", "optree", "_distutils_hack")


def operator_modules(graph: torch.fx.GraphModule) -> list[str]:
    """Python modules that must be imported before the artefact is loaded: they register operators the graph calls."""
    found = set()
    for node in graph.graph.nodes:
        namespace = getattr(node.target, "namespace", None) if node.op == "call_function" else None
        if namespace and namespace not in ("aten", "prim", "prims", "_operator", "higher_order"):
            found.add(_registering_module(str(node.target._schema.name)))
    return sorted(m for m in found if m)


def _registering_module(name: str) -> str:
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(name)
    return getattr(getattr(definition, "_init_fn", None), "__module__", "") or ""


@contextlib.contextmanager
def walked() -> Iterator[set[types.CodeType]]:
    """Collect all code of the host that this thread runs inside the block; see is_host_code.

    The stack traces in a graph name frames called `forward` only; a helper would be missed.
    """
    codes = set[types.CodeType]()
    with ExitStack() as stack:
        found = stack.enter_context(_monitor().walk()) if sys.version_info >= (3, 12) else None
        if found is None:
            found = stack.enter_context(_profiled() if sys.getprofile() or sys.version_info >= (3, 12) else _counted())
        try:
            yield codes
        finally:
            stack.close()
            codes.update(filter(is_host_code, found))


@functools.cache
def _monitor() -> CodeMonitor:
    return CodeMonitor((_TORCH, _ENGINE, *_NO_FILES), is_host_code)


@contextlib.contextmanager
def _counted() -> Iterator[set[types.CodeType]]:
    """For Python before 3.12, by the profiler that is written in C: a note in Python at each call, return and call of
    a builtin makes a capture take two (3.11) to three (3.10) times as long. It can go with Python 3.11.

    It takes the place of another profiler of this thread without putting it back, so there must be none.
    """
    codes = set[types.CodeType]()
    calls = cProfile.Profile(subcalls=False, builtins=False)
    with _TorchUncounted(calls):
        calls.enable()
        try:
            yield codes
        finally:
            calls.disable()
            codes.update(entry.code for entry in calls.getstats() if not isinstance(entry.code, str))


class _TorchUncounted(TorchFunctionMode):
    """Stops the profiler while torch works by itself, which is most of a capture: a third of all its time."""

    def __init__(self, calls: cProfile.Profile) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # operators of others, and tensors with operators of their own, run the host's code
        others = any(not kind.__module__.startswith("torch.") for kind in types)
        if others or isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return func(*args, **(kwargs or {}))
        self._calls.disable()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._calls.enable()


@contextlib.contextmanager
def _profiled() -> Iterator[set[types.CodeType]]:
    """Where another profiler or debuggers are in the way: slow, and it puts back what it found."""
    codes = set[types.CodeType]()

    def note(frame: Any, event: str, _arg: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield codes
    finally:
        sys.setprofile(before)


def hashes(codes: set[types.CodeType], block: nn.Module) -> dict[str, str]:
    """Module name -> hash of its source, for the modules of the host whose code ran, and those of the block's classes.

    Torch, Python's own library and this engine are not the host: their versions are in the key.
    """
    files = {code.co_filename for code in codes}
    own = {sys.modules.get(kind.__module__) for sub in block.modules() for kind in type(sub).__mro__}
    names = {getattr(module, "__file__", None): module.__name__ for module in own if module is not None}
    names |= {file: name for file in files if not file.startswith(("<", _TORCH)) and (name := _module_of(file))}
    return {
        name: hash_source(file)
        for file, name in names.items()
        if file and _is_host(name, file) and Path(file).is_file()
    }


def is_host_code(code: types.CodeType) -> bool:
    """Whether code is neither torch's, Python's own, this engine's, nor that of what tracing runs through."""
    return _is_host_file(code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_host_file(file: str) -> bool:
    if file.startswith("<"):
        return not file.startswith(_NO_FILES)
    return not file.startswith(_ENGINE) and _is_host(_module_of(file) or "", file)


def module_of_code(code: types.CodeType) -> types.ModuleType | None:
    """The module that code is part of, as it is loaded now."""
    name = _module_of(code.co_filename)
    return sys.modules.get(name) if name is not None else None


# how many modules there were and the last of them, when all were last looked through; and file -> name of the module
_looked_through: tuple[tuple[int, str | None], dict[str, str]] = ((0, None), {})


def _module_of(file: str) -> str | None:
    """The name of the module that a file is, or None. All modules are looked through where some may be new."""
    global _looked_through
    if file.startswith("<"):
        return None
    loaded = len(sys.modules), last_key(sys.modules)
    was_loaded, modules = _looked_through
    name = modules.get(file)
    if loaded != was_loaded if name is None else getattr(sys.modules.get(name), "__file__", None) != file:
        # a copy, which no other thread's import comes between
        modules = {f: n for n, m in sys.modules.copy().items() if (f := getattr(m, "__file__", None))}
        _looked_through, name = (loaded, modules), modules.get(file)
    return name


def last_key(table: dict[str, Any]) -> str | None:
    """The key that came last; None of an empty mapping, and while another thread adds to it."""
    try:
        return next(reversed(table), None)
    except RuntimeError:
        return None


def _is_host(name: str, file: str) -> bool:
    if name.partition(".")[0] in ("torch", __name__.partition(".")[0], *_TRACERS) or file.startswith(_TORCH):
        return False
    return not file.startswith(_STDLIB) or "site-packages" in file or "dist-packages" in file


@functools.lru_cache(maxsize=4096)
def _hash_file(path: str, _size: int, _mtime: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def hash_source(path: str) -> str:
    """SHA-256 of a source file, remembered while its size and time stay."""
    stat = Path(path).stat()
    return _hash_file(path, stat.st_size, stat.st_mtime_ns)


def sources_changed(sources: dict[str, str]) -> str | None:
    """The first module of a manifest whose source is not what it was at capture, or None. Imports nothing."""
    for name, digest in sources.items():
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None) or (inspect.getsourcefile(module) if module else None)
        if file is None or not Path(file).is_file() or hash_source(file) != digest:
            return name
    return None
