# SPDX-License-Identifier: Apache-2.0
"""Remedies: what is changed after a step failed, so that it may be run again (fallback.py says whether it may)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..cudagraphs.memory_budget import no_memory
from ..modules.channels_last import is_of_order
from ..reporting.report import named
from ..runtime.engine_state import EngineState
from ..runtime.fault_attribution import HalfDone
from ..runtime.forward_context import ForwardContext
from .fallback import is_repeatable
from .memory_reclaim import MemoryReclaim


def recover(
    state: EngineState, memory: MemoryReclaim, error: BaseException, session: ForwardContext
) -> contextlib.AbstractContextManager[Any] | None:
    """In what a step that failed is run again, where that may help."""
    assert session.calls.backbone is not None, "it failed in the backbone"
    if session.outcome.images and is_of_order(error):
        again: Any = without_images(state, memory, named(error))
    elif isinstance(error, HalfDone):
        again = contextlib.nullcontext()
    # the host has remedies of its own, and gets the error once nothing is held that could have been its cause
    elif no_memory(error) and memory.release():
        state.stop_keeping()
        again = contextlib.nullcontext()
    else:
        return None
    if not is_repeatable(state, session):
        if session.outcome.images and is_of_order(error) and not isinstance(error, AssertionError):
            with again:  # it is the next step that it helps
                pass
        return None
    if no_memory(error):
        state.report.note("memory was short: what was held between steps was given back, and the step run again")
    return again


@contextlib.contextmanager
def without_images(state: EngineState, memory: MemoryReclaim, reason: str) -> Iterator[None]:
    """Have images lie as eager code leaves them, for good if the block ends well. What was made for others goes."""
    before = state.images
    state.lay_images(False)
    if before:
        memory.forget_all()
    try:
        yield
    except BaseException:
        state.lay_images(before)  # that was not it
        if before:
            memory.forget_all()
        raise
    state.known.keep_images_as_eager()
    if before:
        state.report.note(
            f"images lie between blocks as eager code leaves them, because some code asks for it: {reason}"
        )
