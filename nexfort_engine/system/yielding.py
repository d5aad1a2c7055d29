# SPDX-License-Identifier: Apache-2.0
"""Yielding: a thread that makes artefacts beside steps lets the threads that run them have the interpreter.

Only one thread of Python runs at a time, and each operator of torch gives the interpreter away for a moment: a thread
that computes in Python all the time would take it then, and keep it for 5 ms. A trace is such a thread. So it stops at
many places of its way (`_passed`) and looks where the other threads are. One that has moved since is at work, and is
left alone until it stays where it is, because it waits for a device or for an operator, or has had its share.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from .shared_settings import HELD

QUIET = 0.008  # seconds in which a thread that does not move is no longer at work in Python
SHARE = 0.04  # seconds that it is left alone at most, before a burst
BURST = 0.001  # seconds between two looks
INTERVAL = 0.0002  # seconds that a thread waits for the interpreter before it takes it, while one yields
_DEEP = 8  # functions by which it is told where a thread is
_WATCHED = 60.0  # seconds since its last step that a thread is watched

_beside: ContextVar[bool] = ContextVar("nexfort_beside", default=False)
_steps: dict[int, float] = {}  # threads, with the time of their last step


def runs_a_step() -> None:
    """The thread that calls this runs a step."""
    _steps[threading.get_ident()] = time.monotonic()


class _Looks:
    """Where the watched threads were when they were looked at last."""

    def __init__(self) -> None:
        self._seen: Any = None
        self._next = 0.0

    def give_way(self) -> None:
        """Wait while a watched thread is at work."""
        now = time.monotonic()
        if now < self._next:
            return
        places = _places(now)
        if places != self._seen:
            until = now + SHARE
            while places != self._seen and now < until:
                self._seen = places
                time.sleep(QUIET)
                now = time.monotonic()
                places = _places(now)
        self._seen, self._next = places, time.monotonic() + BURST


_looks = _Looks()


def _places(now: float) -> Any:
    """Where the threads are that ran steps lately."""
    own = threading.get_ident()
    for thread in [one for one, last in list(_steps.items()) if now - last > _WATCHED]:
        _steps.pop(thread, None)
    if not _steps:
        return ()
    frames = sys._current_frames()
    # this very frame would hold itself by them, and those of the others with all that their functions hold, until
    # garbage is collected, which it is not while a block is traced
    frames.pop(own, None)
    return [_place(frames[thread]) for thread in list(_steps) if thread in frames]


def _place(frame: types.FrameType | None) -> list[tuple[int, int]]:
    """Where a thread is, by the innermost functions that it is in: one alone may be in a loop."""
    found: list[tuple[int, int]] = []
    while frame is not None and len(found) < _DEEP:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return found


def give_way() -> None:
    """Let threads that run steps go first, where this thread makes artefacts beside them."""
    if _beside.get():
        _looks.give_way()


def _yielding(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def around(*args: Any, **kwargs: Any) -> Any:
        if _beside.get():
            _looks.give_way()
        return method(*args, **kwargs)

    return around


@contextmanager
def switching_within(seconds: float) -> Iterator[None]:
    """A thread waits no longer than this for one that is busy in Python, inside the block; usually it is 5 ms."""
    ticket = HELD["switch_interval"].enter(min(seconds, sys.getswitchinterval()))  # or what somebody else asked for
    try:
        yield
    finally:
        HELD["switch_interval"].leave(ticket)


@contextmanager
def beside_steps() -> Iterator[None]:
    """Inside the block this context makes artefacts beside steps, and yields to them. One at a time in a process."""
    token = _beside.set(True)
    with ExitStack() as stack:
        stack.callback(_beside.reset, token)
        stack.enter_context(switching_within(INTERVAL))
        for owner, name in _passed():
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, _yielding(vars(owner)[name]))
        yield


def _passed() -> list[tuple[type, str]]:
    """Methods of torch through which a trace passes often."""
    import torch._subclasses.fake_tensor
    import torch.fx.experimental.sym_node
    import torch.fx.experimental.symbolic_shapes

    return [
        (torch._subclasses.fake_tensor.FakeTensorMode, "dispatch"),
        (torch.fx.graph.Graph, "create_node"),
        (torch.fx.experimental.symbolic_shapes.ShapeEnv, "evaluate_expr"),
        (torch.fx.experimental.symbolic_shapes.ShapeEnv, "_maybe_evaluate_static"),
        (torch.fx.experimental.symbolic_shapes.ShapeEnv, "simplify"),
        (torch.fx.experimental.sym_node.SymNode, "__init__"),
    ]
