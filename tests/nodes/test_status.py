# SPDX-License-Identifier: Apache-2.0
"""What a compile node's badge is told, from real reports and progress; a recorder stands for the server's events."""

from __future__ import annotations

import gc
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nexfort_engine.cache import speed_record
from nexfort_engine.reporting.progress import Event
from nexfort_engine.reporting.report import Report

FOLDER = Path(__file__).resolve().parents[2] / "nodes"
ALONE = "nexfort_nodes_alone"
MODEL = "NexfortCompileModel"


class Queue:
    """ComfyUI's queue with the prompt that runs."""

    def __init__(self) -> None:
        self.running: list[tuple[Any, ...]] = []

    def get_current_queue_volatile(self) -> tuple[list[tuple[Any, ...]], list[Any]]:
        return self.running, []

    def begin(self, prompt: str, extra: Any, *nodes: str) -> None:
        """From now on the prompt with this id and these compile nodes runs."""
        self.running = [(0, prompt, {node: {"class_type": MODEL, "inputs": {}} for node in nodes}, extra, [], {})]


@pytest.fixture
def queue() -> Queue:
    """Nothing runs at first."""
    return Queue()


@pytest.fixture
def sent(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """The events for the front end."""
    found: list[tuple[str, Any]] = []
    server = types.ModuleType("server")
    instance = types.SimpleNamespace(send_sync=lambda name, data: found.append((name, data)), prompt_queue=queue)
    server.PromptServer = types.SimpleNamespace(instance=instance)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "server", server)
    yield found


@pytest.fixture
def status(sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module and the one it asks, by themselves: they need neither ComfyUI nor an engine."""
    package = types.ModuleType(ALONE)
    package.__path__ = [str(FOLDER)]
    monkeypatch.setitem(sys.modules, ALONE, package)
    for name in ("running", "status"):
        monkeypatch.delitem(sys.modules, f"{ALONE}.{name}", raising=False)
    module = importlib.import_module(f"{ALONE}.status")
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


def test_what_was_compiled_is_fresh_until_the_next_prompt(
    status: types.ModuleType, queue: Queue, sent: list[Any]
) -> None:
    report = Report()
    queue.begin("1", of_workflow("a"), "4")
    status.remember("4", MODEL, report)
    status.watch(report, event(0, 1))
    report.compiled("blocks.0", "k", 1.0)
    status.watch(report, event(1, 1))
    status.watch(report, None)
    status.watch(report, None)
    (node,) = status.nodes()
    assert (node["state"], node["fresh"]) == ("compiled", True)
    for number in ("2", "3"):
        queue.begin(number, of_workflow("a"), "4")
        sent.clear()
        status.watch(report, None)
        ((_, data),) = sent
        assert data["nodes"] == [{name: value for name, value in node.items() if name != "fresh"}]
    report.compiled("blocks.1", "l", 1.0)  # a size that it had not seen
    status.watch(report, None)
    assert status.nodes()[0]["fresh"] is True


def test_seconds_are_told_while_there_is_nothing_to_compare_with(status: types.ModuleType, sent: list[Any]) -> None:
    report, row = Report(), speed_record.blank(model="TAESD", sizes=[[1, 4, 8, 12]])
    status.remember("4", MODEL, report)
    report.loaded("blocks.0", "k", 0.1)
    report.speed("key", row)
    status.watch(report, None)
    assert status.nodes()[0]["speed"] == {"ratio": None, "reason": ""}
    sent.clear()
    for taken in (0.12345, 0.2, 0.3):
        report.speed("key", {**row, "compiled": taken})
        status.watch(report, None)
    ((_, data),) = sent  # other seconds alone are no news
    assert data["nodes"][0]["speed"] == {"ratio": None, "reason": "", "seconds": 0.123}
    assert status.nodes()[0]["speed"]["seconds"] == 0.3
    report.speed("key", {**row, "compiled": 0.1, "eager": 0.2})
    assert status.nodes()[0]["speed"] == {"ratio": 2.0, "reason": ""}


def test_blocks_that_run_eager_are_counted_once(status: types.ModuleType) -> None:
    report = Report()
    report.compiled("blocks.1", "l", 2.0)
    for reason in ("a patch", "a hook"):
        report.eager("blocks.0", reason)
    assert state(status, report) == {"state": "compiled", "fresh": True, "eager": 1}
    whole = Report()
    whole.eager("(whole module)", "no compiler")
    assert state(status, whole) == {"state": "eager", "eager": 0}


def test_steps_slower_than_eager_are_told_of_while_they_are(status: types.ModuleType, sent: list[Any]) -> None:
    report = Report()
    status.remember("4", MODEL, report)
    report.compiled("blocks.1", "l", 2.0)
    status.watch(report, None)
    row = {"sizes": [[1, 4, 8]], "compiled_ms": 2.0, "eager_ms": 1.0, "reason": "", "source": "verification"}
    sent.clear()
    status.watch(report, None)
    assert not sent and "slower" not in state(status, report)
    for slower, told in ((True, True), (False, None)):
        report.pace({**row, "slower": slower})
        sent.clear()
        status.watch(report, None)
        status.watch(report, None)
        ((_, data),) = sent
        assert data["nodes"][0].get("slower") is told
    report.pace({**row, "slower": True})
    report.pace({**row, "slower": False, "sizes": [[2, 4, 8]]})
    assert state(status, report) == {"state": "compiled", "fresh": True, "eager": 0, "slower": True}


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
    off = {"id": "6", "class": "NexfortCompileVAE", "workflow": None, "state": "off", "eager": 0}
    assert sent[-1][1]["nodes"] == [off]
    del report
    gc.collect()
    assert [node["id"] for node in status.nodes()] == ["6"]


def test_the_files_of_a_network_are_known_by_the_prompts_that_it_ran_in(
    status: types.ModuleType, sent: list[Any], queue: Queue
) -> None:
    report, other = Report(), Report()
    loader = {"class_type": "UNETLoader", "inputs": {"unet_name": "flux/dev.safetensors"}}
    ours = {"class_type": MODEL, "inputs": {"model": ["1", 0]}}
    queue.running = [(0, "a prompt", {"1": loader, "4": ours}, {}, [], {})]
    status.remember("4", MODEL, report)
    assert status.files_of(report) == [], "nothing of it has run"
    status.watch(report, None)
    assert status.files_of(report) == ["dev.safetensors"] and status.files_of(other) == []


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


# ---- workflows ---------------------------------------------------------------------------------------------


def of_workflow(name: str | None) -> dict[str, Any]:
    """The extra data of a prompt that the front end made of a workflow."""
    return {"client_id": "c", "extra_pnginfo": {"workflow": {"id": name, "nodes": []}}}


def told_by_place(status: types.ModuleType) -> dict[tuple[str | None, str], str]:
    return {(node["workflow"], node["id"]): node["state"] for node in status.nodes()}


def test_the_same_id_in_two_workflows_is_two_nodes(status: types.ModuleType, queue: Queue) -> None:
    first, second = Report(), Report()
    for name, report in (("a", first), ("b", second)):
        queue.begin(f"prompt of {name}", of_workflow(name), "4")
        status.remember("4", MODEL, report)
    second.compiled("blocks.0", "k", 1.0)
    assert told_by_place(status) == {("a", "4"): "waiting", ("b", "4"): "compiled"}
    assert [node["workflow"] for node in status.nodes_of(second)] == ["b"]
    assert status.reports_of(lambda seat: seat.workflow == "a") == [("4", first)]


@pytest.mark.parametrize(
    "extra",
    [{}, None, {"extra_pnginfo": None}, {"extra_pnginfo": {"workflow": []}}, of_workflow(None), of_workflow("")],
    ids=str,
)
def test_a_prompt_may_come_without_a_workflow(status: types.ModuleType, queue: Queue, extra: Any) -> None:
    report = Report()
    queue.begin("over the API", extra, "4")
    status.remember("4", MODEL, report)
    status.watch(report, None)
    assert told_by_place(status) == {(None, "4"): "waiting"}


def test_a_copy_of_a_workflow_whose_node_comfyui_did_not_run_again_is_told_of(
    status: types.ModuleType, queue: Queue, sent: list[Any]
) -> None:
    report = Report()
    queue.begin("1", of_workflow("a"), "4")
    status.remember("4", MODEL, report)
    report.compiled("blocks.0", "k", 1.0)
    status.watch(report, None)
    queue.begin("2", of_workflow("without the node"), "5")
    status.watch(report, None)
    assert told_by_place(status) == {("a", "4"): "compiled"}
    sent.clear()
    queue.begin("3", of_workflow("copy"), "4")
    status.watch(report, None)
    status.watch(report, None)
    assert told_by_place(status) == {("a", "4"): "compiled", ("copy", "4"): "compiled"}
    assert len(sent) == 1, "only the first step of a prompt is news"


def test_a_node_that_was_set_back_is_told_of_what_it_attached_before(status: types.ModuleType, queue: Queue) -> None:
    first, second = Report(), Report()
    first.compiled("blocks.0", "k", 1.0)
    for prompt, report in (("1", first), ("2", second)):
        queue.begin(prompt, of_workflow("a"), "4")
        status.remember("4", MODEL, report)
        status.watch(report, None)
        status.watch(first, None)  # something of it still runs; the node that attached another one is not its any more
    assert told_by_place(status) == {("a", "4"): "waiting"}
    queue.begin("3", of_workflow("a"), "4")
    status.watch(first, None)
    assert told_by_place(status) == {("a", "4"): "compiled"}


def test_in_the_background_the_badge_says_so_until_it_is_made(
    status: types.ModuleType, sent: list[Any], queue: Queue
) -> None:
    report = Report()
    queue.begin("p1", {"extra_pnginfo": {"workflow": {"id": "w1"}}}, "7")
    status.remember("7", MODEL, report)
    report.making(True)
    report.call(0.1)
    status.watch(report, None)
    assert [node["state"] for node in sent[-1][1]["nodes"]] == ["background"]
    queue.begin("p2", {"extra_pnginfo": {"workflow": {"id": "w2"}}}, "7")  # another prompt, with another engine
    beside = Event(1, 3, 2.0, "", status.BESIDE)
    status.watch(report, beside)
    assert [(node["workflow"], node["state"]) for node in sent[-1][1]["nodes"]] == [("w1", "background")]
    assert [(node["done"], node["total"]) for node in sent[-1][1]["nodes"]] == [(1, 3)]
    report.compiled("blocks.0", "key", 0.5)
    report.making(False)
    status.watch(report, Event(3, 3, 0.0, "", status.BESIDE))
    assert [(node["workflow"], node["state"]) for node in sent[-1][1]["nodes"]] == [("w1", "compiled")]


def test_what_was_made_in_the_background_is_compiled_before_a_picture_took_it_up(
    status: types.ModuleType, sent: list[Any], queue: Queue
) -> None:
    """It counts once the first step that ran on it was compared, in the next picture."""
    from nexfort_engine.compilation import background

    report = Report()
    for name in ("blocks.0", "blocks.1"):
        report.region(name, kind="Block", key="key")
    queue.begin("p1", {}, "7")
    status.remember("7", MODEL, report)
    report.call(0.1)
    said: list[Any] = []
    for event in (background._FAILED, background._ENDED):
        status.watch(report, event)
        said += [(node["state"], node.get("fresh")) for node in sent[-1][1]["nodes"]]
    report.eager("blocks.0", "it draws random numbers")
    said += [(node["state"], node["eager"]) for node in status.nodes_of(report)]
    report.eager("blocks.1", "it draws random numbers")
    said += [(node["state"], node["eager"]) for node in status.nodes_of(report)]
    assert said == [("eager", None), ("compiled", True), ("compiled", 1), ("eager", 2)]
