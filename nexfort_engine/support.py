# SPDX-License-Identifier: Apache-2.0
"""Whether this machine and this torch can compile at all, found out once a process, in one clear sentence.

torch 2.11 on a CPU or an NVIDIA card is the reference and needs only a compiler that is there. Any other torch, and any
other kind of device, is decided by a self-check (selfcheck.py) that takes one small block through the whole way. That
it passed is remembered beside the artefacts, for this very engine, torch, device and compiler; a failure never is.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
from pathlib import Path

import torch
from torch import nn

from .cache.disk import make_private, replace_file
from .cache.key import environment_parts, primary_key
from .lower import wait_for_import

log = logging.getLogger("nexfort")

OLDEST = (2, 11)
REFERENCE = (2, 11)
_PASSED = "selfchecks.json"
_MOST_PASSED = 64  # versions of the engine come and go


def unsupported(root: nn.Module, folder: Path | None = None) -> str | None:
    """Why nothing can be compiled for this module here, or None. `folder`: see reason_for."""
    weight: torch.Tensor | None = next(root.parameters(), None)
    if weight is None:
        weight = next(root.buffers(), None)
    return reason_for(weight.device.type if weight is not None else "cpu", folder)


@functools.cache
def reason_for(device_type: str, folder: Path | None = None) -> str | None:
    """Why artefacts for one kind of device cannot be made in this process, or None.

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
        here = primary_key({**environment_parts(device_type), "compiler": _compiler(device_type)})
        passed = _passed(folder)
        if here in passed:
            return None
    problem = run(device_type)
    if problem:
        return f"the self-check of torch {torch.__version__} on {device_type} failed: {problem}"
    if folder is not None:
        try:
            make_private(folder)
            replace_file(folder / _PASSED, json.dumps([*passed, here][-_MOST_PASSED:]).encode(), folder)
        except OSError as error:
            log.debug("Nexfort: that the self-check passed could not be stored: %s", error)
    return None


def _passed(folder: Path) -> list[str]:
    """The keys of machines on which the self-check passed."""
    try:
        found = json.loads((folder / _PASSED).read_text())
    except (OSError, ValueError):  # never written, or damaged: the check is made again
        return []
    return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []


def _compiler(device_type: str) -> list[object]:
    """What compiles for a device besides what the key of an environment has: the C++ compiler, by path and time."""
    if device_type != "cpu":
        return []
    from torch._inductor.cpp_builder import get_cpp_compiler

    path = shutil.which(get_cpp_compiler()) or ""
    return [path, os.stat(path).st_mtime if path else 0]


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
    """Why Inductor finds no C++ compiler, or None."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return (
            f"no C++ compiler was found ({first[:120]}), and compiling for the CPU needs one; install gcc (g++) or "
            "clang, or name one in the variable CXX"
        )
    return None
