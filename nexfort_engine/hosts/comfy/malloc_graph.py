# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's allocation graph, paused while the engine compiles, measures or captures.

ComfyUI 0.35 and newer record what a block allocates and expect the same in the next step. The engine pauses that
record while it allocates for itself. A pause is a flag in comfy_aimdo and no count: the end of an inner pause would end
the outer one too. So each pause that is asked for through `comfy.model_prefetch` is counted here, for each thread; only
the end of the outermost one ends it. Inside a pause of the engine's own no new record begins: a CUDA graph of a step
would keep addresses that go with the record.

Functions are known by name and by signature. In one form `malloc_graph_begin(device)` has one record a thread, and
`pause_malloc_graph(sync=False)` pauses it. In an older one `malloc_graph_begin(module, device)` has one a module, in
`module._comfy_malloc_graph`, and ACTIVE_MALLOC_GRAPHS tells which of them a thread is in. Of any other form nothing is
called, and the report says so.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

log = logging.getLogger(__name__)

_MODULE = "comfy.model_prefetch"
_PAUSE, _ENABLED = "pause_malloc_graph", "malloc_graph_enabled"
_BEGIN, _ACTIVE = "malloc_graph_begin", "ACTIVE_MALLOC_GRAPHS"


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
    pause = _pause()
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


def unknown() -> str | None:
    """Why ComfyUI's records cannot be paused here, or None; also where this version has none."""
    begin = getattr(sys.modules.get(_MODULE), _BEGIN, None)
    if begin is None or _pause() is not None:
        return None
    try:
        found = f"{_BEGIN}{inspect.signature(begin)}"
    except (TypeError, ValueError):
        found = _BEGIN
    return (
        f"ComfyUI's allocation graph is not paused while blocks are compiled: {found} is of no known form. If steps "
        "fail, start ComfyUI with --disable-comfy-compiler"
    )


def _pause() -> Callable[[], Any] | None:
    """What makes a pause of this thread's record in the form that this ComfyUI has; None for no form, or another."""
    module = sys.modules.get(_MODULE)
    pause, begin, active = (getattr(module, name, None) for name in (_PAUSE, _BEGIN, _ACTIVE))
    if _takes(pause):  # whatever else it records: to ask for a pause where none is needed does nothing
        return pause
    if _takes(begin, "module", "device") and isinstance(active, Mapping):
        return lambda: _CountedPause(_ModulesPause(active))
    return None


def _takes(function: Any, *names: str) -> bool:
    """Whether a function is called with just such arguments."""
    if not callable(function):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of one that is not written in Python
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    asked = [one.name for one in parameters if one.default is one.empty and one.kind not in optional]
    return asked == list(names)


class _ModulesPause:
    """A pause where each module has a record of its own: of the one that the thread is in when it is entered."""

    def __init__(self, active: Mapping[int, Any]) -> None:
        self._active, self._record = active, None

    def __enter__(self) -> None:
        self._record = self._active.get(threading.get_ident())
        if self._record is not None:
            self._record.pause()

    def __exit__(self, *error: object) -> None:
        record, self._record = self._record, None
        if record is not None and self._active.get(threading.get_ident()) is record:  # else it has ended
            record.resume()


class _CountedPauses:
    """Stands for `pause_malloc_graph`: what it gives pauses when it is entered, and ends with the outermost one."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(original)

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
