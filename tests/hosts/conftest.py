# SPDX-License-Identifier: Apache-2.0
"""What the tests on ComfyUI's own patchers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def pair() -> Iterator[Callable[[str], Any]]:
    """Makes an eager patcher and its compiled clone by the name of their backbone; see patchers.py."""
    from patchers import pairs

    with pairs() as make_pair:
        yield make_pair


@pytest.fixture(scope="module")
def files(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """ComfyUI's nodes for prompts.py, and the names of two checkpoints that its loader finds."""
    from prompts import comfyui_nodes, tiny_files
    from subjects import graphs_as_they_are

    with graphs_as_they_are(), comfyui_nodes(comfyui):
        yield tiny_files(tmp_path_factory.mktemp("models"))


@pytest.fixture
def quick() -> Iterator[None]:
    """Graphs run as they are: lowering them is not what is asked here."""
    from subjects import graphs_as_they_are

    with graphs_as_they_are():
        yield
