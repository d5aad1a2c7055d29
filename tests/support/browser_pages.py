# SPDX-License-Identifier: Apache-2.0
"""Pages of a ComfyUI server with its own front end, in a headless Chromium. No test lives here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import browser
import pytest
import served

from nexfort_engine.cli.comfy_server import ComfyServer


@pytest.fixture(scope="module")
def comfyui() -> Path:
    """The ComfyUI of this machine, where there is a browser for it."""
    browser.front_end_or_skip()
    return served.comfyui_or_skip()


@pytest.fixture(scope="module")
def base(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory with a tiny Flux."""
    return served.base_folder(tmp_path_factory.mktemp("base"), comfyui, "flux_unet", "taesd_flux")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact cache that is empty at first."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(comfyui: Path, base: Path, cache: Path) -> Iterator[ComfyServer]:
    """A server with ComfyUI's real front end."""
    root = str(browser.front_end_or_skip())
    with served.server(comfyui, base, cache, "--cache-classic", "--front-end-root", root) as running:
        yield running


@pytest.fixture(scope="module")
def chromium(comfyui: Path) -> Iterator[Any]:
    """The browser."""
    with browser.running() as running:
        yield running


@pytest.fixture
def page(chromium: Any, server: ComfyServer, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page of the server."""
    with page_of(chromium, server) as opened:
        yield opened


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


@pytest.fixture(scope="module")
def filled(server: ComfyServer) -> ComfyServer:
    """The server after a compiled prompt, so that cache and report hold something."""
    if not server.get("/nexfort/cache")["count"]:
        server.run(served.tiny_workflow("flux_compile_model"), timeout=300)
    return server
