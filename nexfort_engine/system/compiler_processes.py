# SPDX-License-Identifier: Apache-2.0
"""Compilers that torch and Triton start as processes (g++, ptxas), each with an end: one that hangs is ended.

torch 2.11 waits for them without limit. Inside `bounded` its modules, and Triton's, find another `subprocess`, whose
functions wait as long as a compiler computes. It is not asked again in this process once it was ended: every kernel
would wait for it. And compilers end with this process: those of workers are in a group with them
(lowering/worker_lifetime.py), others in that of a process that sees to it (compiler_reaper.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from . import compiler_reaper
from .process_activity import LOOK, WORKS_FOR, Patience, below, end, running

STOPPED = 10.0  # seconds that somebody may stop a compiler for
ASKED = 10.0  # seconds that a compiler may do nothing when it is only asked for its version
SILENT = 60.0  # seconds that it may do nothing when it compiles
LONGEST = 1800.0  # seconds that it may take
UNSEEN = 600.0  # the same where nobody sees whether it computes
_OF = ("torch._inductor.", "triton.")

hung: dict[str, str] = {}  # compilers that had to be ended, and why
# called while a compiler is waited for; what it raises ends the compiler
cancel: ContextVar[Callable[[], None] | None] = ContextVar("nexfort_cancel_compiler", default=None)

_lock = threading.Lock()
_users = _known = 0
_found: list[types.ModuleType] = []  # that start compilers, among so many known ones
_folder: Path | None = None  # for compilers' temporary files
_keeper: subprocess.Popen[bytes] | None = None


class CompilerHangs(subprocess.SubprocessError):
    """A compiler did nothing for too long, and was ended."""


@contextmanager
def bounded(folder: Path | None = None) -> Iterator[None]:
    """Inside, no compiler that torch or Triton starts is waited for without end; for all threads.

    folder: a directory for what compilers leave when they are killed, by one thread at a time.
    """
    global _users, _folder
    with _lock:
        _users += 1
        _find()
        for module in _found:
            module.subprocess = _BOUNDED  # type: ignore[attr-defined]
        before, _folder = _folder, folder or _folder
    try:
        yield
    finally:
        with _lock:
            _users, _folder = _users - 1, before
            if not _users:
                _end_keeper()
            for module in [] if _users else _found:
                module.subprocess = subprocess  # type: ignore[attr-defined]


def _find() -> None:
    """Find the modules that start compilers, where more were loaded: it takes milliseconds."""
    global _known
    if len(sys.modules) != _known:
        _known = len(sys.modules)
        for name, module in sys.modules.copy().items():
            if name.startswith(_OF) and getattr(module, "__dict__", {}).get("subprocess") is subprocess:
                _found.append(module)


def run(*given: Any, check: bool = False, capture_output: bool = False, **more: Any) -> Any:
    """As subprocess.run. Raises CompilerHangs."""
    if more.get("timeout") is not None or more.get("input") is not None:
        return subprocess.run(*given, check=check, capture_output=capture_output, **more)
    more.pop("timeout", None)
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = _words(given[0] if given else more["args"])
    if command[0] in hung:
        raise CompilerHangs(hung[command[0]])
    with subprocess.Popen(*given, **_kept(more)) as process:
        try:
            out, err = _ended(process, command)
        except BaseException:
            end([one.number for one in below(process.pid, running())] or [process.pid])
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def check_call(*given: Any, **more: Any) -> int:
    """As subprocess.check_call. Raises CompilerHangs."""
    run(*given, check=True, **more)
    return 0


def check_output(*given: Any, **more: Any) -> Any:
    """As subprocess.check_output. Raises CompilerHangs."""
    return run(*given, check=True, stdout=subprocess.PIPE, **more).stdout


def _ended(process: subprocess.Popen[Any], command: list[str]) -> tuple[Any, Any]:
    """What a process wrote when it has ended. Raises CompilerHangs, and what `cancel` raises."""
    asked = not {"-c", "-o"} & set(command)
    patience = Patience(STOPPED, ASKED, 2 * ASKED) if asked else Patience(STOPPED, SILENT, LONGEST, UNSEEN)
    while True:
        try:
            return process.communicate(timeout=LOOK)
        except subprocess.TimeoutExpired:
            if (stop := cancel.get()) is not None:
                stop()
            found = below(process.pid, running(LOOK / 2))
            reason = "it was stopped" if patience.stopped(found) else patience.lost(found)
        if reason is not None:
            name = Path(command[0]).name
            hung[command[0]] = f"{name} hangs ({reason}, and it was ended); it is not asked again before a restart"
            raise CompilerHangs(hung[command[0]])


def _kept(more: dict[str, Any]) -> dict[str, Any]:
    """What a compiler is started with: where its files are found, and what ends it, if this process is killed."""
    global _keeper
    if _folder is not None and _folder.is_dir():
        more = more | {"env": {**(more.get("env") or os.environ), "TMPDIR": str(_folder)}}
    if WORKS_FOR in os.environ or sys.version_info < (3, 11) or not hasattr(os, "killpg"):
        return more
    with _lock:
        if _users and (_keeper is None or _keeper.poll() is not None):
            run = [sys.executable, "-I", "-S", compiler_reaper.__file__, str(os.getpid())]
            nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with suppress(OSError):  # no process more is to be had: compilers end when they are done
                _keeper = subprocess.Popen(run, process_group=0, **nothing)
        return more if _keeper is None else more | {"process_group": _keeper.pid}


def _end_keeper() -> None:
    global _keeper
    if _keeper is not None:
        _keeper.kill()
        _keeper.wait()
        _keeper = None


def _words(command: Any) -> list[str]:
    return command.split() if isinstance(command, str) else list(map(str, command))


class _Bounded(types.ModuleType):
    """What those modules find in the place of `subprocess`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


_BOUNDED = _Bounded("subprocess")
_BOUNDED.run, _BOUNDED.check_call, _BOUNDED.check_output = run, check_call, check_output  # type: ignore[attr-defined]
_BOUNDED.call = lambda *given, **more: run(*given, **more).returncode  # type: ignore[attr-defined]
