# SPDX-License-Identifier: Apache-2.0
"""Whether this machine and this torch can compile at all, found out once a process, in one clear sentence.

torch 2.11 on a CPU or an NVIDIA card is the reference and needs only a compiler that is there. Any other torch, and any
other kind of device, is decided by a self-check (selfcheck.py) that takes one small block through the whole way. That
it passed is remembered beside the artefacts, for this very engine, torch, device and compiler; a failure never is.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from ..cache.key import environment_parts, primary_key
from ..cache.sidecar import recall, remember
from ..capture.types import LOCK
from ..lowering.preload import wait_for_import
from ..lowering.vec_isa_cache import cpp_compiler
from ..modules.boundaries import first_carrier
from ..reporting.report import first_line
from ..reporting.resource_shortages import PASSING, describe_error
from ..system.compiler_processes import bounded, cancel, hung
from ..system.process_settings import named_user

OLDEST = (2, 11)
REFERENCE = (2, 11)
_PASSED = "selfchecks.json"
_MOST_PASSED = 64  # versions of the engine come and go
_WATCH = 0.1  # seconds between two looks at the host's cancel


class NotNow(Exception):
    """Whether something can be compiled here cannot be found out now. The text says why."""


def unsupported(root: nn.Module, folder: Path | None = None, given: Iterable[torch.Tensor] = ()) -> str | None:
    """Why nothing can be compiled for this module here, or None. `folder`: see reason_for. Raises NotNow.

    given: what it is called with. It tells the device where hooks bring the weights.
    """
    weight: torch.Tensor | None = next(root.parameters(), None)
    if weight is None:
        weight = next(root.buffers(), None)
    if weight is not None and weight.device.type == "meta" and first_carrier(root) is not None:
        weight = next(iter(given), weight)
    return reason_for(weight.device.type if weight is not None else "cpu", folder)


@functools.cache
def reason_for(device_type: str, folder: Path | None = None) -> str | None:
    """Why artefacts for one kind of device cannot be made in this process, or None. Raises NotNow.

    folder: where it is remembered that a self-check passed; None: it is made once a process.
    """
    wait_for_import()
    version = torch_version()
    if version < OLDEST:
        return (
            f"torch {torch.__version__} was found, 2.11 or newer is needed for compiling; "
            "update torch, or leave the node in place and nothing changes"
        )
    if device_type == "meta":
        return "its weights are on the meta device; load it first"
    with named_user():
        missing = _no_compiler(device_type)
    if missing:
        return missing
    if version != REFERENCE or device_type not in ("cpu", "cuda") or torch.version.hip is not None:
        return _checked(device_type, folder)
    return None


def _checked(device_type: str, folder: Path | None) -> str | None:
    from .selfcheck import run

    here, passed = "", list[str]()
    if folder is not None:
        here = primary_key(
            {**environment_parts(device_type), "compiler": cpp_compiler() if device_type == "cpu" else ()}
        )
        passed = _passed(folder)
        if here in passed:
            return None
    _take_lock()  # it captures and lowers, and two that do so at once break each other
    try:
        if folder is not None and here in (passed := _passed(folder)):
            return None  # another thread made it meanwhile
        problem = run(device_type)
        if problem:
            return f"the self-check of torch {torch.__version__} on {device_type} failed: {problem}"
        if folder is not None:
            remember(folder, _PASSED, [*passed, here][-_MOST_PASSED:])
        return None
    finally:
        LOCK.release()


def _take_lock() -> None:
    """Take LOCK, and look for the host's cancel meanwhile."""
    while not LOCK.acquire(timeout=_WATCH):
        if (stop := cancel.get()) is not None:
            stop()


def _passed(folder: Path) -> list[str]:
    """The keys of machines on which the self-check passed."""
    found = recall(folder, _PASSED)
    return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []


def torch_version() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _no_compiler(device_type: str) -> str | None:
    if device_type == "cpu":
        return no_cpp_compiler()
    from torch.utils._triton import has_triton

    if not has_triton():
        return (
            f"Triton was not found or does not support this {device_type} device, and compiling for it needs Triton; "
            "install the triton package that fits your torch (triton-windows on Windows)"
        )
    return None


def no_cpp_compiler() -> str | None:
    """Why Inductor finds no C++ compiler, or None. Raises NotNow where no process can be started to ask it."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        with bounded():
            get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError, subprocess.SubprocessError) as error:
        if isinstance(error, OSError) and error.errno in PASSING:
            raise NotNow(f"the C++ compiler could not be started: {describe_error(error)}") from error
        if hung:
            return f"compiling for the CPU needs the C++ compiler: {next(iter(hung.values()))}"
        what = first_line(error, 120) or type(error).__name__
        return (
            f"no C++ compiler was found ({what}), and compiling for the CPU needs one; install gcc (g++) or "
            "clang, or name one in the variable CXX"
        )
    return None
