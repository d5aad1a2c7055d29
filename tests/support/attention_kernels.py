# SPDX-License-Identifier: Apache-2.0
"""Attention on a CPU by made-up kernels, which count their calls, for a chooser with a made-up clock. No test here.

Also a process that asks for attention at some sizes: `python attention_kernels.py FOLDER NAME=MICROSECONDS...`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nexfort_engine.attention.backends import OWN, Call, Kernel, own
from nexfort_engine.attention.tuner import Chooser, Told
from nexfort_engine.reporting.report import Report


class Kernels:
    """Kernels by name with what the clock says of each; torch's own takes `own` microseconds. asked: how often each."""

    def __init__(self, own: float = 100.0, **microseconds: float) -> None:
        self.microseconds = {OWN: own, **microseconds}
        self.asked: Counter[str] = Counter()
        self.measured = 0
        self.off: set[str] = set()  # what the user switched off
        self.problems: dict[str, str] = {}  # why one takes no call
        self.instead: dict[str, Callable[[Call], torch.Tensor]] = {}  # what one does in the place of attention
        self.quantising: set[str] = set()
        self.versions: dict[str, str] = {}

    def made(self) -> Sequence[Kernel]:
        """As a registry gives them."""
        return [
            Kernel(
                name,
                self._run(name),
                lambda call, name=name: self.problems.get(name),
                lambda name=name: name not in self.off,
                self.versions.get(name, ""),
                name in self.quantising,
            )
            for name in self.microseconds
            if name != OWN
        ]

    def _run(self, name: str) -> Callable[[Call], torch.Tensor]:
        def run(call: Call) -> torch.Tensor:
            self.asked[name] += 1
            return self.instead.get(name, own)(call)

        return run

    def clock(self, runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
        """Says what each takes; it is told by which kernel is asked when it is run."""
        self.measured += 1
        found = []
        for run in runs:
            before = Counter(self.asked)
            run()
            (name,) = (self.asked - before) or {OWN: 1}
            found.append(self.microseconds[name])
        return found

    def chooser(self) -> Chooser:
        """A new one, which remembers nothing of others but what is on disk."""
        return Chooser({"cpu": self.made}, self.clock)


def call_of(
    batch: int = 2,
    heads: int = 2,
    rows: int = 8,
    keys: int = 8,
    *,
    width: int = 16,
    values: int | None = None,
    groups: int | None = None,
    outermost: str = "rows",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **more: Any,
) -> Call:
    """A call on random tensors. outermost: which of "heads" and "rows" lies further out in memory."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(count: int, length: int, each: int) -> torch.Tensor:
        if outermost == "heads":
            return torch.randn(batch, count, length, each, generator=generator).to(dtype)
        return torch.randn(batch, length, count, each, generator=generator).to(dtype).transpose(1, 2)

    groups, values = groups or heads, values or width
    tensors = drawn(heads, rows, width), drawn(groups, keys, width), drawn(groups, keys, values)
    return Call(*tensors, enable_gqa=groups != heads, **more)


def main(arguments: list[str]) -> None:
    """Print what became of it as JSON."""
    kernels = Kernels(**{name: float(value) for name, _, value in (text.partition("=") for text in arguments[1:])})
    report, chooser = Report(), kernels.chooser()
    for rows in (8, 32, 128):
        chooser.run(call_of(rows=rows), (0, 1, 2, 3), False, Told(Path(arguments[0]), report))
    print(json.dumps({"measured": kernels.measured, "asked": kernels.asked, "notes": report.as_dict()["notes"]}))


if __name__ == "__main__":
    main(sys.argv[1:])
