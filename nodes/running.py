# SPDX-License-Identifier: Apache-2.0
"""The prompt that ComfyUI runs now: its id, its nodes, and the workflow of the front end that it was made of.

It reads ComfyUI's queue and changes nothing. Where no server runs there is no prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """`workflow` is the id that the front end gave its workflow; None for a prompt queued without one, over the API."""

    id: str
    workflow: str | None
    nodes: Mapping[str, Any]

    def has(self, node: str, kind: str) -> bool:
        """Whether this prompt holds a node with this id and class."""
        found = self.nodes.get(node)
        return isinstance(found, Mapping) and found.get("class_type") == kind


def server() -> Any | None:
    """ComfyUI's server, through which front ends are told; None where there is none."""
    module = sys.modules.get("server")  # not imported here: where nobody has, nobody listens
    return getattr(getattr(module, "PromptServer", None), "instance", None)


def prompt() -> Prompt | None:
    """The prompt that runs, None between prompts and where code runs nodes by itself."""
    queue = getattr(server(), "prompt_queue", None)
    if queue is None:
        return None
    running, _ = queue.get_current_queue_volatile()
    if len(running) != 1:  # ComfyUI runs one at a time
        return None
    _, number, nodes, extra, *_ = running[0]
    return Prompt(number, _workflow(extra), nodes)


def nothing_ran() -> bool:
    """Whether there is a server that was given no prompt yet, and ComfyUI has loaded no model."""
    queue = getattr(server(), "prompt_queue", None)
    loaded = getattr(sys.modules.get("comfy.model_management"), "current_loaded_models", None)
    try:
        return loaded == [] and not queue.get_tasks_remaining() and not queue.get_history(max_items=1)  # type: ignore[union-attr]
    except (AttributeError, TypeError):  # no server, or a queue of another version
        return False


def _workflow(extra: Any) -> str | None:
    """The id of the workflow in a prompt's extra data, where anything may stand: whoever queues a prompt writes it."""
    for key in ("extra_pnginfo", "workflow", "id"):
        extra = extra.get(key) if isinstance(extra, Mapping) else None
    return extra if isinstance(extra, str) and extra else None
