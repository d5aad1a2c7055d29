# SPDX-License-Identifier: Apache-2.0
"""Remedies: what is changed after a step failed, so that it may be run again, and when it may.

A step is run again only on what it was given, and where nobody else has seen a part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from ..cudagraphs.host_constants import tensors_in
from ..cudagraphs.memory_budget import no_memory
from ..modules.channels_last import is_of_order
from ..reporting.report import named
from ..runtime.fault_attribution import HalfDone

if TYPE_CHECKING:
    from ..reporting.report import Report
    from ..runtime.forward_context import Session
    from ..runtime.shared_state import Known
    from .region import Region


class Mended(Protocol):
    """What is asked of the engine whose step failed, and what is changed of it."""

    images: bool
    keeps: bool
    known: Known
    report: Report

    @property
    def regions(self) -> list[Region]:
        """All of them."""

    def release(self) -> bool:
        """Give back what is held of the device. Whether there was any."""

    def repeatable(self, session: Session) -> bool:
        """Whether a step may be run again on what it was given."""


def remedy(engine: Mended, error: BaseException, session: Session) -> contextlib.AbstractContextManager[Any] | None:
    """In what a step that failed is run again, where that may help."""
    assert session.root is not None, "it failed in the backbone"
    if session.images and is_of_order(error):
        again: Any = without_images(engine, named(error))
    elif isinstance(error, HalfDone):
        again = contextlib.nullcontext()
    # the host has remedies of its own, and gets the error once nothing is held that could have been its cause
    elif no_memory(error) and engine.release():
        engine.keeps, again = False, contextlib.nullcontext()
    else:
        return None
    if not engine.repeatable(session):
        if session.images and is_of_order(error) and not isinstance(error, AssertionError):
            with again:  # it is the next step that it helps
                pass
        return None
    if no_memory(error):
        engine.report.note("memory was short: what was held between steps was given back, and the step run again")
    return again


@contextlib.contextmanager
def without_images(engine: Mended, reason: str) -> Iterator[None]:
    """Have images lie as eager code leaves them, for good if the block ends well. What was made for others goes."""
    before, engine.images = engine.images, False
    if before:
        _forget(engine)
    try:
        yield
    except BaseException:
        engine.images = before  # that was not it
        if before:
            _forget(engine)
        raise
    engine.known.images = False
    if before:
        engine.report.note(
            f"images lie between blocks as eager code leaves them, because some code asks for it: {reason}"
        )


def _forget(engine: Mended) -> None:
    engine.release()
    for region in engine.regions:
        region.forget()


def written_to(values: Any) -> list[int]:
    """How often each tensor of a call was written to; inference tensors do not tell."""
    return [tensor._version for tensor in tensors_in(values) if not tensor.is_inference()]
