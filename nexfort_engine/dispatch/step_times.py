# SPDX-License-Identifier: Apache-2.0
"""Pace: how long steps take compiled and eager, and whether compiled ones are slower than they may be.

Steps are alike that have the same sizes, batch and weights. The last ten of each kind are compared with what eager code
was seen to take: by a verification, or in steps that ran eager for another reason. None is run for this. Times are
those of a device's own events, read at a later step when they are there: nobody waits for a device here.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

STEPS = 10  # that are compared
MORE = 0.03  # of eager's time
LEAST_EAGER = 3  # steps that ran eager by chance; one verification will do, which takes the faster of two
_MOST_KINDS = 32
_MOST_WAITING = 16  # steps whose events are not there yet
_MOST_TOLD = 64  # changes of mind, in the life of one network

# what has been seconds from the beginning to the end, once that is known
Lap = Callable[[], "float | None"]


def begin(device: torch.device) -> Callable[[], Lap] | None:
    """Begin a step on a device; call what comes back at its end. None where nothing can be timed."""
    if device.type != "cuda":
        began = time.perf_counter()
        return lambda: _known(time.perf_counter() - began)
    if torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(device)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record(stream)

    def end() -> Lap:
        last.record(stream)
        return lambda: first.elapsed_time(last) / 1e3 if last.query() else None

    return end


def _known(seconds: float) -> Lap:
    return lambda: seconds


def middle(times: Sequence[float]) -> tuple[float, float]:
    """The median of times, and how far the middle half of them is spread."""
    ordered, count = sorted(times), len(times)
    quarter = count // 4
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2, ordered[count - 1 - quarter] - ordered[quarter]


def is_slower(ours: Sequence[float], eager: Sequence[float]) -> bool:
    """Whether ten steps or more take longer than eager ones: by 3 % and by more than both are spread."""
    if len(ours) < STEPS or not eager:
        return False
    (mine, spread), (theirs, more) = middle(ours), middle(eager)
    return mine > (1 + MORE) * theirs and mine - theirs > max(spread, more)


class _Times:
    """The last steps of one kind."""

    def __init__(self) -> None:
        self.ours: deque[float] = deque(maxlen=STEPS)
        self.eager: deque[float] = deque(maxlen=STEPS)
        self.source = ""  # of eager's
        self.is_slower = False
        self.facts: Any = None  # of our last one


class Pace:
    """The steps of one network. Used by any thread."""

    def __init__(self, tell: Callable[[dict[str, Any]], None], why: Callable[[Any], str]) -> None:
        """tell: is given a row when compiled steps become slower than eager's, and when they no longer are.

        why: a likely reason, in plain words, for the facts of a step.
        """
        self._tell, self._why = tell, why
        self._lock = threading.Lock()
        self._kinds: OrderedDict[Hashable, _Times] = OrderedDict()  # the one seen longest ago first
        self._waiting: deque[tuple[Lap, Hashable, str, Any]] = deque()
        self._told = 0

    def ran(self, lap: Lap, kind: Hashable, facts: Any) -> None:
        """A compiled step of a kind ended. facts: what `why` is asked with."""
        self._ended(lap, kind, "", facts)

    def ran_eager(self, lap: Lap, kind: Hashable, source: str) -> None:
        """A step of a kind ran eager, for a reason of its own: `source` says which."""
        self._ended(lap, kind, source, None)

    def verified(self, seconds: float, kind: Hashable) -> None:
        """A verification saw eager take so long for a kind of step; that counts more than what was seen by chance."""
        with self._lock:
            times = self._times(kind)
            times.eager.clear()
            times.eager.append(seconds)
            times.source = "verification"
            self._compare(kind, times)

    def read(self) -> None:
        """Read the times that are there by now."""
        with self._lock:
            while self._waiting:
                lap, kind, source, facts = self._waiting[0]
                seconds = lap()
                if seconds is None and len(self._waiting) <= _MOST_WAITING:
                    return
                self._waiting.popleft()
                if seconds is not None:
                    self._add(kind, seconds, source, facts)

    def _ended(self, lap: Lap, kind: Hashable, source: str, facts: Any) -> None:
        with self._lock:
            self._waiting.append((lap, kind, source, facts))
        self.read()

    def _times(self, kind: Hashable) -> _Times:
        times = self._kinds.setdefault(kind, _Times())
        self._kinds.move_to_end(kind)
        while len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        return times

    def _add(self, kind: Hashable, seconds: float, source: str, facts: Any) -> None:
        times = self._times(kind)
        if not source:
            times.ours.append(seconds)
            times.facts = facts
        elif times.source != "verification":
            times.source = source
            times.eager.append(seconds)
        self._compare(kind, times)

    def _compare(self, kind: Hashable, times: _Times) -> None:
        enough = len(times.eager) >= (1 if times.source == "verification" else LEAST_EAGER)
        now = enough and is_slower(times.ours, times.eager)
        if now == times.is_slower or self._told >= _MOST_TOLD:
            return
        times.is_slower, self._told = now, self._told + 1
        (ours, spread), (eager, more) = middle(times.ours), middle(times.eager)
        self._tell(
            {
                "sizes": sizes_of(kind), "slower": now, "compiled_ms": ours * 1e3, "eager_ms": eager * 1e3,
                "spread_ms": max(spread, more) * 1e3, "source": times.source,
                "reason": self._why(times.facts) if now else "",
            }
        )  # fmt: skip


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any], *besides: Hashable) -> tuple[Any, ...]:
    """A kind of step: the sizes and types of what it is called with, and besides what else has to be the same."""
    given = (*args, *kwargs.values()) if kwargs else args
    return (tuple([(_shape_of(t), t.dtype) for t in given if isinstance(t, torch.Tensor)]), *besides)


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of a tensor; of one that has no shape, such as a nested tensor, its rank."""
    try:
        return tensor.shape
    except RuntimeError:
        return (tensor.dim(),)


def sizes_of(kind: Any) -> list[list[int]]:
    """The sizes in a kind that `kind_of` made, as JSON holds them."""
    rows = kind[0] if isinstance(kind, tuple) and kind and isinstance(kind[0], tuple) else ()
    return [list(shape) for shape, _ in rows]
