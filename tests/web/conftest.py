# SPDX-License-Identifier: Apache-2.0
"""What tests of the front end share: a server with ComfyUI's own front end, a headless Chromium, a page.

A server takes longer to start than most of these tests. Files share one, but for those that begin where nothing was
measured or compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
import served
import workflow_templates
from browser_pages import front_end_server, page_of

from nexfort_engine.cli.comfy_server import ComfyServer


@pytest.fixture(scope="package")
def comfyui() -> Path:
    """The ComfyUI of this machine, where there is a browser for it."""
    browser.front_end_or_skip()
    return served.comfyui_or_skip()


@pytest.fixture(scope="package")
def base(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory with a tiny Flux, a picture, and empty files for all else that the templates name."""
    made = served.base_folder(tmp_path_factory.mktemp("base"), comfyui, "flux_unet", "taesd_flux")
    served.picture(made)
    served.name_only(made, (one.graph() for one in workflow_templates.TEMPLATES))
    return made


@pytest.fixture(scope="package")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact cache that is empty at first."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="package")
def server(comfyui: Path, base: Path, cache: Path) -> Iterator[ComfyServer]:
    """A server with ComfyUI's real front end."""
    with front_end_server(comfyui, base, cache, "--cache-classic") as running:
        yield running


@pytest.fixture(scope="package")
def chromium(comfyui: Path) -> Iterator[Any]:
    """The browser."""
    with browser.running() as running:
        yield running


@pytest.fixture
def page(chromium: Any, server: ComfyServer, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page of the server."""
    with page_of(chromium, server) as opened:
        yield opened


@pytest.fixture(scope="module")
def kept(chromium: Any, server: ComfyServer) -> Iterator[Any]:
    """One page for all tests of a file that begins each anew: to open one takes as long as most of them."""
    with page_of(chromium, server) as opened:
        yield opened


@pytest.fixture
def filled(server: ComfyServer) -> ComfyServer:
    """The server after a compiled prompt, so that cache and report hold something."""
    if not server.get("/nexfort/cache")["count"]:
        browser.forget(server)  # what it has compiled it would not store again
        server.run(served.tiny_workflow("flux_compile_model"), timeout=300)
    return server
