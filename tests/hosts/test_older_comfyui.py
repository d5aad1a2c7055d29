# SPDX-License-Identifier: Apache-2.0
"""The contracts of this folder on an older ComfyUI, where COMFYUI_PATH_OLD names one.

Each ComfyUI wants companions of its own (comfy-kitchen, comfy-aimdo), so COMFYUI_PYTHON_OLD names the Python of its
environment; without that it is the one that runs the tests. Companions of another ComfyUI are refused: contracts that
hold with them say little.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nexfort_engine.hosts.comfy_install import comfyui_version, is_comfyui

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


ASK_VERSIONS = """
import importlib.metadata as metadata, json, sys
print(json.dumps({name: metadata.version(name) for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def python(old: Path) -> str:
    """The Python of its environment."""
    found = os.environ.get("COMFYUI_PYTHON_OLD") or sys.executable
    lines = (old / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(match.groups() for line in lines if (match := re.match(r"(comfy-[a-z]+)==(\S+)", line)))
    done = subprocess.run([found, "-c", ASK_VERSIONS, *pinned], capture_output=True, text=True, check=False)
    has = json.loads(done.stdout) if done.returncode == 0 else done.stderr.strip()[-200:]
    assert has == pinned, (
        f"{found} has {has}; ComfyUI {comfyui_version(old)} expects {pinned}. Make an environment for it "
        f"(pip install -r {old / 'requirements.txt'} pytest hypothesis diffusers) and name its Python in "
        "COMFYUI_PYTHON_OLD"
    )
    return found


def test_there_are_contracts_to_run() -> None:
    assert len(FILES) > 5


@pytest.mark.parametrize("file", FILES)
def test_contracts_hold_on_an_older_comfyui(old: Path, python: str, file: str, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("COMFYUI_", "PYTEST_", "NEXFORT_"))}
    # a cache of its own: nothing meets what the newer one left
    options = ["-m", "not gpu", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'run'}"]
    done = subprocess.run(
        [python, "-m", "pytest", *options, str(HERE / file)],
        cwd=HERE.parent.parent,
        env={**env, "COMFYUI_PATH": str(old)},
        capture_output=True,
        text=True,
        check=False,
    )
    told = f"{done.stdout[-4000:]}\n{done.stderr[-1000:]}"
    assert done.returncode == 0, f"ComfyUI {comfyui_version(old)} by {python}:\n{told}"
    assert "no ComfyUI was found" not in done.stdout
    assert re.search(r"\d+ passed", done.stdout), f"nothing was proved:\n{told}"
