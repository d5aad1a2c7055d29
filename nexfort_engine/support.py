# SPDX-License-Identifier: Apache-2.0
"""Whether this machine and this torch can compile at all, found out once a process, in one clear sentence.

torch 2.11 on a CPU or an NVIDIA card is the reference and needs only a compiler that is there. Any other torch, and any
other kind of device, is decided by a self-check (selfcheck.py) that takes one small block through the whole way.
"""

from __future__ import annotations

import functools
import re

import torch
from torch import nn

from .lower import wait_for_import

OLDEST = (2, 11)
REFERENCE = (2, 11)


def unsupported(root: nn.Module) -> str | None:
    """Why nothing can be compiled for this module here, or None."""
    weight: torch.Tensor | None = next(root.parameters(), None)
    if weight is None:
        weight = next(root.buffers(), None)
    return reason_for(weight.device.type if weight is not None else "cpu")


@functools.cache
def reason_for(device_type: str) -> str | None:
    """Why artefacts for one kind of device cannot be made in this process, or None."""
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
        from .selfcheck import run

        problem = run(device_type)
        if problem:
            return f"the self-check of torch {torch.__version__} on {device_type} failed: {problem}"
    return None


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
