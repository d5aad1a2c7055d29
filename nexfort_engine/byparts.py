# SPDX-License-Identifier: Apache-2.0
"""Which regions a network does not call: it calls other methods of them, or parts of them, and those are not compiled.

Looked for in a first step alone, with a hook on all modules; the report has to name what runs as Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .session import Session, current

if TYPE_CHECKING:
    from .dispatch import Region

REASON = "it is not called itself but by other methods or part by part, which is not compiled"


@contextlib.contextmanager
def watching(session: Session, regions: Mapping[int, Region]) -> Iterator[list[Region]]:
    """Gives a list that has the regions that ran so once the block has ended without an error."""
    ran: set[int] = set()
    found: list[Region] = []

    def note(module: nn.Module, _: Any) -> None:
        if current.get() is session and not session.inside:
            ran.add(id(module))

    handle = register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()
    for region in regions.values():
        parts = [sub for sub in region.module.modules() if id(sub) in ran and id(sub) not in regions]
        if id(region.module) not in ran and any(next(sub.parameters(recurse=False), None) is not None for sub in parts):
            found.append(region)
