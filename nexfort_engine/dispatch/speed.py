# SPDX-License-Identifier: Apache-2.0
"""Speed: how many times as fast one engine's steps are, by the times of steps that ran anyway.

slowdown.py times steps and says what each was. Here they are gathered by what a user takes for the same work: model,
mode, card, sizes, batch and the set of LoRAs. The length of a prompt is not among it. Nothing is told of fewer than
three steps. The first ones of a kind, which load and capture, do not count, and neither does any beside which
something is compiled. cache/speed_record.py keeps the last times on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cache import speed_record
from ..cache.key import primary_key
from ..capture.types import LOCK
from ..modules.tree import structure
from ..reporting.report import Mark
from ..reporting.resource_shortages import begun
from ..reporting.speed import is_slower, run_line
from ..runtime.engine_state import EngineState
from ..runtime.lru_mapping import Recent
from .step_times import Lap, middle

log = logging.getLogger("nexfort")

LEAST = 3  # steps
FIRST, FIRST_EAGER = 2, 1  # steps of a kind that do not count
KEEP_EVERY = 60.0  # seconds; besides, what there is at the end of a picture is kept
_LAST = 12  # steps whose median counts
_MOST_KINDS = 64
_IMAGE = 4  # dimensions of what has a size, besides the first tensor: images and videos, but no text

VERIFIED, BYPASSED, FIRST_STEPS = "verified", "bypassed", "first"  # where uncompiled steps came from
Given = tuple[tuple[Any, ...], dict[str, Any]]


def compiles_now() -> bool:
    """Whether another thread of this process captures or has something lowered."""
    if LOCK.acquire(blocking=False):
        LOCK.release()
        return False
    return True


@dataclass(frozen=True)
class _Key:
    """Of a kind of step. known: what people want to know of it."""

    text: str
    known: dict[str, Any]


class _Kind:
    """The steps of one kind that this process saw. row: as the record has it."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self.ours: deque[float] = deque(maxlen=_LAST)
        self.eager: deque[float] = deque(maxlen=_LAST)
        self.skip, self.skip_eager = FIRST, FIRST_EAGER
        self.run: list[float] = []  # of the picture that is made
        self.changed = False
        self.more: Counter[str] = Counter()  # by how much counts of the row grew since it was kept


class Speed:
    """What is known of one engine's speed. Used by any thread."""

    def __init__(self, state: EngineState, why: Callable[[Any], str]) -> None:
        """why: a likely reason, in plain words, for a compiled step with these facts that is slower."""
        self._state, self._why = state, why
        self._lock = threading.Lock()
        self._keys: Recent[Hashable, _Key] = Recent(_MOST_KINDS)
        self._kinds: OrderedDict[str, _Kind] = OrderedDict()  # the one seen longest ago first
        self._known: dict[str, dict[str, Any]] | None = None  # what the record held
        self._model = ""
        self._kept = time.monotonic()
        self._plain: list[float] = []  # uncompiled steps of the picture that is made
        self._mark: Mark | None = None

    # -- steps -------------------------------------------------------------------------------------------

    def timed(
        self, lap: Lap, given: Given, others: str | None, source: str = "", facts: Any = None, *, alone: bool = True
    ) -> Lap:
        """A lap that counts here once it is read.

        given: what the step was called with. others: the code of others that runs in it. source: of an uncompiled step;
        "" for a compiled one, with its facts. alone: whether nothing was compiled when it began; its end is looked at
        here.
        """
        key = self._key(given, others) if alone and not compiles_now() else None
        if key is None:
            return lap

        def read() -> float | None:
            seconds = lap()
            if seconds is not None:
                self._add(key, seconds, source, facts)
            return seconds

        return read

    def verified(self, seconds: float, given: Given, others: str | None) -> None:
        """A verification saw uncompiled steps take so long."""
        key = self._key(given, others)
        if key is not None and seconds > 0:
            with self._lock:
                kind = self._kind(key)
                kind.eager.clear()
                _set_eager(kind, seconds, VERIFIED)
                self._state.report.speed(key.text, kind.row)

    def _add(self, key: _Key, seconds: float, source: str, facts: Any) -> None:
        with self._lock:
            kind = self._kind(key)
            is_known = kind.row["eager"] is not None
            if source:
                self._add_eager(kind, seconds, source)
            elif kind.skip:
                kind.skip -= 1
            else:
                self._add_ours(kind, seconds)
                # asked for once: the report is long
                kind.row["reason"] = (kind.row.get("reason") or self._why(facts)) if is_slower(kind.row) else ""
            self._state.report.speed(key.text, kind.row)
            # at once: a run without Nexfort has no end here, and its model may leave memory before the next one
            is_new = not is_known and kind.row["eager"] is not None
        if is_new or time.monotonic() - self._kept > KEEP_EVERY:
            self.keep()

    def _add_eager(self, kind: _Kind, seconds: float, source: str) -> None:
        self._plain.append(seconds)
        del self._plain[:-_LAST]
        if kind.skip_eager:
            kind.skip_eager -= 1
            return
        kind.eager.append(seconds)
        if len(kind.eager) >= LEAST:
            _set_eager(kind, middle(kind.eager)[0], source)

    @staticmethod
    def _add_ours(kind: _Kind, seconds: float) -> None:
        kind.ours.append(seconds)
        kind.run.append(seconds)
        if len(kind.ours) >= LEAST:
            kind.row |= {"compiled": middle(kind.ours)[0], "compiled_at": time.time()}
        saved = kind.row["eager"] - seconds if kind.row["eager"] is not None else 0.0
        _count(kind, steps=1, saved=saved)

    # -- pictures ----------------------------------------------------------------------------------------

    def begin_picture(self) -> None:
        """The host begins to sample."""
        with self._lock:
            self._plain.clear()
            self._mark = self._state.report.mark()

    def end_picture(self) -> str | None:
        """The host has sampled: what is told of it in one line, None where no step ran. It is kept on disk."""
        with self._lock:
            if self._mark is None:
                return None
            new, self._mark = self._state.report.since(self._mark), None
            ran = [(key, kind) for key, kind in self._kinds.items() if kind.run]
            line = _line(new, ran[-1][1] if ran else None, self._plain) if new["calls"] else None
            for key, kind in ran:
                taken, kind.run = middle(kind.run)[0] if len(kind.run) >= LEAST else None, []
                kind.row["made"] = self._state.report.seconds_cold or kind.row["made"]
                if taken is not None:
                    kind.row["recent"] = [*kind.row["recent"], [time.time(), taken]][-speed_record.RECENT :]
                _count(kind, pictures=1)
                self._state.report.speed(key, kind.row)
        self.keep()
        return line

    def keep(self) -> None:
        """Write what is new to disk, beside the steps."""
        with self._lock:
            self._kept = time.monotonic()
            found = {key: kind for key, kind in self._kinds.items() if kind.changed}
            rows = {key: dict(kind.row) for key, kind in found.items()}
            more = {key: dict(kind.more) for key, kind in found.items()}
            for kind in found.values():
                kind.changed, kind.more = False, Counter()
        if rows and (problem := begun("nexfort-speed", speed_record.write, self._state.store.root, rows, more)):
            log.debug("Nexfort: how long steps took is not kept: %s", problem)

    # -- kinds -------------------------------------------------------------------------------------------

    def _kind(self, key: _Key) -> _Kind:
        found = self._kinds.get(key.text)
        if found is None:
            if self._known is None:
                self._known, lost = speed_record.read(self._state.store.root)
                if lost:
                    self._state.report.note(lost)
            found = _Kind(self._known.get(key.text) or speed_record.blank(**key.known))
            self._kinds[key.text] = found
        self._kinds.move_to_end(key.text)
        while len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        return found

    def _key(self, given: Given, others: str | None) -> _Key | None:
        """Of a step's kind; None where nobody can say which weights it runs on."""
        with self._lock:
            return self._found(given, others)

    def _found(self, given: Given, others: str | None) -> _Key | None:
        weights = self._state.hooks.weights_name()
        tensors = _sized(given)
        if weights is None or not tensors:
            return None
        sizes = [list(tensor.shape) for tensor in tensors]
        device, dtype = tensors[0].device, str(tensors[0].dtype)
        signature = (tuple(map(tuple, sizes)), device, dtype, weights, others)
        found = self._keys.get(signature)
        if found is None:
            self._model = self._model or primary_key(
                {"structure": structure(self._state.root, besides=self._state.besides)}
            )
            card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            parts = {"model": self._model, "mode": self._state.config.as_dict(), "device": card, "sizes": sizes}
            told = {"model": self._state.name, "mode": self._state.config.mode, "device": card, "sizes": sizes}
            more = {"dtype": dtype, "weights": weights, "others": others, "torch": torch.__version__}
            found = self._keys[signature] = _Key(primary_key({**parts, **more}), told)
        return found


def _sized(given: Given) -> list[torch.Tensor]:
    """The tensors that a step's size is in: the first one, and what else is an image or a video."""
    found = list[torch.Tensor]()
    for value in (*given[0], *given[1].values()):
        several = value if isinstance(value, (list, tuple)) else (value,)
        tensors = [one for one in several if isinstance(one, torch.Tensor)]
        found += [tensor for tensor in tensors if not found or tensor.ndim >= _IMAGE]
    return found


def _set_eager(kind: _Kind, seconds: float, source: str) -> None:
    kind.row |= {"eager": seconds, "eager_at": time.time(), "source": source}
    kind.changed = True


def _count(kind: _Kind, **numbers: float) -> None:
    for name, number in numbers.items():
        kind.row[name] += number
        kind.more[name] += number  # type: ignore[assignment]
    kind.changed = True


def _line(new: Mapping[str, Any], last: _Kind | None, plain: Sequence[float]) -> str:
    """The line of a picture. last: the kind of compiled step that ran last in it. plain: its uncompiled steps."""
    seen = last.run if last is not None else plain
    taken = middle(seen)[0] if len(seen) >= LEAST else last.row["compiled"] if last is not None else None
    made = (new["artefacts_compiled"], new["artefacts_loaded"])
    return run_line(new["calls"], last.row if last is not None else None, taken, made, last is None and bool(plain))
