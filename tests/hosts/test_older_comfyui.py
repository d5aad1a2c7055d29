# SPDX-License-Identifier: Apache-2.0
"""The contracts of this folder on an older ComfyUI, where COMFYUI_PATH_OLD names one.

Each ComfyUI wants companions of its own (comfy-kitchen, comfy-aimdo), so COMFYUI_PYTHON_OLD names the Python of its
environment; without that it is the one that runs the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nexfort_engine.locate import comfyui_version, is_comfyui

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
HERE = Path(__file__).resolve().parent
FILES = sorted(path.name for path in HERE.glob("test_comfy*.py"))


@pytest.fixture(scope="module")
def old() -> Path:
    """The older ComfyUI."""
    named = os.environ.get("COMFYUI_PATH_OLD")
    if not named:
        pytest.skip("set COMFYUI_PATH_OLD to an older ComfyUI, and COMFYUI_PYTHON_OLD to the Python of its environment")
    path = Path(named).expanduser().absolute()
    assert is_comfyui(path), f"COMFYUI_PATH_OLD is {path}, which has no main.py and comfy/"
    return path


def test_there_are_contracts_to_run() -> None:
    assert len(FILES) > 5


@pytest.mark.parametrize("file", FILES)
def test_contracts_hold_on_an_older_comfyui(old: Path, file: str, tmp_path: Path) -> None:
    python = os.environ.get("COMFYUI_PYTHON_OLD") or sys.executable
    env = {key: value for key, value in os.environ.items() if not key.startswith(("COMFYUI_", "PYTEST_", "NEXFORT_"))}
    # a cache of its own: nothing meets what the newer one left
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not gpu",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        [*command, str(HERE / file)],
        cwd=HERE.parent.parent,
        env={**env, "COMFYUI_PATH": str(old)},
        capture_output=True,
        text=True,
        check=False,
    )
    told = f"{done.stdout[-4000:]}\n{done.stderr[-1000:]}"
    assert done.returncode == 0, f"ComfyUI {comfyui_version(old)} by {python}:\n{told}"
    assert "no ComfyUI was found" not in done.stdout
