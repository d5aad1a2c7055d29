# SPDX-License-Identifier: Apache-2.0
"""Promise: that compiled steps are no slower than eager ones, and what is known of one engine's steps about it.

step_times.py compares times; here is what steps are told apart by, which of them say something, and what likely made a
step slow. Eager's time comes from verifications, from steps that ran while artefacts were made beside them, and from
runs without Nexfort that its user asked for. No step is run for it. How much faster steps are is in speed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.engine_state import EngineState
from ..runtime.forward_context import ForwardContext
from .speed import BYPASSED, FIRST_STEPS, Speed, compiles_now
from .step_times import Lap, Pace, begin, kind_of

WITHOUT = "a run without Nexfort"
BEFORE = "steps before it was compiled"
_FETCHED = "weights are fetched for each call, as with dynamic VRAM or a LoRA on quantised weights"
_OTHERS = "code of others runs inside its blocks"
_NO_GRAPH = "no CUDA graph"
_UNKNOWN = "its compiled code is slower, or something else used the device"


@dataclass(frozen=True)
class Facts:
    """What was seen of one compiled step."""

    ran_eager: bool
    fetched: bool
    others: bool
    replayed: bool


@dataclass(frozen=True)
class Timed:
    """A step that ended. alone: whether nothing was compiled when it began."""

    lap: Lap
    alone: bool


class Promise:
    """The watch on one engine's steps."""

    def __init__(self, state: EngineState, *, graphs: bool) -> None:
        """graphs: steps may be CUDA graphs."""
        self._state, self._graphs = state, graphs
        self.pace = Pace(state.report.pace, self.likely_reason)
        self.speed = Speed(state, self.likely_reason)

    def without(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step that its user wants eager, which shows how long eager takes."""
        ends = _begin(args, kwargs)
        result = plain(*args, **kwargs)
        if ends is not None:
            kind, step = self._kind(args, kwargs), ends()
            lap = self.speed.timed(step.lap, (args, kwargs), kind[-1], BYPASSED, alone=step.alone)
            self.pace.ran_eager(lap, kind, WITHOUT)
        return result

    def begin(self, args: Any, kwargs: Any, session: ForwardContext) -> Callable[[], Timed] | None:
        """A step of a session begins; None where its time is nobody's matter."""
        return _begin(args, kwargs) if session.calls.engine is not None else None

    def ended(self, step: Timed, session: ForwardContext) -> None:
        """It ended. Its time is kept if it says something: a step that made artefacts says nothing."""
        missing, trace, replayed = session.missing, session.trace, session.outcome.replayed
        if session.calls.engine is None or session.planning.planned or missing.uncompiled:
            return
        given = session.calls.engine[1:]
        kind = self._kind(*given)
        if replayed or (trace.used and not missing.made_beside):
            facts = Facts(trace.ran_eager, trace.fetched, trace.others, replayed)
            lap = self.speed.timed(step.lap, given, kind[-1], facts=facts, alone=step.alone)
            self.pace.ran(lap, kind, facts)
        elif missing.made_beside and not trace.used:
            lap = self.speed.timed(step.lap, given, kind[-1], FIRST_STEPS, alone=step.alone)
            self.pace.ran_eager(lap, kind, BEFORE)

    def verified(self, told: Mapping[str, Any] | None, session: ForwardContext) -> None:
        """A step like this one was compared with eager, if it could be."""
        if told is not None and session.calls.engine is not None:
            given, seconds = session.calls.engine[1:], told["eager_ms"] / 1e3
            kind = self._kind(*given)
            self.pace.verified(seconds, kind)
            self.speed.verified(seconds, given, kind[-1])

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What steps have in common that should take the same time: sizes, batch, weights, and last code of others."""
        mappings = [value for value in (*args, *kwargs.values()) if isinstance(value, dict)]
        return kind_of(args, kwargs, self._state.version(), self._state.unquiet(mappings))

    def likely_reason(self, facts: Facts | None) -> str:
        """Why a step may be slower than eager, by what was seen of the last one."""
        found, told = list[str](), self._state.report.as_dict()
        if facts is not None:
            if facts.ran_eager:
                blocks = len({row["region"] for row in told["eager"]})
                many = f"{blocks} of its blocks run" if blocks != 1 else "one of its blocks runs"
                found.append(f"{many} uncompiled")
            found += [_FETCHED] if facts.fetched else []
            found += [_OTHERS] if facts.others else []
        if self._graphs and torch.cuda.is_available() and not (facts and facts.replayed):
            notes = [note for note in told["notes"] if note.startswith(_NO_GRAPH)]
            found.append(notes[-1] if notes else _NO_GRAPH)
        return "; ".join(found) or _UNKNOWN


def _begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Timed] | None:
    ends, alone = begin(_device(args, kwargs)), not compiles_now()
    return None if ends is None else lambda: Timed(ends(), alone)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where a step runs, as far as its arguments say."""
    given = (*args, *kwargs.values()) if kwargs else args
    return next((value.device for value in given if isinstance(value, torch.Tensor)), torch.device("cpu"))
