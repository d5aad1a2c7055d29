# SPDX-License-Identifier: Apache-2.0
"""Handover: when steps that run eager beside the making of their artefacts give way to compiled ones.

A picture is all of one kind: where its first step lacks something, each of its steps runs eager to its end, also those
that begin when all is there. Once what was begun is made, such steps look for it: what still lacks is made too, and the
next picture finds all. The host says what a picture is (`HostHooks.picture`); without a host that does, each call
is one. Only a picture whose remaining steps would take long is taken over in its middle, and the report says so.

A picture of a few seconds is not slowed down by what it lacks: that is planned and begun in its last step. A longer one
begins with it as soon as two of its steps behind the first took long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from ..dispatch.fallback import is_repeatable
from ..runtime.engine_state import EngineState, Picture
from ..runtime.fault_attribution import HalfDone
from ..runtime.forward_context import ForwardContext
from .background import Background

LONG = 30.0  # seconds that the remaining steps of a picture would take eager
SHORT = 5.0  # the same, up to which making artefacts is put off to its end
_WITHIN = "compiled code took over within a picture, after step {} of {}: the rest would have taken {:.0f} s uncompiled"
_MIXED = "what a step lacks is being made: all of its picture runs uncompiled"


class Handover:
    """Which steps of one engine are held eager."""

    def __init__(self, state: EngineState, background: Background | None) -> None:
        """background: what makes artefacts beside the steps; None where steps wait for them."""
        self._state, self._background = state, background
        self._name: Callable[[], object] = lambda: None  # of the picture of the last step
        self._is_eager = self._has_all = False  # that picture is; what its steps need is there
        self._began = 0.0  # since when its steps are timed
        self._steps = self._calls = 0  # of it, and how many calls of it have begun
        self._last = self._least = 0.0  # when its last call began; seconds of the shortest one
        self._puts_off = False  # what it lacks is not planned yet
        self._owes = False  # a picture put that off, and has not come to it so far

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any], session: ForwardContext) -> None:
        """A step begins: it is held where its picture is eager."""
        if self._background is None:
            return
        picture = self._state.picture(args, kwargs)
        if picture is None or self._name() is not picture.name:
            self._name, self._is_eager, self._has_all = _name_of(picture), False, False
            self._puts_off, self._calls, self._steps = False, 1, picture.steps if picture is not None else 0
            self._least = math.inf
            session.missing.note_picture(begins=picture is not None)
            return
        self._calls += 1
        if self._is_eager and not self._takes_over(picture):
            if self._puts_off and self._is_due(picture.steps):
                self._puts_off = self._owes = False
            self._hold(session, looks=not (self._puts_off or self._has_all or self._background.busy))

    def puts_off(self, session: ForwardContext) -> bool:
        """Whether what a step lacks is planned and begun in a later step of its picture.

        Not where the last picture that put it off ended before it came to it.
        """
        if session.missing.begins_picture and SHORT and self._steps > 1:
            self._puts_off = self._owes = session.missing.note_made_beside(not self._owes)
        return self._puts_off

    def _is_due(self, steps: int) -> bool:
        """Whether this is the picture's last step, or the rest takes longer than is put off.

        Calls are counted, which costs nothing: asking how many steps have ended waits for the device. Where a step has
        several calls, the last one comes early.
        """
        now, before = time.perf_counter(), self._last
        self._last = now
        if self._calls >= steps:
            return True
        if self._calls > 2:
            self._least = min(self._least, now - before)
        # the first one fetches the weights, and kernels may be loaded in the second
        return self._calls > 3 and self._least * (steps - self._calls) > SHORT

    def ended(self, session: ForwardContext) -> None:
        """A step ended."""
        self._has_all |= session.missing.only_looked_for and not session.missing.made_beside

    def lacked(self, session: ForwardContext) -> None:
        """A region has no artefact in a step. In the first of a picture that decides of what kind the picture is.

        Raises HalfDone where the step begins anew: regions before it ran compiled, or the step is observed, which
        costs time and memory that a step without a graph need not pay.
        """
        if not session.missing.made_beside:
            return
        begins = session.missing.begins_picture
        if begins and not self._is_eager:
            self._is_eager, self._began = True, time.perf_counter()
        anew = session.observation.watching is not None or (begins and session.trace.used)
        if anew and is_repeatable(self._state, session):
            self._hold(session)
            raise HalfDone(_MIXED)

    def _hold(self, session: ForwardContext, *, looks: bool = False) -> None:
        session.hold(looks=looks)
        self._state.hold_twice()  # eager code asks the host for all weights

    def _takes_over(self, picture: Picture) -> bool:
        """Whether all is there, and the picture's remaining steps would take too long to wait for its end."""
        took = time.perf_counter() - self._began
        if not self._has_all or took * picture.steps < LONG or (ended := picture.ended()) < 1:
            return False
        left = took / ended * (picture.steps - ended)
        if left < LONG:
            return False
        self._is_eager = False
        self._state.report.note(_WITHIN.format(ended, picture.steps, left))
        return True


def _name_of(picture: Picture | None) -> Callable[[], object]:
    return picture.reference() if picture is not None else lambda: None
