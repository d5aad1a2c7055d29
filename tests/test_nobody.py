# SPDX-License-Identifier: Apache-2.0
"""Users whom nobody knows: without a name, without a home, in a home that they may not enter. A step runs for each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nexfort_engine

ROOT = Path(nexfort_engine.__file__).resolve().parent.parent
NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
# the places and the compiler of other tests
OTHERS = ("HOME", "NEXFORT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CXX", "NEXFORT_TEST_KERNELS")
BEFORE = """
import os, pwd, sys
def unknown(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")
pwd.getpwuid = unknown
"""
ELSEWHERE = """
import torch, torch._inductor.compile_fx, torch.utils.cpp_extension  # what only root can read is read by now
os.setgroups([]); os.setgid(1003); os.setuid(1003)
"""
STEPS = """
import torch, nexfort_engine
net = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Linear(24, 8)).requires_grad_(False)
compiled, x = nexfort_engine.compile(net), torch.randn(2, 16)
with torch.inference_mode():
    for _ in range(2):
        assert torch.allclose(compiled(x), net(x), atol=1e-5)
before = {name for name in ("LOGNAME", "USER", "LNAME", "USERNAME") if name in os.environ}
print(before, nexfort_engine.api.default_root(), compiled.report, sep="\\n")
"""


def told(code: str, tmp_path: Path, **variables: str) -> list[str]:
    """What a process prints that knows no user by a number; `variables` are all that tell it one."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o777)
    kept = {name: value for name, value in os.environ.items() if name not in (*NAMES, *OTHERS)}
    given = {**kept, "TMPDIR": str(tmp_path / "tmp"), "NEXFORT_WORKERS": "0", **variables}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.large  # below is one who has no home either
def test_a_user_without_a_name(tmp_path: Path) -> None:
    names, root, *report = told(BEFORE + STEPS, tmp_path, HOME=str(tmp_path / "home"))
    assert names == "set()", "no name is left behind"
    assert root == str(tmp_path / "home" / ".cache" / "nexfort")
    assert "1 compiled" in report[1] and "eager" not in "".join(report)


@pytest.mark.large  # above one without a name has a home
def test_a_user_without_name_and_home(tmp_path: Path) -> None:
    _, root, *report = told(BEFORE + STEPS, tmp_path)
    assert root == str(tmp_path / "tmp" / f"nexfort-{os.geteuid()}")
    assert "1 compiled" in report[1] and "eager" not in "".join(report)


def test_a_home_that_may_not_be_entered(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
        if folder.name.startswith("pytest-of-"):
            break
    (tmp_path / "home").mkdir(mode=0o700)
    _, root, *report = told(
        BEFORE + "os.environ['USER'] = 'u'\n" + ELSEWHERE + STEPS, tmp_path, HOME=str(tmp_path / "home")
    )
    text = "\n".join(report)
    # a newer torch looks into more folders
    if denied := re.search(r"the self-check of .* Permission denied: .*", text):
        pytest.skip(f"what this torch needs is root's alone here: {denied[0]}")
    assert "1 compiled" in text and "eager" not in text, text
    assert text.count(f"{root} cannot be written (Permission denied)") == 1
    assert "damaged" not in text, "what cannot be looked at is not called that"
