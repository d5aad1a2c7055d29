# SPDX-License-Identifier: Apache-2.0
"""Eligibility: why a call of a backbone runs without regions: switched off, traced by others, or not supported here."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..cudagraphs.host_constants import tensors_in
from ..dispatch.eager_reasons import unfit_modes
from ..runtime.engine_state import EngineState
from ..system import compiler_processes
from ..system.process_settings import disabled
from .support import NotNow, unsupported

log = logging.getLogger("nexfort")


class Eligibility:
    """Whether calls of one engine's backbone may run compiled."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._unsupported: str | None = None  # "" once it is known that it is supported

    def reason(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why a call runs without regions: a reason, "" where the user asked for it, None if it does not."""
        if self._state.config.disable or disabled():
            return ""
        if torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or _exported_here()):
            return "it is being traced by torch.compile or torch.export"
        if (reason := unfit_modes(self._state, args, kwargs)) is not None:
            return reason
        if self._unsupported is None:
            stop = compiler_processes.cancel.set(self._state.hooks.cancel)
            try:
                given = tensors_in((args, kwargs))
                self._unsupported = unsupported(self._state.root, self._state.store.root, given) or ""
            except NotNow as error:  # the next step asks again
                return str(error)
            finally:
                compiler_processes.cancel.reset(stop)
            if self._unsupported:
                log.warning("Nexfort: running eager: %s", self._unsupported)
        return self._unsupported or None


def _exported_here() -> bool:
    """Whether this thread is inside torch.export; the flag that says so is set for all threads of the process."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return bool(_get_current_dispatch_mode_stack())  # its fake tensors are a mode of the thread that traces
