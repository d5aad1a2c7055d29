# SPDX-License-Identifier: Apache-2.0
"""What is imported ahead: who waits for it, in which order, and what is left of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nexfort_engine.lowering import preload
from nexfort_engine.system import process_settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Errors of threads, in a process that has imported nothing ahead yet."""
    found: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    monkeypatch.setattr(preload, "_threads", {})
    return found


def test_it_says_nothing_where_inductor_is_another_one(said: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor

    monkeypatch.delattr(torch._inductor, "CompiledArtifact")  # older than torch 2.8
    preload.import_ahead()
    preload.wait_for_import()
    assert not said


@pytest.mark.parametrize("error", [ImportError("gone"), OSError("disk full")])
def test_a_failure_is_left_to_who_needs_what_was_imported(
    error: Exception, said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise error

    monkeypatch.setattr(preload, "import_all", fail)
    preload.import_tracing_ahead()
    preload.wait_for_import()
    assert not said


def test_other_threads_have_python_back_soon_while_it_imports(said: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = sys.getswitchinterval(), list[float]()
    monkeypatch.setattr(preload, "import_all", lambda _: found.append(sys.getswitchinterval()))
    preload.import_tracing_ahead()
    preload.wait_for_import()
    assert found == [pytest.approx(preload.SWITCH)] and sys.getswitchinterval() == pytest.approx(before) and not said


def test_a_module_that_this_torch_lacks_keeps_no_other_back() -> None:
    sys.modules.pop("xml.dom.expatbuilder", None)
    preload.import_all(["torch.no_such_module", "xml.dom.expatbuilder"])
    assert "xml.dom.expatbuilder" in sys.modules


def test_the_second_follows_the_first_and_both_leave_nothing_set(
    said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, order = threading.Event(), list[str]()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = process_settings.snapshot()

    def first() -> None:
        assert go.wait(60)
        order.append("first")

    def second(_: Any) -> None:
        order.append("second")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "as torch sets it when it is asked for its folder"

    monkeypatch.setattr(preload, "_import_inductor", first)
    monkeypatch.setattr(preload, "import_all", second)
    for _ in range(2):
        preload.import_ahead()
        preload.import_tracing_ahead()
    assert order == []
    go.set()
    preload.wait_for_import()
    assert order == ["first", "second"] and not said
    assert process_settings.snapshot() == before and "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("idle", [True, False])
def test_garbage_is_looked_for_before_a_first_prompt_and_not_beside_it(
    idle: bool, said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is frozen: the caches that ComfyUI has at its start are garbage later, and hold models then."""
    called = list[str]()

    def import_all(names: Any) -> None:
        called.append(next(iter(names)))
        if names == ["the host's"]:
            raise AttributeError("another version")

    monkeypatch.setattr(preload, "import_all", import_all)
    monkeypatch.setattr(gc, "collect", lambda: called.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: called.append("freeze"))
    preload.import_tracing_ahead(["the host's"], lambda: idle)
    preload.wait_for_import()
    assert called == ["the host's", preload._TRACING[0], *["collect"] * idle] and not said


def test_what_a_first_load_asks_is_hashed_ahead_and_nobody_waits(
    said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import codecache
    from torch._inductor.runtime import triton_compat

    asked, go = [], threading.Event()

    def key(name: str) -> str:
        asked.append((name, threading.current_thread().name))
        assert go.wait(60)
        return name

    monkeypatch.setattr(codecache, "torch_key", lambda: key("torch"))
    monkeypatch.setattr(triton_compat, "triton_key", lambda: key("triton"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    preload.import_ahead()
    preload.wait_for_import()
    hashing = [thread for thread in threading.enumerate() if thread.name == "nexfort-hashes"]
    go.set()
    for thread in hashing:
        thread.join(60)
    assert asked == [("torch", "nexfort-hashes"), ("triton", "nexfort-hashes")] and not said


_TRACED = """
import sys, torch, nexfort_engine
from nexfort_engine.lowering import preload as importing; from nexfort_engine.compilation import jobs as lowering
def attached(width):
    layers = torch.nn.GroupNorm(2, width), torch.nn.SiLU(), torch.nn.Conv2d(width, width, 3)
    return nexfort_engine.compile(torch.nn.Sequential(*layers).eval().requires_grad_(False))
capture, seen = lowering._captured, []
def noted(job):
    running = [name for name, thread in importing._threads.items() if thread.is_alive()]
    before = set(sys.modules)
    found = capture(job)
    seen.append(running + sorted(set(sys.modules) - before))
    return found
lowering._captured = noted
"""
_FIRST = f"""{_TRACED}
compiled = attached(8)
importing.wait_for_import()
compiled(torch.randn(2, 8, 12, 12))
print(*seen)
"""
_SECOND = f"""{_TRACED}
compiled = attached(8)
compiled(torch.randn(2, 8, 12, 12))
assert not seen and importing._LATE not in importing._threads, "it was stored"
attached(16)(torch.randn(2, 16, 12, 12))
print(*seen)
"""


@pytest.mark.large
def test_a_first_trace_imports_nothing_that_was_not_imported_ahead(tmp_path: Path) -> None:
    """While the model is loaded, where the store has nothing for it; later than for another one, too."""
    environment = {**os.environ, "NEXFORT_CACHE_DIR": str(tmp_path), "NEXFORT_WORKERS": "0"}
    for code in (_FIRST, _SECOND):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "[]"
