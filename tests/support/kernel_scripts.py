# SPDX-License-Identifier: Apache-2.0
"""Scripts about kernels, each in a process of its own: what Triton is told before it is imported differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def run(script: str, *arguments: str, **environment: str) -> None:
    """Run one of tests/kernels; raises AssertionError with what it printed if it fails."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "kernels" / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
