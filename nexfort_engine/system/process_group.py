# SPDX-License-Identifier: Apache-2.0
"""Whether this process belongs to a group of processes that speak with each other, as torch.distributed knows it.

Nothing is imported for the question: a process without torch.distributed belongs to none.
"""

from __future__ import annotations

import sys
from typing import Any


def distributed() -> Any:
    """torch.distributed where a group of processes was begun, None elsewhere."""
    found = sys.modules.get("torch.distributed")
    if found is None or not found.is_available() or not found.is_initialized():
        return None
    return found


def others_speak() -> bool:
    """Whether there are other processes that a step of this one may have to wait for."""
    found = distributed()
    return found is not None and found.get_world_size() > 1
