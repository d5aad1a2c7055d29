# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's allocation graph, paused while the engine compiles, measures or captures.

ComfyUI 0.35 and newer record what a block allocates and expect the same in the next step. The engine pauses that
record while it allocates for itself. A pause is a flag in comfy_aimdo and no count: the end of an inner pause would end
the outer one too. So each pause that is asked for through `comfy.model_prefetch` is counted here, for each thread; only
the end of the outermost one ends it. Inside a pause of the engine's own no new record begins: a CUDA graph of a step
would keep addresses that go with the record.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger(__name__)

_MODULE = "comfy.model_prefetch"
_PAUSE, _ENABLED = "pause_malloc_graph", "malloc_graph_enabled"


class _Depths(threading.local):
    """The pauses that this thread is in. own: how many of them are the engine's."""

    def __init__(self) -> None:
        self.entered: list[bool] = []  # for each, from the outermost: whether it has paused the record
        self.own = 0


_depths = _Depths()


def count_pauses() -> None:
    """Have ComfyUI's pauses counted from now on, where this version has any."""
    module = sys.modules.get(_MODULE)
    for name, kind in ((_PAUSE, _CountedPauses), (_ENABLED, _OutsideOwnPauses)):
        original = getattr(module, name, None)
        if callable(original) and not isinstance(original, kind):
            setattr(module, name, kind(original))


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No allocation of the block is recorded inside, and no record begins."""
    count_pauses()
    pause = getattr(sys.modules.get(_MODULE), _PAUSE, None)
    with contextlib.ExitStack() as stack:
        if pause is not None:
            try:
                stack.enter_context(pause())
            except RuntimeError as error:  # the record is another thread's, or has failed: ComfyUI says so itself
                log.warning("Nexfort: ComfyUI's allocation graph could not be paused: %s", error)
        _depths.own += 1
        try:
            yield
        finally:
            _depths.own -= 1


class _CountedPauses:
    """Stands for `pause_malloc_graph`: what it gives pauses when it is entered, and ends with the outermost one."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> _CountedPause:
        return _CountedPause(self._original(*args, **kwargs))


class _CountedPause:
    """One pause, which may be entered more than once: comfy_kitchen keeps one for all its allocations."""

    def __init__(self, pause: Any) -> None:
        self._pause = pause

    def __enter__(self) -> None:
        is_outermost = not any(_depths.entered)
        if is_outermost:
            self._pause.__enter__()
        _depths.entered.append(is_outermost)

    def __exit__(self, *error: object) -> Any:
        return self._pause.__exit__(*error) if _depths.entered.pop() else None


class _OutsideOwnPauses:
    """Stands for `malloc_graph_enabled`: no where the engine has paused the record."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return not _depths.own and self._original(*args, **kwargs)
