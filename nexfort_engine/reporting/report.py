# SPDX-License-Identifier: Apache-2.0
"""What happened: regions, artefacts, variants, blocks that ran eager, times.

Plain data behind one lock, written by any thread. It decides nothing and logs nothing. Everything it keeps
only ever grows, so a mark is a set of positions and `since` is exact however many threads write meanwhile.
"""

from __future__ import annotations

import math
import os
import threading
import traceback
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .speed import current, headline

if TYPE_CHECKING:
    from ..config.compile_config import CompileConfig

MOST_REASONS = 64  # that are kept of one region
MOST_SPEEDS = 32  # kinds of steps
MORE_REASONS = "and for more reasons, which are not kept"
_LISTS = ("regions", "artefacts", "variants", "eager", "notes", "precision", "verifications", "pace")


def first_line(error: BaseException, most: int = 300) -> str:
    """What an error says, short enough for a report."""
    return (str(error).strip().splitlines() or [""])[0][:most]


def named(error: BaseException) -> str:
    """An error's class and what it says, for a report; of one that says nothing where it was raised."""
    said = first_line(error)
    if said or error.__traceback__ is None:
        return f"{type(error).__name__}: {said}" if said else type(error).__name__
    *_, last = traceback.walk_tb(error.__traceback__)
    code = last[0].f_code
    return f"{type(error).__name__} without a word, in {code.co_name} of {os.path.basename(code.co_filename)}"


@dataclass(frozen=True)
class Mark:
    """A point in the life of one report. Opaque: hand it to `Report.since`."""

    owner: str
    lengths: tuple[int, ...]
    calls: int
    nanoseconds: int
    made: int


class Report:
    """Thread-safe record of what the engine did for one root module.

    `str(report)` is for people, `as_dict()` for programs, `since(mark)` for "nothing new was compiled". Times are in
    seconds, but for those whose name ends in `_ms`; distances are norms of differences over those of the reference.

    >>> report = Report()
    >>> mark = report.mark()
    >>> report.note("a word to the user")
    >>> report.since(mark)["notes"], report.as_dict()["calls"]
    (['a word to the user'], 0)
    """

    def __init__(self, config: CompileConfig | None = None, cache_dir: str = "") -> None:
        self._lock = threading.Lock()
        self._id = uuid.uuid4().hex
        self._cache_dir = str(cache_dir)
        self._config: dict[str, object] = config.as_dict() if config is not None else {}
        self._inactive: list[dict[str, str]] = config.inactive() if config is not None else []
        self._rows: dict[str, list[Any]] = {name: [] for name in _LISTS}
        self._seen: dict[str, set[tuple[str, ...]]] = {name: set() for name in _LISTS}
        self._reasons: Counter[tuple[str, str]] = Counter()  # of each list and region
        self._models: list[str] = []
        self._unsaved: str | None = None
        self._speed: dict[str, dict[str, Any]] = {}  # by the kind of step, the one that ran last at the end
        self._calls = 0
        self._made_ns = 0  # on the clock, while artefacts were made
        self._making = 0  # threads that make artefacts beside the steps
        self._call_ns = 0  # whole nanoseconds, so that a difference of two sums has no rounding in it

    @property
    def cache_dir(self) -> str:
        """Where this model's artefacts live; set once the store is open."""
        with self._lock:
            return self._cache_dir

    @cache_dir.setter
    def cache_dir(self, path: object) -> None:
        with self._lock:
            self._cache_dir = str(path)

    def region(self, name: str, *, kind: str, key: str) -> None:
        """Register a region: `name` its dotted path, `kind` its class, `key` its artefact's. Once each."""
        self._add_once("regions", {"name": name, "kind": kind, "key": key})

    def loaded(self, region: str, key: str, seconds: float) -> None:
        """An artefact came from disk for `region`."""
        self._add_artefact(region, key, seconds, "loaded")

    def compiled(self, region: str, key: str, seconds: float) -> None:
        """An artefact was captured and lowered for `region`; `seconds` is the work of both, beside that of others."""
        self._add_artefact(region, key, seconds, "compiled")

    def variant(self, region: str, reason: str) -> None:
        """`region` got a further artefact, because of `reason`. Kept once for the same region and reason."""
        self._add_reason("variants", region, reason)

    def eager(self, region: str, reason: str) -> None:
        """`region` ran eager, because of `reason`. Kept once for the same region and reason, and not without end."""
        self._add_reason("eager", region, reason)

    def precision(self, region: str, products: list[dict[str, Any]], attention: Sequence[dict[str, Any]] = ()) -> None:
        """What of `region` is computed in 8 bits and why the rest is not. Once a region.

        products, attention: as passes/low_precision.py and passes/low_precision_attention.py tell them.
        """
        row = {"region": region, "products": [dict(p) for p in products], "attention": [dict(a) for a in attention]}
        with self._lock:
            self._append_once("precision", (region,), row)

    def inactive(self, token: str, reason: str) -> None:
        """What of the config has no effect on this network, besides what has none on any."""
        row = {"token": token, "reason": reason}
        with self._lock:
            self._inactive += [row] if row not in self._inactive else []

    def call(self, seconds: float) -> None:
        """One call of the root module took `seconds`."""
        with self._lock:
            self._calls += 1
            self._call_ns += round(seconds * 1e9)

    def made(self, seconds: float) -> None:
        """Artefacts were made, several at once or not, in `seconds` on the clock."""
        with self._lock:
            self._made_ns += round(seconds * 1e9)

    def making(self, begins: bool) -> None:
        """A thread begins to make artefacts beside the steps, or has ended."""
        with self._lock:
            self._making += 1 if begins else -1

    @property
    def is_making(self) -> bool:
        """Whether artefacts are being made beside the steps now."""
        return self._making > 0

    def note(self, text: str) -> None:
        """Anything else a user should know. The same text is kept once."""
        with self._lock:
            self._append_once("notes", (text,), text)

    def unsaved(self, reason: str | None) -> None:
        """Why the cache cannot be written, so that what is compiled goes with the process; None: it can be again."""
        with self._lock:
            self._unsaved = reason
            if reason is not None:
                self._append_once("notes", (reason,), f"artefacts last only as long as this process: {reason}")

    def verified(self, result: Mapping[str, Any]) -> None:
        """A step was compared with eager; `result` is as dispatch/verify.py makes it."""
        with self._lock:
            self._rows["verifications"].append(dict(result))

    def pace(self, row: Mapping[str, Any]) -> None:
        """Steps of some sizes became slower than eager's, or no longer are; `row` is as dispatch/step_times.py makes
        it."""
        with self._lock:
            self._rows["pace"].append(dict(row))

    def speed(self, key: str, row: Mapping[str, Any]) -> None:
        """How long a kind of step takes, as cache/speed_record.py has it; in the place of what was told before."""
        with self._lock:
            self._speed.pop(key, None)
            self._speed[key] = {"key": key, **row}
            while len(self._speed) > MOST_SPEEDS:
                del self._speed[next(iter(self._speed))]

    def of_model(self, key: str) -> None:
        """The key under which the backbone's artefacts are noted."""
        with self._lock:
            self._models += [key] if key not in self._models else []

    @property
    def models(self) -> list[str]:
        """The keys of the backbone, one for each kind of device that it ran on."""
        with self._lock:
            return list(self._models)

    @property
    def last_speed(self) -> Mapping[str, Any] | None:
        """The row on the kind of step that ran last."""
        with self._lock:
            return next(reversed(self._speed.values()), None)

    @property
    def seconds_cold(self) -> float:
        """Seconds on the clock in which artefacts were made."""
        return self._made_ns / 1e9

    @property
    def count_compiled(self) -> int:
        """How many artefacts were compiled."""
        with self._lock:
            return sum(row["source"] == "compiled" for row in self._rows["artefacts"])

    @property
    def paced(self) -> int:
        """How often steps became slower than eager's, or no longer were."""
        return len(self._rows["pace"])

    @property
    def verifications(self) -> int:
        """How many steps were compared with eager."""
        with self._lock:
            return len(self._rows["verifications"])

    @property
    def calls(self) -> int:
        """How many calls of the backbone have ended."""
        return self._calls

    def mark(self) -> Mark:
        """This moment, for `since`."""
        with self._lock:
            return Mark(
                self._id, tuple(len(self._rows[name]) for name in _LISTS), self._calls, self._call_ns, self._made_ns
            )

    def since(self, mark: Mark) -> dict[str, Any]:
        """`as_dict` of only what is new after `mark`: new rows, and counts and seconds as differences.

        A region, variant, reason or note known before the mark is not new when it happens again.
        """
        if mark.owner != self._id:
            raise ValueError("the mark belongs to another report; expected one made by mark() of this report")
        with self._lock:
            return self._collect(mark)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data that JSON can hold.

        `compiling_beside`: artefacts are being made beside the steps now, which run eager meanwhile. `unsaved`: why
        something that was compiled could not be written to the cache, or None.
        `seconds_cold` is the time on the clock in which artefacts were captured and lowered, several at once;
        `seconds_warm` adds up the loading of each. The seconds of each artefact are those of its own work.
        """
        with self._lock:
            return self._collect(Mark(self._id, (0,) * len(_LISTS), 0, 0, 0))

    def __str__(self) -> str:
        data = self.as_dict()
        kinds = {row["kind"] for row in data["regions"]}
        head = (
            f"Nexfort {data['config'].get('mode', '')}: {_count(len(data['regions']), 'region')} of "
            f"{_count(len(kinds), 'kind')}, {_count(data['calls'], 'call')}"
        )
        made = (
            f"  artefacts: {data['artefacts_loaded']} loaded in {data['seconds_warm']:.1f} s, "
            f"{data['artefacts_compiled']} compiled in {data['seconds_cold']:.1f} s"
        )
        speed = current(data)
        lines = [head.replace(" :", ":")]
        lines += [f"  {headline(speed)}"] if speed is not None and speed["compiled"] else []
        lines.append(made)
        if data["cache_dir"]:
            lines.append(f"  cache: {data['cache_dir']}")
        lines += ["  compiling in the background; steps run eager meanwhile"] if data["compiling_beside"] else []
        lines += [f"  variant: {row['region']}: {row['reason']}" for row in data["variants"]]
        lines += [f"  eager: {row['region']}: {row['reason']}" for row in data["eager"]]
        lines += [f"  not active: {row['token']}: {row['reason']}" for row in data["inactive"]]
        lines += [f"  note: {text}" for text in data["notes"]]
        lines += [_precision_line(data["precision"])] if data["precision"] else []
        lines += [_verified_line(row) for row in data["verifications"][-1:]]
        lines += [_slower_line(row) for row in slower(data["pace"])]
        return "\n".join(lines)

    def __repr__(self) -> str:
        data = self.as_dict()
        return (
            f"<Report regions={len(data['regions'])} loaded={data['artefacts_loaded']} "
            f"compiled={data['artefacts_compiled']} eager={len(data['eager'])} calls={data['calls']}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        # A lock can be neither copied nor pickled, and hosts deep-copy what hangs on a model.
        with self._lock:
            state = dict(self.__dict__)
            state["_rows"] = {name: list(rows) for name, rows in self._rows.items()}
            state["_seen"] = {name: set(keys) for name, keys in self._seen.items()}
            state["_reasons"] = Counter(self._reasons)
            state["_speed"] = dict(self._speed)
        del state["_lock"]
        state["_making"] = 0  # the threads are the original's
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._id = uuid.uuid4().hex  # the copy goes its own way, so marks of the original do not fit it

    def _add_artefact(self, region: str, key: str, seconds: float, source: str) -> None:
        row = {"region": region, "key": key, "seconds": float(seconds), "source": source}
        with self._lock:
            self._rows["artefacts"].append(row)

    def _add_once(self, name: str, row: dict[str, str]) -> None:
        with self._lock:
            self._append_once(name, tuple(row.values()), row)

    def _add_reason(self, name: str, region: str, reason: str) -> None:
        """A reason may name a size, so there may be as many as sizes."""
        with self._lock:
            if (region, reason) in self._seen[name] or self._reasons[name, region] > MOST_REASONS:
                return
            self._reasons[name, region] += 1
            told = reason if self._reasons[name, region] <= MOST_REASONS else MORE_REASONS
            self._append_once(name, (region, told), {"region": region, "reason": told})

    def _append_once(self, name: str, identity: tuple[str, ...], row: object) -> None:
        if identity not in self._seen[name]:
            self._seen[name].add(identity)
            self._rows[name].append(row)

    def _collect(self, start: Mark) -> dict[str, Any]:
        new = {
            name: [dict(row) if isinstance(row, dict) else row for row in self._rows[name][length:]]
            for name, length in zip(_LISTS, start.lengths, strict=True)
        }
        loaded = [row["seconds"] for row in new["artefacts"] if row["source"] == "loaded"]
        compiled = [row for row in new["artefacts"] if row["source"] == "compiled"]
        return {
            "regions": new["regions"],
            "artefacts_loaded": len(loaded),
            "artefacts_compiled": len(compiled),
            "artefacts": new["artefacts"],
            "variants": new["variants"],
            "eager": new["eager"],
            "compiling_beside": self._making > 0,
            "seconds_cold": (self._made_ns - start.made) / 1e9,
            "seconds_warm": math.fsum(loaded),
            "calls": self._calls - start.calls,
            "seconds_calls": (self._call_ns - start.nanoseconds) / 1e9,
            "cache_dir": self._cache_dir,
            "config": _copied(self._config),
            "inactive": [dict(row) for row in self._inactive],
            "notes": new["notes"],
            "unsaved": self._unsaved,
            "precision": new["precision"],
            "verifications": new["verifications"],
            "pace": new["pace"],
            "speed": [dict(row) for row in self._speed.values()],
        }


def counted(plan: list[dict[str, Any]]) -> tuple[int, int]:
    """How many rows of a plan (products or attention) are computed in 8 bits, and how many there are."""
    narrow = sum(row["count"] for row in plan if row["reason"] is None)
    return narrow, sum(row["count"] for row in plan)


def type_of(products: list[dict[str, Any]]) -> str:
    """What products of a plan are computed in: fp8 or int8."""
    return next((row["type"] for row in products if "type" in row), "fp8")


def _precision_line(rows: list[dict[str, Any]]) -> str:
    narrow, count = counted([product for row in rows for product in row["products"]])
    name = type_of([product for row in rows for product in row["products"]])
    line = f"  precision: {narrow} of {_count(count, 'product')} in {name}"
    narrow, count = counted([one for row in rows for one in row["attention"]])
    return f"{line}, {narrow} of {_count(count, 'attention')} in 8 bits" if narrow else line


def _verified_line(row: Mapping[str, Any]) -> str:
    over = sum(one["over"] for one in row["regions"])
    apart = "far" if row["distance"] is None else f"{row['distance']:.1e}"
    return (
        f"  verified: a step takes {row['compiled_ms']:.1f} ms, eager {row['eager_ms']:.1f} ms; its result is {apart} "
        f"from eager's; {_count(over, 'region')} over the budget"
    )


def slower(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of a report's rows on its pace that say of some sizes that steps are slower than eager's now."""
    last = {str(row["sizes"]): row for row in rows}
    return [row for row in last.values() if row["slower"]]


def _slower_line(row: Mapping[str, Any]) -> str:
    at = ", ".join("x".join(map(str, size)) for size in row["sizes"])
    return (
        f"  slower than eager: a step takes {row['compiled_ms']:.1f} ms, eager {row['eager_ms']:.1f} ms (at {at}); "
        f"{row['reason']}"
    )


def _copied(config: Mapping[str, object]) -> dict[str, object]:
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
