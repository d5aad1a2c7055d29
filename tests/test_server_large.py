# SPDX-License-Identifier: Apache-2.0
"""Shipped workflows of families whose networks ComfyUI knows at one width only, on a real server, to an image.

Their files have that width and as few layers as detection allows. That still is gigabytes: `make test-large`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import served

from nexfort_engine.headless import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.large]

NAMES = ("sdxl_compile_model_vae", "qwen_image_compile_model_vae", "z_image_compile_model")


@pytest.fixture
def base(name: str, tmp_path: Path) -> Iterator[Path]:
    """A base directory with the files of one workflow, which go at the end: pytest keeps its directories."""
    found = served.base_folder(tmp_path / "base", served.comfyui_or_skip(), *served.tiny_for(name)["files"])
    yield found
    for path in (found / "models").rglob("tiny_*.safetensors"):
        path.unlink()


@pytest.fixture
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A server of its own for each: a model's memory goes with it."""
    with served.server(served.comfyui_or_skip(), base, tmp_path_factory.mktemp("cache"), "--cache-classic") as running:
        yield running


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_workflow_gives_the_eager_image(server: ComfyServer, base: Path, name: str) -> None:
    served.compiled_equals_eager(server, base, name, timeout=1200)
    assert not [one["report"]["eager"] for one in server.get("/nexfort/report")["engines"] if one["report"]["eager"]]
