# SPDX-License-Identifier: Apache-2.0
"""torch's own pool of compiler processes, where it has one, watched: it waits for its results without end (torch 2.11).

It compiles Triton's kernels of graphs that are lowered in this process. One that hangs is ended, by which what it was
asked for fails; the next graph gets a new one.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..reporting.resource_shortages import begun
from ..system import compiler_processes, process_activity
from ..system.process_activity import WORKS_FOR, Patience


class PoolHangs(Exception):
    """torch's compiler processes did nothing for too long, and were ended."""


@contextmanager
def watched() -> Iterator[None]:
    """Inside a graph is lowered. Raises PoolHangs in the place of what comes of a pool that was ended."""
    if WORKS_FOR in os.environ:  # a worker has no such pool, and is forked
        yield
        return
    ended, why = threading.Event(), list[str]()
    begun("nexfort-torchs-pool", _watch, ended, why)  # without a thread for it nobody watches
    try:
        yield
    except Exception as error:
        if why:
            sys.modules["torch._inductor.async_compile"].AsyncCompile.process_pool.cache_clear()
            raise PoolHangs(f"torch's compiler processes hang ({why[0]}), and were ended") from error
        raise
    finally:
        ended.set()


def _watch(ended: threading.Event, why: list[str]) -> None:
    patience, asked = None, frozenset[Any]()
    while not ended.wait(process_activity.LOOK):
        pool = _pool()
        before, asked = asked, frozenset(getattr(pool, "pending_futures", ()))
        if not asked or asked != before:  # something was done
            patience = None
            continue
        limits = (
            compiler_processes.STOPPED,
            compiler_processes.SILENT,
            compiler_processes.LONGEST,
            compiler_processes.UNSEEN,
        )
        patience = patience or Patience(*limits)
        found = process_activity.below(pool.process.pid, process_activity.running(process_activity.LOOK / 2))
        stopped, lost = patience.stopped(found), patience.lost(found)
        if stopped or lost:
            why.append("one was stopped" if stopped else str(lost))
            process_activity.end([one.number for one in found] or [pool.process.pid])


def _pool() -> Any:
    """torch's pool, if there is one that is a process of its own."""
    module = sys.modules.get("torch._inductor.async_compile")
    made = getattr(getattr(module, "AsyncCompile", None), "process_pool", None)
    if made is None or not hasattr(made, "cache_info") or not made.cache_info().currsize:
        return None
    pool = made()
    return pool if hasattr(pool, "process") else None
