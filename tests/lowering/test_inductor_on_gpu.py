# SPDX-License-Identifier: Apache-2.0
"""Lowering on a machine with a GPU: its workers leave the GPU's memory alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import context_watch
import pytest
from gpu_blocks import OPTIONS, lowered

from nexfort_engine.lowering import worker_pool

pytestmark = pytest.mark.gpu
SUPPORT = Path(__file__).resolve().parents[1] / "support"


def test_the_watch_sees_a_context(tmp_path: Path) -> None:
    code = "import context_watch, time, torch; torch.zeros(1, device='cuda'); time.sleep(1)"
    variables = {**os.environ, context_watch.WATCH: str(tmp_path / "stacks")}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=SUPPORT, env=variables)
    assert (tmp_path / "stacks").exists()


def test_a_worker_makes_no_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(context_watch.WATCH, str(tmp_path / "stacks"))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setattr(worker_pool._Forker, "_current", None)  # one that is there was started with another path
    lowered(tmp_path, "context_watch", options=OPTIONS)
    stacks = (tmp_path / "stacks").read_text() if (tmp_path / "stacks").exists() else ""
    assert not stacks, f"the worker got a context on the GPU, which takes half a GiB; it was at:\n{stacks}"


def test_layers_are_lowered_once_by_a_worker_that_lowered_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch asks for the device when it lowers, and no process that is forked afterwards can use it."""
    monkeypatch.setattr(worker_pool, "_MANY", 1)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setattr(worker_pool._Forker, "_current", None)  # one that is there may watch, which asks for the device
    payloads = lowered(tmp_path, "context_watch", ["stack"])
    assert (payloads["stack"] / "folded.json").exists() and (payloads["stack"] / "before").exists()
    (tmp_path / "again").mkdir()
    payloads = lowered(tmp_path / "again", "context_watch", ["feed_forward", "stack"])
    assert (payloads["stack"] / "folded.json").exists()
