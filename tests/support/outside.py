# SPDX-License-Identifier: Apache-2.0
"""What of a compiled network still runs as Python, against what the report says does. No test lives here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from nexfort_engine.modules.regions import find_regions

_CALL = nn.Module._call_impl.__code__


def unexplained(
    root: nn.Module, report: dict[str, Any], call: Callable[[], object], *, whole: bool = True
) -> list[str]:
    """Modules with weights of their own whose code runs in a call, and that the report does not name as eager.

    A region is called like any module and then runs its artefact; what holds regions is the network's own code. Neither
    counts. whole: as for `find_regions`. Calls are seen by a profiler: with a hook for all modules they would be eager.
    """
    names = {id(module): name for name, module in root.named_modules()}
    ran: dict[str, None] = {}

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is _CALL:
            module = frame.f_locals["self"]
            if id(module) in names and next(module.parameters(recurse=False), None) is not None:
                ran[names[id(module)]] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    regions = [spec.path for spec in find_regions(root, whole=whole)]
    eager = [row["region"].replace("(whole module)", "") for row in report["eager"]]
    return [
        name
        for name in ran
        if not any(path == name or path.startswith(f"{name}." if name else "") for path in regions)
        and not any(path in ("", name) or name.startswith(f"{path}.") for path in eager)
    ]
