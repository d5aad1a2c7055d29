# SPDX-License-Identifier: Apache-2.0
"""Turns: of the processes of a group that lack the same artefact, one makes it and the others load it.

They agree through the store that torch.distributed has for the group. No process waits for one that failed to make
anything: whoever had the turn says so, and the others then make it themselves.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..system.process_group import distributed, others_speak

log = logging.getLogger("nexfort")

LONGEST = 600.0  # that a process waits for another; a single graph never takes so long
_LOOK = 0.05
Found = TypeVar("Found")


@contextlib.contextmanager
def turn(name: str, find: Callable[[], Found | None], cancel: Callable[[], None]) -> Iterator[Found | None]:
    """What another process made and `find` finds, or None: then it is to be made in the block.

    name: of what is lacking, the same in every process. cancel raises to stop waiting.
    """
    if not others_speak():
        yield None
        return
    found, store = None, distributed().distributed_c10d._get_default_store()
    key = f"nexfort/{name}"
    ours = store.compare_set(key, "", str(distributed().get_rank())).decode() == str(distributed().get_rank())
    try:
        if not ours:
            _wait_for(lambda: bool(store.check([f"{key}/done"])), cancel)
            found = find()
        yield found
    finally:
        if ours:
            store.set(f"{key}/done", "")


def _wait_for(there: Callable[[], bool], cancel: Callable[[], None]) -> None:
    until = time.monotonic() + LONGEST
    while not there():
        cancel()
        if time.monotonic() > until:
            log.warning("Nexfort: another process has made nothing for %g s; this one does it itself", LONGEST)
            return
        time.sleep(_LOOK)
