# SPDX-License-Identifier: Apache-2.0
"""What a compile node's badge is told, from real reports and progress; a recorder stands for the server's events."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import by_path
import pytest

from nexfort_engine.progress import Event
from nexfort_engine.report import Report

FILE = Path(__file__).resolve().parents[2] / "nodes" / "status.py"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """The events for the front end."""
    found: list[tuple[str, Any]] = []
    server = types.ModuleType("server")
    instance = types.SimpleNamespace(send_sync=lambda name, data: found.append((name, data)))
    server.PromptServer = types.SimpleNamespace(instance=instance)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "server", server)
    yield found


@pytest.fixture
def status(sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module by itself: it needs neither ComfyUI nor an engine."""
    module = by_path.load("nexfort_status_alone", FILE)
    monkeypatch.setattr(module, "_listen", lambda: None)
    return module


def event(done: int, total: int, left: float | None = None) -> Event:
    return Event(done, total, left, "", "compiling")


def state(status: types.ModuleType, report: Report, progress: Event | None = None) -> dict[str, Any]:
    return dict(status.state(report.as_dict(), progress))


def test_the_states(status: types.ModuleType) -> None:
    report = Report()
    assert state(status, report) == {"state": "waiting", "eager": 0}
    assert state(status, report, event(0, 3)) == {
        "state": "compiling", "eager": 0, "done": 0, "total": 3, "seconds_left": None,
    }  # fmt: skip
    assert state(status, report, event(2, 3, 7.6))["seconds_left"] == 8
    report.loaded("blocks.0", "k", 0.1)
    assert state(status, report, event(3, 3)) == {"state": "warm", "eager": 0}
    report.compiled("blocks.1", "l", 2.0)
    assert state(status, report)["state"] == "compiled"


def test_blocks_that_run_eager_are_counted_once(status: types.ModuleType) -> None:
    report = Report()
    report.compiled("blocks.1", "l", 2.0)
    for reason in ("a patch", "a hook"):
        report.eager("blocks.0", reason)
    assert state(status, report) == {"state": "compiled", "eager": 1}
    whole = Report()
    whole.eager("(whole module)", "no compiler")
    assert state(status, whole) == {"state": "eager", "eager": 0}


def test_a_model_without_artefacts_after_a_call_runs_eager(status: types.ModuleType) -> None:
    report = Report()
    report.call(0.1)
    assert state(status, report) == {"state": "eager", "eager": 0}


def test_nodes_are_told_while_their_engine_lives(status: types.ModuleType, sent: list[Any]) -> None:
    report = Report()
    status.remember("4", "NexfortCompileModel", report)
    status.remember("5:2", "NexfortCompileModel", report)
    status.remember("6", "NexfortCompileVAE", None)
    status.remember(None, "NexfortCompileModel", report)
    told = {node["id"]: (node["class"], node["state"]) for node in status.nodes()}
    assert told == {
        "4": ("NexfortCompileModel", "waiting"),
        "5:2": ("NexfortCompileModel", "waiting"),
        "6": ("NexfortCompileVAE", "off"),
    }
    assert [node["id"] for node in status.nodes_of(report)] == ["4", "5:2"]
    assert {name for name, _ in sent} == {"nexfort.status"}
    assert sent[-1][1]["nodes"] == [{"id": "6", "class": "NexfortCompileVAE", "state": "off", "eager": 0}]
    del report
    gc.collect()
    assert [node["id"] for node in status.nodes()] == ["6"]


def test_a_step_is_told_only_when_it_is_news(status: types.ModuleType, sent: list[Any]) -> None:
    report = Report()
    status.remember("4", "NexfortCompileModel", report)
    sent.clear()
    for news in (event(0, 1), event(1, 1), None, None, None):
        if news is None:
            report.compiled("blocks.0", "k", 1.0)
        status.watch(report, news)
    assert [data["nodes"][0]["state"] for _, data in sent] == ["compiling", "waiting", "compiled"]
    status.watch(report, event(0, 2))
    status.watch(report, None)  # stopped in the middle: it compiles no longer
    assert [data["nodes"][0]["state"] for _, data in sent[3:]] == ["compiling", "compiled"]


def test_the_newest_nodes_are_remembered(status: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MOST", 3)
    for number in (1, 2, 3, 1, 4):
        status.remember(str(number), "NexfortCompileModel", None)
    assert [node["id"] for node in status.nodes()] == ["3", "1", "4"]
