# SPDX-License-Identifier: Apache-2.0
"""A machine without what compiling needs, or with a torch that is too old: one sentence, and the eager result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import small_net
import torch
from small_net import ROOT, Small, assert_runs_eager, sentence

import nexfort_engine
from nexfort_engine.compilation import eligibility, support

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
# fixtures
cache, forgetful, lines, fresh_support = small_net.cache, small_net.forgetful, small_net.lines, small_net.fresh_support


# ---- no compiler ---------------------------------------------------------------------------------------------

_NO_GCC = """
import json, logging, sys, torch
sys.path[:0] = sys.argv[1:]
logging.basicConfig(level=logging.WARNING, format="%(name)s|%(message)s")
import nexfort_engine
from small_net import Small, run
compiled = nexfort_engine.compile(Small())
same = all(torch.equal(run(compiled), run(Small())) for _ in range(3))
print(json.dumps({"same": same, "report": compiled.report.as_dict()}))
"""


@pytest.mark.parametrize(
    "cxx",
    [
        pytest.param(None, id="empty PATH"),
        pytest.param("/nowhere/bin/g++", id="CXX of nowhere", marks=pytest.mark.large),
    ],
)
def test_without_a_cpp_compiler_one_line_and_the_eager_result(cxx: str | None, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "NEXFORT_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TORCH_INDUCTOR_INSTALL_GXX", None)
    environment.pop("CXX", None)
    if cxx is not None:
        environment |= {"PATH": os.environ["PATH"], "CXX": cxx}
    command = [sys.executable, "-c", _NO_GCC, str(ROOT), str(Path(__file__).with_name("support"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["same"] and answer["report"]["artefacts_compiled"] == 0
    (row,) = answer["report"]["eager"]
    sentence(row["reason"], "no C++ compiler was found", "compiling for the CPU needs one", "install gcc", "CXX")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("nexfort")]
    sentence(line, row["reason"])
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("fresh_support")
def test_without_triton_one_line_and_the_eager_result(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]], cache: Path
) -> None:
    from torch.utils import _triton

    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    monkeypatch.setattr(eligibility, "unsupported", lambda root, folder=None, given=(): support.reason_for("cuda"))
    compiled = nexfort_engine.compile(Small())
    for _ in range(3):
        assert_runs_eager(compiled, "Triton was not found", "cuda", "needs Triton", "install the triton package")
    (line,) = lines()
    sentence(line, "Nexfort: running eager:", "Triton")
    assert not cache.exists()


# ---- torch too old -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_support")
@pytest.mark.parametrize("version", ["2.10.1", "2.4.0+cu121", "1.13.1"])
def test_with_an_old_torch_one_line_and_the_eager_result(
    version: str, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]], cache: Path
) -> None:
    compiled = nexfort_engine.compile(Small())
    monkeypatch.setattr(torch, "__version__", version)
    for _ in range(3):
        assert_runs_eager(compiled, f"torch {version} was found", "2.11 or newer is needed", "update torch")
    (line,) = lines()
    sentence(line, "Nexfort: running eager:", version)
    assert not cache.exists()
