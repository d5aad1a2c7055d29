# SPDX-License-Identifier: Apache-2.0
"""Launches of Triton kernels by this thread: how Inductor's are made, and which others there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

SCRATCH = "scratch"  # the argument of kernels that write descriptors
_watch_lock = threading.Lock()
_watched: dict[tuple[Any, str], tuple[Callable[..., Any], dict[int, list[Any]]]] = {}


@contextmanager
def launched_by_address(scratch: torch.Tensor) -> Iterator[None]:
    """Kernels that Inductor made are launched with addresses in the place of tensors, by this thread, inside the block.

    Their launcher asks the driver about each tensor's memory, and the driver does not know memory that cudaMallocAsync
    gave while a graph is captured; the addresses are right all the same.

    scratch: memory outside of the graph for what kernels write for themselves to read, their descriptors
    (kernels/gluon_autotuner.py). RuntimeError where a kernel needs more.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def by_address(kernel: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        found = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        if writes_descriptors(kernel):
            # the last of its arguments; what follows are the sizes of the launch
            place = max(at for at, a in enumerate(args) if isinstance(a, torch.Tensor))
            if args[place].nbytes > scratch.nbytes:
                raise RuntimeError(
                    f"a kernel needs {args[place].nbytes} bytes for descriptors; there are {scratch.nbytes}"
                )
            found[place] = scratch.data_ptr()
        return tuple(found)

    with _before_calls(CachingAutotuner, "run", by_address):
        yield


def writes_descriptors(kernel: Any) -> bool:
    """Whether a kernel that Inductor made takes memory for descriptors. Others are given a weight in its place."""
    kinds = (getattr(kernel, "triton_meta", None) or {}).get("signature", {})
    return bool(kinds.get(SCRATCH) == "*u8")


@contextmanager
def noted_triton_launches(note: Callable[[str], None]) -> Iterator[None]:
    """Tell `note` the name of each Triton kernel that this thread launches in the block and Inductor did not make.

    Without Triton there is none.
    """
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return

    def noted(kernel: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        note(str(getattr(kernel, "__name__", kernel)))
        return args

    with _before_calls(JITFunction, "run", noted):
        yield


_Before = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]


@contextmanager
def _before_calls(owner: Any, name: str, action: _Before) -> Iterator[None]:
    """`action` gets object and arguments of each call of a method by this thread in the block; it gives the arguments.

    The method is replaced once for all threads that ask, by the first of them, and put back by the last.
    """
    thread = threading.get_ident()
    with _watch_lock:
        if (owner, name) not in _watched:
            _watched[owner, name] = (getattr(owner, name), {})
            setattr(owner, name, _watching(*_watched[owner, name]))
        original, actions = _watched[owner, name]
        actions.setdefault(thread, []).append(action)
    try:
        yield
    finally:
        with _watch_lock:
            actions[thread].remove(action)
            if not actions[thread]:
                del actions[thread]
            if not actions:
                setattr(owner, name, original)
                del _watched[owner, name]


def _watching(original: Callable[..., Any], actions: dict[int, list[_Before]]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for action in actions.get(threading.get_ident(), ()):
            args = action(self, args)
        return original(self, *args, **kwargs)

    return call
