# SPDX-License-Identifier: Apache-2.0
"""What a demo measured, as one table for people, one JSON file for programs, and a list of promises that did not hold.

Nothing is measured here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

# The walk that every demo takes, and how far the result may be from eager's (they run in float32).
SIZES = [(384, 384), (512, 384), (384, 512), (448, 320)]
STEPS = 12
TOLERANCE = 1e-4


@dataclass
class Stop:
    """One resolution of the walk. Steps are without the first, which compiles or loads."""

    size: tuple[int, int]
    eager_ms: float = 0.0
    compiled_ms: float = 0.0
    error: float = 0.0
    artefacts_compiled: int = 0


@dataclass
class Outcome:
    """All that a demo found out. `moved`: how far another prompt moves the eager result, to read the errors by."""

    host: str
    model: str
    device: str
    stops: list[Stop] = field(default_factory=list)
    cold_first_step: float = 0.0
    warm_first_step: float = 0.0
    warm_compiled: int = 0
    warm_loaded: int = 0
    same_bits: bool = False
    moved: float = 0.0
    images: list[str] = field(default_factory=list)
    reports: dict[str, Any] = field(default_factory=dict)

    def table(self) -> str:
        """The one table, aligned for a terminal."""
        first = [f"{self.cold_first_step:.2f}"], [f"{self.warm_first_step:.2f}"]
        rows = [
            ["", *[f"{width}x{height}" for width, height in (stop.size for stop in self.stops)]],
            ["eager, ms a step", *[f"{stop.eager_ms:.1f}" for stop in self.stops]],
            ["compiled, ms a step", *[f"{stop.compiled_ms:.1f}" for stop in self.stops]],
            ["error to eager", *[f"{stop.error:.1e}" for stop in self.stops]],
            ["artefacts compiled", *[str(stop.artefacts_compiled) for stop in self.stops]],
            ["first step, cold cache, s", *first[0]],
            ["first step, second process, s", *first[1]],
        ]
        widths = [max(len(row[i]) for row in rows if len(row) > i) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(widths[0]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(row))
            for row in rows
        ]
        head = f"{self.model} in {self.host}, {STEPS} steps, {self.device}"
        lines.insert(1, "-" * max(len(line) for line in lines))
        return "\n".join([head, "", *lines])

    def notes(self) -> list[str]:
        """What the table does not show, in sentences."""
        return [
            f"The second process compiled {self.warm_compiled} and loaded {self.warm_loaded} artefacts; "
            f"its picture is {'the same' if self.same_bits else 'NOT the same'} bit for bit.",
            f"For scale: another prompt moves the eager result by {self.moved:.1e}.",
            "The model is tiny and its weights are random: the pictures show nothing, and the milliseconds say nothing "
            "about a real model on a graphics card.",
        ]

    def broken_promises(self) -> list[str]:
        """Each promise that this run did not keep; empty if all held."""
        found = []
        if not self.stops or self.stops[0].artefacts_compiled == 0:
            found.append("nothing was compiled at the first resolution, so the rest proves nothing")
        for stop in self.stops[1:]:
            if stop.artefacts_compiled:
                found.append(f"{stop.artefacts_compiled} artefacts were compiled again at {stop.size}, expected 0")
        for stop in self.stops:
            if not stop.error < TOLERANCE:
                found.append(f"at {stop.size} the result is {stop.error:.1e} away from eager, expected < {TOLERANCE}")
        if self.warm_compiled or not self.warm_loaded:
            found.append(
                f"the second process compiled {self.warm_compiled} and loaded {self.warm_loaded} artefacts, "
                "expected to compile none and to load some"
            )
        if not self.same_bits:
            found.append("the second process gave another picture from the same seed")
        if not self.moved > 100 * TOLERANCE:
            found.append(f"another prompt moves the result by {self.moved:.1e} only, so the errors prove nothing")
        return found

    def write(self, folder: Path) -> Path:
        """Write report.json into `folder` and return it."""
        content = {**asdict(self), "steps": STEPS, "table": self.table(), "broken_promises": self.broken_promises()}
        file = folder / "report.json"
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return file


def per_step_ms(ends: list[tuple[int, float]]) -> float:
    """Milliseconds of a typical step, from (how many steps were done, when); the first, which compiles, is left out.

    The median: what else a machine does for a moment is not the model's speed.
    """
    told = [end for end in ends if end[0] > 0]
    steps: list[float] = []
    for (done, began), (later, ended) in pairwise(told):
        steps += [(ended - began) / (later - done)] * (later - done)  # a host may tell of several steps at once
    if not steps:
        raise ValueError(f"{len(told)} moments were given, expected the ends of two steps or more")
    return 1000 * median(steps)


def first_step_s(ends: list[tuple[int, float]]) -> float:
    """Seconds from the sampler's beginning, (0, when), to the end of its first step."""
    return next(when for step, when in ends if step == 1) - ends[0][1]
