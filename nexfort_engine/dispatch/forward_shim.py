# SPDX-License-Identifier: Apache-2.0
"""Shims: what stands in a block's place while an engine runs its backbone.

An instance-level `forward` that acts only in the context of the call that put it there (runtime/forward_context.py):
for any other thread, and after the call, the block is its plain self. Two engines may share modules and run at once;
the last call to leave takes the shims out.

Where others put a forward of theirs in the place of the block's own, which calls the block's own, the shim stands where
they hold that (modules/boundaries.py): what they do before and after it stays theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from ..modules.boundaries import OwnForward, Place
from ..modules.tree import compiled_elsewhere, is_shim, mark_shim, replaced_forward
from ..runtime.forward_context import current

_lock = threading.Lock()
_installed: dict[int, tuple[nn.Module, list[int], list[tuple[Place, Any]]]] = {}


def stand_in(module: nn.Module, own: OwnForward) -> bool:
    """Put a shim into a module, or count one more user of the one that is there. False: there is no place for one.

    own: where a forward of others calls the module's own.
    """
    with _lock:
        entry = _installed.get(id(module))
        if entry is not None:
            entry[1][0] += 1
            return True
        if compiled_elsewhere(module):
            return False
        replaced = replaced_forward(module) is not None
        places = own.places() if replaced else [Place(module.__dict__, "forward")]
        if not places:
            return False
        shim = _forward(module)
        before = [(place, place.get()) for place in places]
        for place in places:
            place.put(shim)
        _installed[id(module)] = (module, [1], before if replaced else [])
        return True


def leave(module: nn.Module) -> None:
    """One user of a module's shim leaves; the last one takes it out."""
    with _lock:
        entry = _installed[id(module)]
        entry[1][0] -= 1
        if entry[1][0]:
            return
        del _installed[id(module)]
        for place, before in entry[2]:
            if is_shim(place.get()) and place.get().nexfort_of is module:
                place.put(before)
        if is_shim(module.__dict__.get("forward")):
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

    mark_shim(forward, module)
    return forward
