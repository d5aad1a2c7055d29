# SPDX-License-Identifier: Apache-2.0
"""What torch.export changes for the whole process while it traces, changed for the thread that traces alone.

A trace stands in `nn.Module.__call__` and `__getattr__`, and says of the process that it compiles. In another thread,
which runs a model meanwhile, each call of a module would go through the trace, which writes out the module's name and
all below it. And a host that is told that it compiles takes other ways: ComfyUI looks for no cancel then. The modes
under which it traces lie in one list for all threads: a thread that prints a tensor or compiles something takes them
away for a moment, and puts them back when the trace may be over, so that no later trace works. As of torch 2.11 none of
these is kept to a thread.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

_made: set[types.CodeType] = set()  # of the functions that stand in the place of others while a thread traces


class Here:
    """True in the thread that made it, in others what was said before."""

    __slots__ = ("_before", "_thread")

    def __init__(self, before: object) -> None:
        self._before, self._thread = before, get_ident()

    def __bool__(self) -> bool:
        return get_ident() == self._thread or bool(self._before)


@contextmanager
def _compiling_here() -> Iterator[None]:
    """In the place of torch's context in which it says that it compiles."""
    import torch

    flags: Any = torch.compiler
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    try:
        flags._is_compiling_flag, flags._is_exporting_flag = map(Here, before)
        yield
    finally:
        flags._is_compiling_flag, flags._is_exporting_flag = before


def _here_alone(patch_method: Callable[..., Any]) -> Callable[..., Any]:
    """fx's way to exchange a method, for the thread that exchanges it alone."""

    @functools.wraps(patch_method)
    def patch(self: Any, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        own, thread = getattr(cls, name), get_ident()

        def either(*args: Any, **kwargs: Any) -> Any:
            return new_fn(*args, **kwargs) if get_ident() == thread else own(*args, **kwargs)

        _made.add(either.__code__)
        functools.update_wrapper(either, own)
        patch_method(self, cls, name, either, deduplicate)

    return patch


def before_traces(function: Any) -> Any:
    """A function as it is for threads that do not trace."""
    while getattr(function, "__code__", None) in _made:
        function = function.__wrapped__
    return function


class _MethodsOfModules:
    """While anybody is inside, fx exchanges methods for the thread alone that exchanges them."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._own: Any = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        import torch.fx._symbolic_trace

        patcher: Any = torch.fx._symbolic_trace._Patcher
        with self._lock:
            self._inside += 1
            if self._inside == 1 and hasattr(patcher, "patch_method"):
                self._own = torch.fx._symbolic_trace._Patcher.patch_method
                patcher.patch_method = _here_alone(self._own)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._own is not None:
                    patcher.patch_method, self._own = self._own, None


_METHODS = _MethodsOfModules()


def modules_of_others_left() -> AbstractContextManager[None]:
    """Inside the block modules that other threads call meanwhile are called as they are.

    A trace of fx stands in `nn.Module.__call__`. Inductor makes one of a function of its own while it lowers; a model
    that runs in another thread then would be taken for a part of it, and its call would raise.
    """
    return _METHODS.kept()


@contextmanager
def kept_to_its_thread() -> Iterator[None]:
    """Inside the block what traces change is changed for their own threads. Traces are torch.export's."""
    import torch.compiler
    import torch.export._trace

    exports: Any = torch.export._trace
    tells = hasattr(torch.compiler, "_is_compiling_flag") and hasattr(torch.compiler, "_is_exporting_flag")
    with modules_of_others_left():
        if not tells or not hasattr(exports, "_compiling_state_context"):
            yield
            return
        own = torch.export._trace._compiling_state_context
        exports._compiling_state_context = _compiling_here
        try:
            yield
        finally:
            exports._compiling_state_context = own


# ---- the modes under which a trace runs ------------------------------------------------------------------------------


class _PreDispatchModes:
    """Stands for torch's list of pre-dispatch modes: these threads have one each, all others have torch's."""

    def __init__(self, torchs: Any) -> None:
        self.torchs, self.own = torchs, dict[int, Any]()

    def _here(self) -> Any:
        return self.own.get(get_ident(), self.torchs)

    def set(self, index: int, mode: Any) -> None:
        self._here().set(index, mode)

    def get(self, index: int) -> Any:
        return self._here().get(index)

    def count(self) -> int:
        return int(self._here().count())

    @property
    def _schema_check_mode(self) -> Any:
        return self._here()._schema_check_mode

    @_schema_check_mode.setter
    def _schema_check_mode(self, mode: Any) -> None:
        self._here()._schema_check_mode = mode


_exchanging = threading.Lock()


@contextmanager
def own_pre_dispatch_modes() -> Iterator[None]:
    """Inside the block no other thread can take away this thread's pre-dispatch modes, nor can it take theirs.

    It begins without any. Nothing is left of what the block leaves behind.
    """
    from torch import _ops

    ops: Any = _ops
    if not hasattr(ops, "_mode_stack_state_for_pre_dispatch"):  # another torch
        yield
        return
    thread = get_ident()
    with _exchanging:
        modes = ops._mode_stack_state_for_pre_dispatch
        if not isinstance(modes, _PreDispatchModes):
            modes = ops._mode_stack_state_for_pre_dispatch = _PreDispatchModes(modes)
        outer = modes.own.get(thread)
        modes.own[thread] = type(modes.torchs)()
    try:
        yield
    finally:
        with _exchanging:
            if outer is not None:
                modes.own[thread] = outer
            else:
                del modes.own[thread]
            if not modes.own:
                ops._mode_stack_state_for_pre_dispatch = modes.torchs
