# SPDX-License-Identifier: Apache-2.0
"""Shims: what stands in a block's place while an engine runs its backbone.

An instance-level `forward` that acts only in the context of the call that put it there (runtime/forward_context.py):
for any other thread, and after the call, the block is its plain self. Two engines may share modules and run at once;
the last call to leave takes the shims out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from ..modules.tree import compiled_elsewhere, replaced_forward
from ..runtime.forward_context import current

_lock = threading.Lock()
_installed: dict[int, tuple[nn.Module, list[int]]] = {}


def stand_in(module: nn.Module) -> bool:
    """Put a shim into a module, or count one more user of the one that is there. False: a foreign one is."""
    with _lock:
        entry = _installed.get(id(module))
        if entry is not None:
            entry[1][0] += 1
            return True
        if replaced_forward(module) is not None or compiled_elsewhere(module):
            return False
        module.__dict__["forward"] = _forward(module)
        _installed[id(module)] = (module, [1])
        return True


def leave(module: nn.Module) -> None:
    """One user of a module's shim leaves; the last one takes it out."""
    with _lock:
        entry = _installed[id(module)]
        entry[1][0] -= 1
        if entry[1][0]:
            return
        del _installed[id(module)]
        if getattr(module.__dict__.get("forward"), "nexfort_shim", False):
            del module.__dict__["forward"]


def _forward(module: nn.Module) -> Callable[..., Any]:
    own = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        session = current.get()
        if session is None:
            return own(module, *args, **kwargs)

        def plain(*a: Any, **k: Any) -> Any:
            return own(module, *a, **k)

        return session.on_call(module, plain, args, kwargs, session)

    forward.nexfort_shim = True  # type: ignore[attr-defined]
    return forward
