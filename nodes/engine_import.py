# SPDX-License-Identifier: Apache-2.0
"""The engine as answers to requests need it: imported once, by one thread at a time, behind what is imported ahead.

A page may ask for several things in the first second of a server, each on a thread of its own, while the compiler is
imported on another. Two threads that import what imports each other may see half of a module.
"""

from __future__ import annotations

import threading

_one_at_a_time = threading.Lock()
_is_here = False


def engine_is_here() -> None:
    """Wait until the engine is imported, or import it. To be called beside the event loop."""
    global _is_here
    if _is_here:
        return
    with _one_at_a_time:
        from nexfort_engine.lowering.preload import wait_for_import

        wait_for_import()
        import nexfort_engine.api
        import nexfort_engine.hosts.comfy.model  # noqa: F401

        _is_here = True
