# SPDX-License-Identifier: Apache-2.0
"""Subclasses: tensors with operators of their own, while their operators are traced.

export records each operator before torch takes it apart, with modes that know plain tensors only: an operator that
meets a quantised tensor ends the trace there. Without a trace, under inference mode, the same operator reaches the
tensor's own `__torch_dispatch__`, which does the work with plain tensors. `own_operators` sends it there in a trace
too, and what is done there with plain tensors is recorded like everything else. So a graph holds what the host's code
computes with the data and scales of such a tensor, and the tensor itself never enters it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


@contextmanager
def own_operators() -> Iterator[None]:
    """Operators on traceable subclasses go to the subclass, as under inference mode, for the length of the block."""
    with _Functions():
        yield


class _Functions(TorchFunctionMode):
    """Sees every function of torch that is called; lets those go on that are given plain tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _with_own_operators(args) and not _with_own_operators(kwargs):
            return func(*args, **kwargs)
        before = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
        recording = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)
        with _Operators(before), torch._C._AutoDispatchBelowAutograd():
            now = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
            with torch._C._ForceDispatchKeyGuard(now[0] - recording, now[1] | recording):
                return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """Hands an operator to the subclass that it was called on, with torch in the state it had before."""

    def __init__(self, before: tuple[Any, Any]) -> None:
        super().__init__()
        self._before = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C._ForceDispatchKeyGuard(*self._before):
            owner = _with_own_operators(args) or _with_own_operators(kwargs)
            if owner is None:
                return func(*args, **kwargs)
            with own_operators():
                return owner.__torch_dispatch__(func, types, args, kwargs)


def _with_own_operators(values: Any) -> Any:
    """The class of the first tensor among the arguments that has operators of its own, or None."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            if is_traceable_wrapper_subclass(value) and not _is_torch_s(type(value)):
                return type(value)
        elif isinstance(value, (list, tuple)):
            found = _with_own_operators(value)
            if found is not None:
                return found
    return None


def _is_torch_s(kind: type) -> bool:
    """Whether tracing itself made the class: what it wraps plain tensors in comes apart by the same protocol."""
    return kind.__module__.startswith("torch._subclasses")
