# SPDX-License-Identifier: Apache-2.0
"""What ComfyUI's users see of compiling: a line under the node that executes, and whoever listens for a report.

Nothing here compiles or decides anything.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from ...reporting import progress
from ...reporting.report import Report

log = logging.getLogger("nexfort")

# Called with how far compiling is, and with None when a call of the network has ended, well or not.
Listener = Callable[[Report, progress.Event | None], None]
_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Tell `listener` of everything that `shown` shows from now on, on the thread that samples or makes artefacts."""
    _listeners.append(listener)


@contextlib.contextmanager
def shown(report: Report) -> Iterator[None]:
    """One call of a network with this report: what is compiled in it is shown."""
    with progress.use_sink(functools.partial(_show, report)):
        try:
            yield
        finally:
            _tell(report, None)


def _show(report: Report, event: progress.Event) -> None:
    _tell(report, event)
    server = _server()
    if server is None:  # ComfyUI as a library: nobody to show it to
        return
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    if context is not None:
        server.send_progress_text(event.text, context.node_id)


def running_prompt() -> Hashable:
    """The number of the prompt that ComfyUI's server runs now; None where it runs none or there is no server."""
    queue = getattr(_server(), "prompt_queue", None)
    return next(iter(list(getattr(queue, "currently_running", ()))), None)


def _server() -> Any | None:
    """ComfyUI's server; None where ComfyUI is used as a library."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def _tell(report: Report, event: progress.Event | None) -> None:
    for listener in list(_listeners):
        try:
            listener(report, event)
        except Exception as error:
            # Being told is a courtesy: the picture is made whether or not somebody watches.
            _listeners.remove(listener)
            log.warning("Nexfort: showing progress failed (%s: %s); going on without it", type(error).__name__, error)
