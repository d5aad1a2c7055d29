# SPDX-License-Identifier: Apache-2.0
"""Whether the ComfyUI of the tests is older than the one that they are written for. No test lives here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nexfort_engine.hosts.comfy_install import comfyui_version

WRITTEN_FOR = (0, 33)


def is_older() -> bool:
    """Whether the imported ComfyUI is older than `WRITTEN_FOR`. False where none was imported."""
    comfy = sys.modules.get("comfy")
    if comfy is None:
        return False
    said = comfyui_version(Path(next(iter(comfy.__path__))).parent)
    return said is None or tuple(map(int, said.split(".")[:2])) < WRITTEN_FOR


@contextmanager
def skipped_where_missing() -> Iterator[None]:
    """Skip a test whose part an older ComfyUI does not have."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("comfy.") and is_older():
            pytest.skip(f"this ComfyUI is older than {error.name}")
        raise
