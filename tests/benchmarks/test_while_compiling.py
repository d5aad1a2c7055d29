# SPDX-License-Identifier: Apache-2.0
"""Steps beside the compiler: the command measures a small backbone on a CPU, and its figures are what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.while_compiling import of, parse

ROOT = Path(__file__).resolve().parents[2]


def test_figures_of_steps() -> None:
    found = of([0.2, 0.1, 0.3], 0.1)
    assert found == {
        "steps": 3, "median_ms": 200.0, "p95_ms": 200.0, "most_ms": 300.0, "mean_ms": 200.0, "ratio": 2.0
    }  # fmt: skip
    assert of([]) == {"steps": 0} and "ratio" not in of([0.1])
    assert parse(["sdxl"]).steps == 20


@pytest.mark.comfy
@pytest.mark.large
def test_it_measures_on_a_cpu(comfyui: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.while_compiling", "wan", "--small", "--size", "64x64", "--steps", "4"]
    environment = {**os.environ, "COMFYUI_PATH": str(comfyui)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["eager"]["steps"] == 8 and found["after"]["steps"] == 4
    assert found["artefacts"] > 2 and not found["uncompiled"] and found["first_step_ms"] > 0
