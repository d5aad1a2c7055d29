# SPDX-License-Identifier: Apache-2.0
"""Kernels of a graph compiled beside each other: Triton's part of lowering, in processes that are forked for one each.

Inductor hands a kernel to a pool of processes as soon as its code is written, where it has such a pool, and asks for
the results at the end. Its own pool imports the compiler anew. Here a lowering worker, which has one thread and no
device, forks a process for each kernel. All workers share tokens for those, as many as the machine has cores, in a
pipe that is made before they are forked; where none is left a kernel is compiled in place. So is one that another
worker has begun with, which is found where it is asked for (kernel_sharing.py): a fork costs half of what most take.
"""

from __future__ import annotations

import ast
import functools
import gc
import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ..system.process_settings import replaced
from .kernel_sharing import begins

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
def kernels_in_forks(tokens: Tokens, place: Path, shared: Path | None = None) -> Iterator[None]:
    """Inside, kernels that Inductor asks for are compiled in processes forked from this one.

    Only where it has one thread and no device, and in the scope in which Inductor lowers. place: a directory for what
    they give, as long as it is not read. shared: as for `compiled_once`, inside of which this is then.
    """
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kernels-", dir=place)))
        except OSError as error:  # no room for it: all are compiled in place
            log.debug("Nexfort: there is no folder for kernels of forked processes: %s", error)
            yield
            return
        forks = _Forks(tokens, folder, shared)
        stack.callback(forks.end)  # before the folder goes
        stack.enter_context(kernels_handed_to(forks))
        yield


@contextmanager
def kernels_handed_to(pool: Any) -> Iterator[None]:
    """Inside, Inductor hands kernels to this in the place of its own pool of processes, as soon as it wrote them.

    pool: `ready` says whether it takes one more, which Inductor compiles by itself otherwise; `submit` takes a function
    and arguments, and gives what has the method `result`. A torch that has other names for this compiles all by itself.
    """
    try:
        from torch._inductor import config
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
        from torch._inductor.triton_bundler import TritonBundler

        define = PythonWrapperCodegen.define_kernel
        names = ("process_pool", "use_process_pool", "submit", "triton")
        known = all(hasattr(AsyncCompile, name) for name in names) and hasattr(TritonBundler, "_entries")
    except (ImportError, AttributeError):
        known = False
    if not known:
        yield
        return

    def define_kernel(wrapper: Any, name: str, body: str, *args: Any, **kwargs: Any) -> None:
        # by itself Inductor asks for its own kernels ahead, and for those of others, the longest, when all is written
        if body.startswith("async_compile.triton(") and pool.ready():
            call: Any = ast.parse(body.strip(), mode="eval").body
            words = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
            AsyncCompile().triton(*map(ast.literal_eval, call.args), **words)
        define(wrapper, name, body, *args, **kwargs)

    given = functools.cache(lambda: pool)  # forked processes have torch clear its cache
    with ExitStack() as stack:
        for owner, name, value in (
            (AsyncCompile, "process_pool", staticmethod(given)),
            (AsyncCompile, "use_process_pool", staticmethod(pool.ready)),
            # for code in C++, which Inductor compiles on threads; a process with threads cannot be forked
            (AsyncCompile, "submit", staticmethod(_at_once)),
            (PythonWrapperCodegen, "define_kernel", define_kernel),
            (config, "compile_threads", 2),  # with one it never asks
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


def _at_once(work: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done


class _Forks:
    """What Inductor takes for its pool of processes. See kernels_handed_to."""

    def __init__(self, tokens: Tokens, folder: Path, shared: Path | None = None) -> None:
        self._tokens, self._folder, self._shared = tokens, folder, shared
        self._ready = False  # whether there is a token for the next one
        self._results: list[_Result] = []

    def ready(self) -> bool:
        """Whether there may be one process more. A kernel that is compiled in place is not given here at all."""
        self._ready = self._ready or self._tokens.take()
        return self._ready

    def submit(self, work: Callable[..., Any], *args: Any) -> _Result:
        """Begin with a piece of work; asked only when `ready`."""
        # Inductor's work is given a partial of its name and text
        if self._shared is not None and not begins(repr(getattr(args[0], "args", args[0])), self._shared):
            return _Result(self, None, None, lambda: work(*args))
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
    """What a forked process gives; if it gave nothing or there is none, what its work gives here, or raises."""

    def __init__(self, forks: _Forks, child: int | None, place: Path | None, instead: Callable[[], Any]) -> None:
        """place: where it leaves that; None: nobody was asked."""
        self._forks, self._child, self._place, self._instead = forks, child, place, instead

    def wait(self) -> None:
        """Wait for the process."""
        child, self._child = self._child, None
        if child is not None:
            self._forks.wait(child)

    def result(self, timeout: float | None = None) -> Any:
        """As Future.result."""
        self.wait()
        if self._place is None:
            self._forks.rest()
            return self._here()
        if not self._place.exists():
            return self._again()
        return pickle.loads(self._place.read_bytes())

    def _again(self) -> Any:
        log.debug("Nexfort: a kernel was not compiled in a process of its own, and is compiled here")
        return self._here()

    def _here(self) -> Any:
        """What its work gives here, as if another process had done it: a graph has a kernel once."""
        from torch._inductor.triton_bundler import TritonBundler

        # who asked puts the kernel in when it has it, and in this process the work would as well
        with replaced(TritonBundler, "_entries", None):
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
