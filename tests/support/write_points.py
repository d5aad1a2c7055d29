# SPDX-License-Identifier: Apache-2.0
"""Every point at which a process writes to disk, so that a test can let it die, or let the disk refuse, at each.

The functions of `os` that change something are replaced. Python's own file objects write past them, so what a test
wants to interrupt must go through `os`, as all of the store does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHANGING = ("write", "fsync", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "chmod", "utime", "link")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
Act = Callable[[int, str, tuple[Any, ...]], None]


@contextlib.contextmanager
def watched(act: Act) -> Iterator[list[str]]:
    """Calls `act(number, name, arguments)` before every change of the disk; gives the names of those so far."""
    seen: list[str] = []

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if name != "open" or args[1] & _WRITING:
                seen.append(name)
                act(len(seen), name, args)
            return real(*args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", *CHANGING):
            if hasattr(os, name):
                replacement = wrapped(name, getattr(os, name))
                for known in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
                    if getattr(os, name) in known:
                        known.add(replacement)  # type: ignore[arg-type]
                patch.setattr(os, name, replacement)
        yield seen


def dies_at(number: int, work: Callable[[], object], half: bool = False) -> bool:
    """Runs `work` in a child that is killed at its n-th change of the disk; False if it ended before that.

    half: the change is a write of which half takes place.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of this process are not needed there
        child = os.fork()
    if child == 0:
        _work_and_die(number, work, half)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the child raised: see its traceback on standard error"
    return False


def _work_and_die(number: int, work: Callable[[], object], half: bool) -> None:
    real_write = os.write

    def die(count: int, name: str, args: tuple[Any, ...]) -> None:
        if count == number:
            if half and name == "write":
                real_write(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with watched(die):
            work()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@contextlib.contextmanager
def disk_full_from(number: int, times: int | None = None) -> Iterator[list[str]]:
    """Lets the n-th change that needs room fail, and all after it, or only so many `times`; gives what failed."""
    needing, refused = [0], []

    def refuse(_: int, name: str, args: tuple[Any, ...]) -> None:
        if name not in ("open", "write", "fsync", "mkdir", "rename", "replace", "link"):
            return  # to remove something needs no room
        if name in ("rename", "replace") and "trash-" in str(args[1]):
            return
        needing[0] += 1
        if number <= needing[0] and (times is None or needing[0] < number + times):
            refused.append(name)
            raise OSError(errno.ENOSPC, "No space left on device")

    with watched(refuse):
        yield refused
