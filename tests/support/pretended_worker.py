# SPDX-License-Identifier: Apache-2.0
"""Imported in a worker by a job that lists it among its modules: the worker has a pretended GPU for good.

As with a real one, what is forked from a process that has asked for its device cannot have it. What is said of a kernel
that a graph calls is compared with what Inductor reads in it.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_gpu import FORKED, READ, pretend

from nexfort_engine.kernels import inductor_launch
from nexfort_engine.lowering.kernel_forks import _Result
from nexfort_engine.lowering.worker import FORK

_asked = False
_lost = False


def _note(variable: str, what: str) -> None:
    """A line in the file that a variable of the environment names, if it names one."""
    if variable in os.environ:
        with Path(os.environ[variable]).open("a") as file:
            file.write(f"{what}\n")


def _watch_device() -> None:
    answer = torch.cuda.current_device

    def current_device(*given: Any) -> Any:
        global _asked
        if _lost:
            raise RuntimeError("CUDA error: initialization error")
        _asked = True
        return answer(*given)

    def forked() -> None:
        global _lost
        _lost = _asked
        _note(FORKED, sys._getframe(1).f_code.co_name)

    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", current_device)
    patch.setattr(torch.cuda, "is_initialized", lambda: _asked)
    os.register_at_fork(after_in_child=forked)


def _note_what_is_done_again() -> None:
    again = _Result._again

    def noted(result: _Result) -> Any:
        _note(FORKED, "again")
        return again(result)

    pytest.MonkeyPatch().setattr(_Result, "_again", noted)


def _read_kernels() -> None:
    from torch._higher_order_ops import triton_kernel_wrap

    identify_mutated_tensors = getattr(triton_kernel_wrap, "identify_mutated_tensors", None)
    if identify_mutated_tensors is None:  # torch 2.14 and newer are not told
        return
    said = inductor_launch._said

    def read(kernel: Any, written: Sequence[str]) -> Callable[..., list[str]]:
        def both(*given: Any) -> list[str]:
            found, told = identify_mutated_tensors(*given), said(kernel, written)(*given)
            if found != told:
                raise AssertionError(f"{kernel.fn.__name__} writes to {found}, and what is said is {told}")
            _note(READ, kernel.fn.__name__)
            return told

        return both

    pytest.MonkeyPatch().setattr(inductor_launch, "_said", read)


if FORK not in sys.argv:
    raise RuntimeError("the worker was not forked: it started anew")
pretend(pytest.MonkeyPatch())
_watch_device()
_note_what_is_done_again()
_read_kernels()
