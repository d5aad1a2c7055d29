# SPDX-License-Identifier: Apache-2.0
"""How long functions take on a device by the device's own clock, and one process timing at a time.

A search picks the fastest of some kernels. Two things make chance of it: the processor, which launches some more slowly
than a short one runs, all the more while as many workers as it has cores lower graphs; and what other workers time on
the same GPU at once. So what is timed is queued behind a pause, and workers that were forked take turns. They trace,
write and compile kernels beside each other as ever.
"""

from __future__ import annotations

import functools
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from .process_settings import replaced

log = logging.getLogger("nexfort")

RUNS = 7  # of each; the median counts
_ASLEEP = 2_000_000  # cycles of the device, about a millisecond: runs queue meanwhile, and none waits for its launch

_turn: Callable[[], AbstractContextManager[Any]] = nullcontext  # for Inductor to time something

# median microseconds of each of some functions, run in turn on a device
Clock = Callable[[Sequence[Callable[[], object]], torch.device], list[float]]


def clocked(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Median microseconds of each, by the device's own clock where it is CUDA's. Waits for the device."""
    if device.type != "cuda":
        return [1e6 * statistics.median(times) for times in zip(*[_seconds(runs) for _ in range(RUNS)], strict=True)]
    with torch.cuda.device(device):
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2 * len(runs))] for _ in range(RUNS)]
        for row in marks:
            torch.cuda._sleep(_ASLEEP)
            for run, begin, end in zip(runs, row[::2], row[1::2], strict=True):
                begin.record()
                run()
                end.record()
        torch.cuda.current_stream().synchronize()
        spans = [
            [1e3 * begin.elapsed_time(end) for begin, end in zip(row[::2], row[1::2], strict=True)] for row in marks
        ]
    return [statistics.median(times) for times in zip(*spans, strict=True)]


def _seconds(runs: Sequence[Callable[[], object]]) -> list[float]:
    found = []
    for run in runs:
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return found


@contextmanager
def by_the_device() -> Iterator[None]:
    """Inside, where one graph at a time is lowered, Inductor picks GPU kernels by `clocked`, in its turn.

    Its own way empties the GPU's cache before each run. In a step what a kernel reads was mostly just written.
    """
    if not torch.cuda.is_available():  # a device of another kind: as Inductor has it
        yield
        return
    from torch._inductor.runtime.benchmarking import benchmarker

    def milliseconds(_self: Any, run: Callable[[], Any], *_how: Any, **_more: Any) -> float:
        run()  # what it loads when it is first called, libraries among it, is loaded beside others
        with _turn():
            return clocked([run], torch.device("cuda", torch.cuda.current_device()))[0] / 1e3

    with replaced(type(benchmarker), "benchmark_gpu", milliseconds):
        yield


@contextmanager
def taking_turns(folder: Path) -> Iterator[None]:
    """Inside, Inductor times nothing while another process that is given `folder` does; where files can be locked."""
    with replaced(sys.modules[__name__], "_turn", functools.partial(_locked, folder / "timing.lock")):
        yield


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with ExitStack() as held:
        try:
            import fcntl

            fcntl.flock(held.enter_context(file.open("w")), fcntl.LOCK_EX)
        except (ImportError, OSError) as error:  # no such locks, or no room there: it times beside others
            log.debug("Nexfort: kernels are timed beside those of others: %s", error)
        yield
