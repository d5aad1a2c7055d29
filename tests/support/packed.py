# SPDX-License-Identifier: Apache-2.0
"""The files that the registry's package holds, as `comfy node pack` takes them: tracked ones that .comfyignore leaves.

No test lives here. Without git nobody knows what is tracked, and the test is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> list[str]:
    """Every file that git knows, below the project's root."""
    asked = None
    if shutil.which("git") is not None:
        asked = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=False)
    if asked is None or asked.returncode != 0:
        pytest.skip("no git, or no checkout of it: nobody knows which files are tracked")
    return [name for name in asked.stdout.decode().split("\0") if name and (ROOT / name).exists()]


def ignored() -> list[str]:
    """The lines of .comfyignore, each a file or, ending in a slash, a folder of the root."""
    lines = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.strip() and not line.startswith("#")]
    assert all(line.startswith("/") and not set(line) & set("*?![] ") for line in found), "only /name and /name/"
    return [line[1:] for line in found]


def names() -> list[str]:
    """The names of the packed files."""
    left_out = ignored()
    folders = tuple(name for name in left_out if name.endswith("/"))
    return [name for name in tracked() if name not in left_out and not name.startswith(folders)]


def unpack(folder: Path) -> Path:
    """The package unpacked into a new folder, as a manager does it."""
    for name in names():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    return folder
