# SPDX-License-Identifier: Apache-2.0
"""Lowering on a machine with a GPU: its workers leave the GPU's memory alone."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from pathlib import Path

import context_watch
import pytest
from gpu_blocks import BLOCKS, captured

from nexfort_engine import pool
from nexfort_engine.config import CompileConfig

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).resolve().parent
OPTIONS = CompileConfig.parse(None).inductor_options("cuda")


def _never() -> str:
    raise AssertionError("the worker did not do it")


def test_the_watch_sees_a_context(tmp_path: Path) -> None:
    code = "import context_watch, time, torch; torch.zeros(1, device='cuda'); time.sleep(1)"
    variables = {**os.environ, context_watch.WATCH: str(tmp_path / "stacks")}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=TESTS, env=variables)
    assert (tmp_path / "stacks").exists()


def test_a_worker_makes_no_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(context_watch.WATCH, str(tmp_path / "stacks"))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    answers: queue.Queue[str | None] = queue.Queue()
    with pool.Pool(1, "cuda", None) as helpers:
        for kind in BLOCKS:
            (tmp_path / kind).mkdir()
            helpers.submit(captured(kind), tmp_path / kind, ["context_watch"], OPTIONS, "cuda:0", answers.put, _never)
        assert [answers.get(timeout=300) for _ in BLOCKS] == [None] * len(BLOCKS)
    stacks = (tmp_path / "stacks").read_text() if (tmp_path / "stacks").exists() else ""
    assert not stacks, f"the worker got a context on the GPU, which takes half a GiB; it was at:\n{stacks}"
