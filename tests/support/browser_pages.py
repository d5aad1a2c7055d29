# SPDX-License-Identifier: Apache-2.0
"""Pages of a ComfyUI server with its own front end, in a headless Chromium. No test lives here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import browser
import served

from nexfort_engine.cli.comfy_server import ComfyServer


def front_end_server(comfyui: Path, base: Path, cache: Path, *arguments: str, **how: Any) -> Any:
    """`served.server` with ComfyUI's real front end."""
    root = str(browser.front_end_or_skip())
    return served.server(comfyui, base, cache, *arguments, "--front-end-root", root, **how)


@contextmanager
def page_of(chromium: Any, server: ComfyServer, size: Any = None, **settings: object) -> Iterator[Any]:
    """A page of a user who has changed nothing yet; at the end our modules must have caused no error."""
    context = chromium.new_context(viewport=size or browser.VIEWPORT, locale="en-US")
    try:
        opened, faults = browser.open_page(context, server, **settings)
        yield opened
        assert faults.found == []
        shift, moved = browser.shifted(opened)
        assert shift < browser.MOST_SHIFT, moved
    finally:
        context.close()
