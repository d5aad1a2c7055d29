# SPDX-License-Identifier: Apache-2.0
"""A system that refuses the n-th thing that is asked of it: to open a file, make a directory, rename, write.

All that Python does is seen, that of torch's compiler too; what libraries and other processes do is not: a real disk
that is full sees that as well.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EACCES, errno.ENAMETOOLONG, errno.EROFS)
_MAKING = ("mkdir", "rename", "replace", "link", "symlink")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC


@contextlib.contextmanager
def refused(number: int, code: int, below: tuple[Path, ...], lasting: bool = True) -> Iterator[list[str]]:
    """Refuse the n-th thing below some directories, and all after it if `lasting`; gives all that were asked.

    What is refused for want of room comes in two: a file that cannot be made, then one that takes no content.
    """
    asked: list[str] = []
    places = tuple(str(one) for one in below)
    inside: set[int] = set()

    def ask(name: str, path: Any) -> bool:
        """Whether it is refused."""
        if isinstance(path, int):
            if path not in inside:
                return False
        elif not os.path.abspath(os.fsdecode(os.fspath(path))).startswith(places):
            return False
        asked.append(name)
        return len(asked) == number or (lasting and len(asked) > number)

    def refuse(path: Any) -> OSError:
        return OSError(code, os.strerror(code), str(path))

    def making(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **more: Any) -> Any:
            if ask(name, path):
                raise refuse(path)
            return real(path, *args, **more)

        return call

    def opened(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if (flags & _WRITING or code == errno.EMFILE) and ask("open", path):
            raise refuse(path)
        handle = real_open(path, flags, *args, **more)
        (inside.add if os.path.abspath(os.fsdecode(path)).startswith(places) else inside.discard)(handle)
        return handle

    def file(path: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        changes = any(sign in mode for sign in "wax+")
        if isinstance(path, int) or not (changes or code == errno.EMFILE):
            return real_file(path, mode, *args, **more)
        if ask("open", path):
            raise refuse(path)
        if changes and code == errno.ENOSPC and ask("write", path):
            real_file(path, mode, *args, **more).close()
            return real_file("/dev/full", mode.replace("x", "w"), *args, **more)
        return real_file(path, mode, *args, **more)

    def write(handle: int, content: Any) -> int:
        if ask("write", handle):
            raise refuse(handle)
        return real_write(handle, content)

    real_open, real_file, real_write = os.open, io.open, os.write
    with pytest.MonkeyPatch.context() as patch:
        for name in _MAKING:
            patch.setattr(os, name, making(name, getattr(os, name)))
        patch.setattr(os, "open", opened)
        patch.setattr(os, "write", write)
        patch.setattr(io, "open", file)
        patch.setattr(builtins, "open", file)
        yield asked


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A disk of its own in memory; skipped with the reason where none can be mounted."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root mounts a disk")
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "none", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
