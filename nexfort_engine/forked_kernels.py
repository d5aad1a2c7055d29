# SPDX-License-Identifier: Apache-2.0
"""Kernels of a graph compiled beside each other: Triton's part of lowering, in processes that are forked for one each.

Inductor hands a kernel to a pool of processes as soon as its code is written, where it has such a pool, and asks for
the results at the end. Its own pool imports the compiler anew. Here a lowering worker, which has one thread and no
device, forks a process for each kernel. All workers share tokens for those, as many as the machine has cores, in a
pipe that is made before they are forked; where none is left a kernel is compiled in place.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from .flags import kernels_handed_to

log = logging.getLogger("nexfort")

_TOKEN = b"+"


class Tokens:
    """So many processes at once, of all that are forked from this one or from its children."""

    def __init__(self, count: int) -> None:
        self._there, self._back = os.pipe()
        os.set_blocking(self._there, False)
        os.write(self._back, _TOKEN * count)

    def take(self) -> bool:
        """Take one, if there is one."""
        try:
            return os.read(self._there, 1) == _TOKEN
        except BlockingIOError:
            return False

    def give_back(self) -> None:
        """Another process may be forked."""
        os.write(self._back, _TOKEN)


@contextmanager
def kernels_in_forks(tokens: Tokens, place: Path) -> Iterator[None]:
    """Inside, kernels that Inductor asks for are compiled in processes forked from this one.

    Only where it has one thread and no device, and in the scope in which Inductor lowers. place: a directory for what
    they give, as long as it is not read.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kernels-", dir=place)))
        forks = _Forks(tokens, folder)
        stack.callback(forks.end)  # before the folder goes
        stack.enter_context(kernels_handed_to(forks))
        yield


class _Forks:
    """What Inductor takes for its pool of processes. See flags.kernels_handed_to."""

    def __init__(self, tokens: Tokens, folder: Path) -> None:
        self._tokens, self._folder = tokens, folder
        self._ready = False  # whether there is a token for the next one
        self._results: list[_Result] = []

    def ready(self) -> bool:
        """Whether there may be one process more. A kernel that is compiled in place is not given here at all."""
        self._ready = self._ready or self._tokens.take()
        return self._ready

    def submit(self, work: Callable[..., Any], *args: Any) -> _Result:
        """Begin with a piece of work; asked only when `ready`."""
        place = self._folder / str(len(self._results))
        try:
            child: int | None = os.fork()
        except OSError as error:  # no more processes, or no memory for one: it is done here, when it is asked for
            log.debug("Nexfort: no process was forked for a kernel: %s", error)
            child = None
        if child == 0:
            _be(lambda: work(*args), place, self._tokens)
        self._ready = self._ready and child is None
        self._results.append(_Result(self, child, place, lambda: work(*args)))
        return self._results[-1]

    def wait(self, child: int) -> None:
        """Wait for a process. Whoever waits wants no more of them, as far as is known."""
        self.rest()
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]):  # or it gave its token back itself
            self._tokens.give_back()

    def rest(self) -> None:
        """Give back the token for a next one, for which Inductor asks to look at what it has."""
        if self._ready:
            self._ready = False
            self._tokens.give_back()

    def end(self) -> None:
        """Wait for those whose results nobody asked for."""
        self.rest()
        for result in self._results:
            result.wait()


class _Result:
    """What a forked process gives; if it gave nothing, what its work gives here, or raises."""

    def __init__(self, forks: _Forks, child: int | None, place: Path, instead: Callable[[], Any]) -> None:
        self._forks, self._child, self._place, self._instead = forks, child, place, instead

    def wait(self) -> None:
        """Wait for the process."""
        child, self._child = self._child, None
        if child is not None:
            self._forks.wait(child)

    def result(self, timeout: float | None = None) -> Any:
        """As Future.result."""
        self.wait()
        if not self._place.exists():
            return self._again()
        return pickle.loads(self._place.read_bytes())

    def _again(self) -> Any:
        log.debug("Nexfort: a kernel was not compiled in a process of its own, and is compiled here")
        return self._instead()


def _be(work: Callable[[], Any], place: Path, tokens: Tokens) -> NoReturn:
    """Be a process that does one thing, leaves what came of it at a place, and ends.

    What fails here is done again by who asked, and fails where the error is seen.
    """
    try:
        gc.disable()  # a collection would copy the pages that it shares
        with suppress(Exception):
            made = pickle.dumps(work(), pickle.HIGHEST_PROTOCOL)
            begun = place.with_suffix(".begun")
            begun.write_bytes(made)
            begun.rename(place)
    finally:
        tokens.give_back()
        os._exit(0)
