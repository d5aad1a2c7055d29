# SPDX-License-Identifier: Apache-2.0
"""Workflows that are read, run and told of: against a small imitation of ComfyUI, for every fault."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import imitated_comfyui
import pytest
from imitated_comfyui import WORKFLOW, ends

from nexfort_engine.cli import comfy_server, run_workflows
from nexfort_engine.cli.comfy_server import ComfyServer
from nexfort_engine.cli.missing_models import HEAD

imitation = imitated_comfyui.imitation  # a fixture


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not JSON"),
        ('{"nodes": [], "links": []}', "UI format"),
        ("[]", "not a workflow in API format"),
        ("{}", "not a workflow in API format"),
        ('{"1": {"inputs": {}}}', "class_type"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_workflow_is_refused(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "workflow.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(run_workflows.WorkflowError, match=expected):
        run_workflows.load_workflow(path)


def test_a_workflow_may_be_wrapped_as_it_is_posted(tmp_path: Path) -> None:
    path = tmp_path / "workflow.json"
    for content in (WORKFLOW, {"prompt": WORKFLOW, "client_id": "x"}):
        path.write_text(json.dumps(content))
        assert run_workflows.load_workflow(path) == WORKFLOW


def test_messages_of_the_socket_are_understood() -> None:
    text = struct.pack(">II", 3, 2) + b"17" + b"Nexfort: 3 of 14 blocks"
    event = run_workflows.decode(text)
    assert event and run_workflows.describe(event) == "Nexfort: 3 of 14 blocks"
    assert run_workflows.decode(struct.pack(">I", 1) + b"image") is None
    assert run_workflows.decode(b"") is None and run_workflows.decode("no json") is None
    assert run_workflows.decode(struct.pack(">II", 3, 10_000) + b"17") is not None
    step = run_workflows.decode(json.dumps({"type": "progress", "data": {"node": "5", "value": 2, "max": 20}}))
    assert step and run_workflows.describe(step) == "node 5: step 2 of 20"
    assert run_workflows.describe({"type": "status", "data": {}}) is None


def test_lines_are_not_said_twice() -> None:
    said: list[str] = []
    console = run_workflows.Console(said.append, is_watched=True)
    for value in (1, 1, 2):
        console({"type": "progress", "data": {"node": "5", "value": value, "max": 2}})
    assert said == ["node 5: step 1 of 2", "node 5: step 2 of 2"]


def test_a_run_reports_prompts_and_what_the_plugin_tells(imitation: Path, tmp_path: Path) -> None:
    said: list[str] = []
    workflows: dict[str, Any] = {"one": WORKFLOW, "two": {"bad": {}}, "three": WORKFLOW}
    with ComfyServer(imitation) as server:
        run = run_workflows.run_workflows(server, workflows, said.append)
    assert run.failed and [prompt["workflow"] for prompt in run.prompts] == ["one", "two"]
    assert run.prompts[0]["seconds"] == 2.5 and run.prompts[0]["error"] is None
    assert run.prompts[0]["outputs"] == [str(imitation / "output" / "a.png")]
    assert "node bad (Loader)" in run.prompts[1]["error"]
    assert [engine["name"] for engine in run.as_dict()["reports"]["engines"]] == ["Flux"]
    assert said[-1] == "Flux: 2.00x faster: 0.50 s a step, was 1.00 s (verified, 1970-01-01) - compiled once in 22 s"
    assert "one: done in 2.5 s" in said
    json.dumps(run.as_dict())


def test_a_network_is_called_by_its_file_where_that_is_known() -> None:
    row = {"compiled": 0.5, "eager": 1.0, "eager_at": 0.0, "source": "verified", "saved": 0, "pictures": 0, "made": 0}
    engine = {"name": "BaseModel", "report": {"speed": [row]}}
    for files, name in (([], "BaseModel"), (["dreamshaper_8.safetensors"], "dreamshaper_8 (BaseModel)")):
        (line,) = run_workflows.speeds([{**engine, "files": files}])
        assert line.startswith(f"{name}: 2.00x faster: "), line


def test_a_run_command_without_its_models_lists_them_and_fails(imitation: Path, tmp_path: Path) -> None:
    """As a process into a pipe. What a real ComfyUI answers is in test_comfy_server.py and test_warm.py."""
    files = {"a": "flux1-dev.safetensors", "b": "own.safetensors"}
    (tmp_path / "workflow.json").write_text(json.dumps({"missing": {"class_type": "Loader", "inputs": files}}))
    command = [sys.executable, "-m", "nexfort_engine", "run", str(tmp_path / "workflow.json")]
    command += ["--comfyui", str(imitation), "--comfy-arg=--cpu"]
    root = Path(comfy_server.__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False, timeout=120)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    said = done.stdout.splitlines()
    head = next(number for number, line in enumerate(said) if line.endswith(HEAD))
    known, own = said[head + 1 : head + 3]
    assert known.startswith("  flux1-dev.safetensors -> models/diffusion_models (node missing, Loader)  https://")
    assert own == "  own.safetensors (node missing, Loader)" and "\x1b" not in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="signals are sent on POSIX only")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_ended_run_command_stops_its_server(imitation: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "workflow.json").write_text(json.dumps(WORKFLOW))
    command = [sys.executable, "-m", "nexfort_engine", "run", str(tmp_path / "workflow.json"), "--verbose"]
    command += ["--comfyui", str(imitation), "--comfy-arg=--cpu"]
    root = Path(comfy_server.__file__).parents[2]
    # In a session of its own, so that no signal of the terminal is ignored as it is in background jobs.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "FAULT": "never"},
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    child = 0
    for line in process.stdout:
        if line.startswith("child "):
            child = int(line.split()[1])
        if line.endswith("queued\n"):
            break
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode not in (0, None) and child
    if sys.platform.startswith("linux"):
        assert ends(child)
