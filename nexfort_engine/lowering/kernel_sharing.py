# SPDX-License-Identifier: Apache-2.0
"""Kernels, compiled once for all artefacts of a batch that have them.

The same ones are part of many artefacts, whose directories hold all that they need and which are lowered at once by
workers of their own: of the 183 kernels of SD2.1 94 are unlike each other. Those in Gluon, which take a second each,
have the same text in all of them (kernels/inductor_launch.py). So the first worker compiles a kernel in a directory
that all of a batch share, others wait for it, and each puts what came of it where its artefact is made.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..system.process_settings import replaced, scoped_env

log = logging.getLogger("nexfort")


@contextmanager
def compiled_once(folder: Path) -> Iterator[None]:
    """Inside, which is where one graph at a time is lowered, Triton compiles kernels in `folder` first.

    Without Triton, or where files cannot be locked or written, it is as outside.
    """
    try:
        import fcntl  # noqa: F401

        import triton
        from triton.compiler.compiler import ASTSource  # noqa: F401
    except ImportError:
        yield
        return
    with replaced(triton, "compile", _sharing(triton.compile, folder)):
        yield


def begins(text: str, folder: Path) -> bool:
    """Note that a kernel is begun with, in a batch that shares `folder`. False: somebody has begun with it before."""
    try:
        (folder / f"{hashlib.sha256(text.encode()).hexdigest()}.begun").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # no room there: each compiles its own
        return True
    return True


def _sharing(compile: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """As triton.compile."""
    import fcntl

    from triton.compiler.compiler import ASTSource
    from triton.runtime.cache import get_cache_manager

    def shared(source: Any, *how: Any, **more: Any) -> Any:
        if isinstance(source, ASTSource):  # those in Gluon among them; other sources are files
            try:
                made, files = compiled(source, how, more)
                own = get_cache_manager(made.hash)
                copies = {file: own.put(Path(place).read_bytes(), file) for file, place in files.items()}
                own.put_group(_group(source), copies)
            except OSError as error:  # no room there, or no locks: each compiles its own
                log.debug("Nexfort: a kernel is not shared: %s", error)
        return compile(source, *how, **more)  # which finds it there

    def compiled(source: Any, how: Any, more: Any) -> tuple[Any, dict[str, str]]:
        name = hashlib.sha256(repr((source.hash(), how, more)).encode()).hexdigest()
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with scoped_env(TRITON_CACHE_DIR=str(folder)):
                made = compile(source, *how, **more)
                return made, get_cache_manager(made.hash).get_group(_group(source)) or {}

    return shared


def _group(source: Any) -> str:
    """What Triton calls all files of a kernel."""
    return f"{source.name[:150]}.json"
