# SPDX-License-Identifier: Apache-2.0
"""Kernels of a graph compiled beside each other: Triton's part of lowering, in processes that are forked for one each.

Inductor hands a kernel to a pool of processes as soon as its code is written, where it has such a pool, and asks for
the results at the end. Its own pool imports the compiler anew. Here a lowering worker, which has one thread and no
device, forks a process for each kernel. All workers share tokens for those, as many as the machine has cores, in a
pipe that is made before they are forked; where none is left a kernel is compiled in place.
"""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from .flags import kernels_handed_to

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

    def close(self) -> None:
        """For a process that no other was forked from."""
        os.close(self._there)
        os.close(self._back)


@contextmanager
def kernels_in_forks(tokens: Tokens) -> Iterator[None]:
    """Inside, kernels that Inductor asks for are compiled in processes forked from this one.

    Only where it has one thread and no device, and in the scope in which Inductor lowers.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nexfort-kernels-")))
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
        self._ready = False
        place = self._folder / f"{os.getpid()}-{len(self._results)}"  # processes forked from this one have it, too
        child = os.fork()
        if not child:
            _be(lambda: work(*args), place, self._tokens)
        self._results.append(_Result(child, place, self._tokens, lambda: work(*args)))
        return self._results[-1]

    def end(self) -> None:
        """Wait for those whose results nobody asked for."""
        if self._ready:
            self._tokens.give_back()
        for result in self._results:
            result.wait()


class _Result:
    """What a forked process gives; if it gave nothing, what its work gives here, or raises."""

    def __init__(self, child: int, place: Path, tokens: Tokens, instead: Callable[[], Any]) -> None:
        self._child, self._place, self._tokens, self._instead = child, place, tokens, instead
        self._waited = False

    def wait(self) -> None:
        """Wait for the process."""
        if self._waited:
            return
        self._waited = True
        if os.WIFSIGNALED(os.waitpid(self._child, 0)[1]):  # or it gave its token back itself
            self._tokens.give_back()

    def result(self, timeout: float | None = None) -> Any:
        """As Future.result."""
        self.wait()
        if not self._place.exists():
            return self._instead()
        return pickle.loads(self._place.read_bytes())


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
