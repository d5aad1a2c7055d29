# SPDX-License-Identifier: Apache-2.0
"""The headless server: against a small imitation for every fault, against a real ComfyUI for the truth."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nexfort_engine.cli import comfy_server, run_workflows
from nexfort_engine.cli.comfy_server import ComfyError, ComfyServer
from nexfort_engine.hosts import comfy_install

WORKFLOW = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 32, "batch_size": 1, "color": 255}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "headless"}},
}

# Answers as ComfyUI does, to the requests made here. What it is to do wrong stands in the environment.
IMITATION = """
import http.server, json, os, subprocess, sys, time
fault = os.environ.get("FAULT", "")
print("arguments", json.dumps(sys.argv[1:]), flush=True)
print("\\x1b[32mcolour\\x1b[0m", os.environ.get("NEXFORT_CACHE_DIR"), flush=True)
if fault == "start":
    sys.exit("no module named torch")
if fault == "mute":
    time.sleep(60)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
history = {}

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def answer(self, code, body):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        if self.path == "/nexfort/report":
            self.answer(200, [{"artefacts_compiled": 0}])
        elif self.path.startswith("/history/"):
            if fault == "die":
                os._exit(3)
            self.answer(200, {} if fault == "never" else history)
        else:
            self.answer(200, {"system": {"comfyui_version": "0"}})
    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        if "bad" in prompt:
            error = {"message": "Value not in list", "details": "x"}
            node_errors = {"bad": {"class_type": "Loader", "errors": [error]}}
            return self.answer(400, {"error": {"message": "invalid"}, "node_errors": node_errors})
        messages = [["execution_start", {"timestamp": 1000}], ["execution_success", {"timestamp": 3500}]]
        status = {"status_str": "success", "completed": True, "messages": messages}
        image = {"filename": "a.png", "subfolder": "", "type": "output"}
        history["p1"] = {"status": status, "outputs": {"2": {"images": [image], "text": ["x"]}}}
        self.answer(200, {"prompt_id": "p1", "number": 1, "node_errors": {}})

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def imitation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "ComfyUI"
    (root / "comfy").mkdir(parents=True)
    (root / "main.py").write_text(IMITATION)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(comfy_server, "has_accelerator", lambda *_: False)
    return root


def arguments_of(server: ComfyServer) -> list[str]:
    line = next(line for line in server.log.splitlines() if line.startswith("arguments "))
    return list(json.loads(line.removeprefix("arguments ")))


def runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split(") ")[1][0] not in "ZX"


# -- against the imitation -----------------------------------------------------------------------------------


def test_a_server_is_started_asked_and_stopped(imitation: Path, tmp_path: Path) -> None:
    with ComfyServer(imitation, cache_dir=tmp_path / "cache", base_dir=tmp_path / "base") as server:
        history = server.run(WORKFLOW)
        assert history["outputs"]["2"]["images"] and server.alive
        given = arguments_of(server)
        assert f"colour {tmp_path / 'cache'}" in server.log, "without colours, and with the cache directory"
        child = int(next(line for line in server.log.splitlines() if line.startswith("child")).split()[1])
    assert not server.alive
    assert given[given.index("--base-directory") + 1] == str(tmp_path / "base")
    assert (tmp_path / "base" / "custom_nodes").is_dir()
    assert {"--cpu", "--use-pytorch-cross-attention", "--disable-auto-launch"} <= set(given)
    assert not Path(given[given.index("--front-end-root") + 1]).exists(), "scratch files are gone"
    if sys.platform.startswith("linux"):
        assert not runs(child), "what the server started is stopped too"
    server.stop()


def test_the_caller_decides_device_and_attention(imitation: Path) -> None:
    with ComfyServer(imitation, extra_args=["--cpu", "--use-split-cross-attention"]) as server:
        given = arguments_of(server)
    assert given.count("--cpu") == 1 and "--use-pytorch-cross-attention" not in given
    with ComfyServer(imitation, extra_args=["--cuda-device", "1"]) as server:
        assert "--cpu" not in arguments_of(server)


def test_a_server_that_does_not_start_tells_why(imitation: Path) -> None:
    server = ComfyServer(imitation, env={"FAULT": "start"})
    with pytest.raises(ComfyError, match=r"exit code 1(.|\n)*no module named torch"):
        server.start()
    assert not server.alive


def test_a_server_that_never_answers_is_stopped(imitation: Path) -> None:
    server = ComfyServer(imitation, env={"FAULT": "mute"})
    with pytest.raises(ComfyError, match="did not answer within 1 s"):
        server.start(timeout=1)
    assert not server.alive


def test_a_server_that_dies_meanwhile_ends_the_wait(imitation: Path) -> None:
    with ComfyServer(imitation, env={"FAULT": "die"}) as server:
        prompt = server.queue(WORKFLOW)
        with pytest.raises(ComfyError, match=r"exit code 3|got no answer"):
            server.wait(prompt)
        assert not server.alive


def test_a_wait_can_be_bounded(imitation: Path) -> None:
    late = pytest.raises(ComfyError, match=r"did not end within 0\.3 s")
    with ComfyServer(imitation, env={"FAULT": "never"}) as server, late:
        server.wait(server.queue(WORKFLOW), timeout=0.3)


def test_a_refused_workflow_names_the_node(imitation: Path) -> None:
    refused = pytest.raises(ComfyError, match=r"400: invalid; node bad \(Loader\): Value not in list: x")
    with ComfyServer(imitation) as server, refused:
        server.queue({"bad": {}})


def test_something_else_is_not_a_comfyui(tmp_path: Path) -> None:
    with pytest.raises(ComfyError, match="found no ComfyUI at"):
        ComfyServer(tmp_path)


def test_requests_before_the_start_say_so(imitation: Path) -> None:
    with pytest.raises(ComfyError, match="start it first"):
        ComfyServer(imitation).wait("p1")


# -- what needs no server ------------------------------------------------------------------------------------


def test_the_plugin_is_mounted_alone_whatever_its_folder_is_called(imitation: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "some.where: else" / "main"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("")
    (plugin.parent / "beside").mkdir()
    (tmp_path / "scratch").mkdir()
    server = ComfyServer(imitation, plugin=plugin)
    command = server.command(tmp_path / "scratch")
    config = json.loads(Path(command[command.index("--extra-model-paths-config") + 1]).read_text())
    nodes = Path(config["nexfort"]["custom_nodes"])
    assert [entry.name for entry in nodes.iterdir()] == ["nexfort"]
    assert (nodes / "nexfort").resolve() == plugin.resolve()


@pytest.mark.parametrize("linked", [True, False])
def test_a_plugin_that_is_installed_is_not_mounted_twice(imitation: Path, tmp_path: Path, linked: bool) -> None:
    plugin = tmp_path / "main" if linked else imitation / "custom_nodes" / "main"
    plugin.mkdir(parents=True)
    if linked:
        (imitation / "custom_nodes").mkdir()
        (imitation / "custom_nodes" / "nexfort").symlink_to(plugin)
    for base_dir, mounts in ((None, False), (imitation, False), (tmp_path / "base", True)):
        scratch = tmp_path / f"scratch-{mounts}-{base_dir is None}"
        scratch.mkdir()
        command = ComfyServer(imitation, plugin=plugin, base_dir=base_dir).command(scratch)
        assert ("--extra-model-paths-config" in command) is mounts


def test_comfyui_is_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(path: Path) -> Path:
        (path / "comfy").mkdir(parents=True)
        (path / "main.py").touch()
        return path

    home = tmp_path / "home"
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(comfy_install, "comfyui_around", lambda: None)
    assert comfy_install.find_comfyui() is None
    configured = make(tmp_path / "configured")
    config = home / ".config" / "comfy-cli" / "config.ini"
    config.parent.mkdir(parents=True)
    config.write_text(f"[DEFAULT]\nrecent_workspace = {configured}\nodd = 100%\n")
    assert comfy_install.find_comfyui() == (configured, "comfy-cli's configuration")
    config.write_bytes(b"\xff not an ini file")
    assert comfy_install.find_comfyui() is None
    default = make(home / "comfy" / "ComfyUI")
    assert comfy_install.find_comfyui() == (default, "comfy-cli's default workspace")
    around = make(tmp_path / "around")
    monkeypatch.setattr(comfy_install, "comfyui_around", lambda: around)
    assert comfy_install.find_comfyui() == (around, "the plugin lies in it")
    chosen = make(tmp_path / "chosen")
    monkeypatch.setenv("COMFYUI_PATH", str(chosen))
    assert comfy_install.find_comfyui() == (chosen, "COMFYUI_PATH")
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(ComfyError, match="COMFYUI_PATH is"):
        comfy_install.find_comfyui()


def test_a_linked_plugin_knows_its_comfyui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "ComfyUI"
    (root / "comfy").mkdir(parents=True)
    (root / "main.py").touch()
    (root / "comfyui_version.py").write_text('__version__ = "0.33.0"\n')
    file = root / "custom_nodes" / "nexfort" / "nexfort_engine" / "hosts" / "comfy_install.py"
    monkeypatch.setattr(comfy_install, "__file__", str(file))
    assert comfy_install.comfyui_around() == root and comfy_install.comfyui_version(root) == "0.33.0"
    monkeypatch.setattr(comfy_install, "__file__", str(tmp_path / "nexfort_engine" / "hosts" / "comfy_install.py"))
    assert comfy_install.comfyui_around() is None


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], None),
        (
            [["execution_error", {"node_id": "5", "node_type": "KSampler", "exception_type": "ValueError",
                                  "exception_message": "bad\n"}]],
            "node 5 (KSampler): ValueError: bad",
        ),
        ([["execution_interrupted", {"node_id": "5", "node_type": "KSampler"}]], "interrupted at node 5 (KSampler)"),
    ],
)  # fmt: skip
def test_failures_name_the_node(messages: list[Any], expected: str | None) -> None:
    status = {"status_str": "error" if messages else "success", "messages": messages}
    assert comfy_server.failure({"status": status}) == expected


def test_an_unknown_end_is_a_failure() -> None:
    assert comfy_server.failure({}) and comfy_server.failure({"status": {"status_str": "error", "messages": []}})


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
    text = struct.pack(">II", 3, 2) + b"17" + b"Nexfort: 3 of 14 regions"
    event = run_workflows.decode(text)
    assert event and run_workflows.describe(event) == "Nexfort: 3 of 14 regions"
    assert run_workflows.decode(struct.pack(">I", 1) + b"image") is None
    assert run_workflows.decode(b"") is None and run_workflows.decode("no json") is None
    assert run_workflows.decode(struct.pack(">II", 3, 10_000) + b"17") is not None
    step = run_workflows.decode(json.dumps({"type": "progress", "data": {"node": "5", "value": 2, "max": 20}}))
    assert step and run_workflows.describe(step) == "node 5: step 2 of 20"
    assert run_workflows.describe({"type": "status", "data": {}}) is None


def test_lines_are_not_said_twice() -> None:
    said: list[str] = []
    console = run_workflows.Console(said.append)
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
    assert run.as_dict()["reports"] == [{"artefacts_compiled": 0}]
    assert "one: done in 2.5 s" in said
    json.dumps(run.as_dict())


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
        assert not runs(child)


# -- a real ComfyUI ------------------------------------------------------------------------------------------

PACK = """
import torch
from server import PromptServer

class Talk:
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "test", True
    @classmethod
    def INPUT_TYPES(cls):
        required = {"text": ("STRING", {}), "fail": ("BOOLEAN", {})}
        return {"required": required, "hidden": {"node": "UNIQUE_ID"}}
    def run(self, text, fail, node):
        PromptServer.instance.send_progress_text(text, node)
        if fail:
            raise ValueError("asked to fail")
        return {}

NODE_CLASS_MAPPINGS = {"NexfortTestTalk": Talk}
"""


@pytest.fixture(scope="module")
def comfyui() -> Path:
    found = comfy_install.find_comfyui()
    if found is None:
        pytest.skip("no ComfyUI found: set COMFYUI_PATH to the root of one")
    return found[0]


@pytest.fixture(scope="module")
def server(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    plugin = tmp_path_factory.mktemp("checkout") / "main"
    for folder in (plugin, plugin.parent / "beside"):
        folder.mkdir()
        name = "NexfortTestTalk" if folder is plugin else "NexfortTestBeside"
        (folder / "__init__.py").write_text(PACK.replace("NexfortTestTalk", name))
    base = tmp_path_factory.mktemp("base")
    with ComfyServer(comfyui, plugin=plugin, base_dir=base, cache_dir=base / "cache") as started:
        yield started


@pytest.mark.comfy
def test_core_nodes_make_an_image(server: ComfyServer) -> None:
    history = server.run(WORKFLOW, timeout=60)
    (image,) = history["outputs"]["2"]["images"]
    assert server.base_dir is not None and (server.base_dir / "output" / image["filename"]).stat().st_size > 0
    query = f"/view?filename={image['filename']}&type=output"
    assert server.get_bytes(query).startswith(b"\x89PNG")


@pytest.mark.comfy
def test_only_the_plugin_itself_is_mounted(server: ComfyServer) -> None:
    assert "NexfortTestTalk" in server.get("/object_info/NexfortTestTalk")
    assert server.get("/object_info/NexfortTestBeside") == {}


@pytest.mark.comfy
def test_a_node_that_fails_is_named(server: ComfyServer) -> None:
    workflow = {"7": {"class_type": "NexfortTestTalk", "inputs": {"text": "x", "fail": True}}}
    with pytest.raises(ComfyError, match=r"node 7 \(NexfortTestTalk\): ValueError: asked to fail"):
        server.run(workflow, timeout=60)
    with pytest.raises(ComfyError, match="NoSuchNode"):
        server.run({"1": {"class_type": "NoSuchNode", "inputs": {}}})
    assert server.alive and server.get("/queue")["queue_running"] == []


@pytest.mark.comfy
@pytest.mark.parametrize("library", ["aiohttp", "websocket"])
def test_progress_text_arrives(server: ComfyServer, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library)
    monkeypatch.setattr(run_workflows, "_listener", lambda: getattr(run_workflows, f"_listen_{library}"))
    text = f"Nexfort: 3 of 14 regions, through {library}"
    workflow = {"7": {"class_type": "NexfortTestTalk", "inputs": {"text": text, "fail": False}}}
    said: list[str] = []
    with run_workflows.listening(server, run_workflows.Console(said.append)):
        server.run(workflow, timeout=60)
    assert text in said, "what was said just before the end is waited for"


@pytest.mark.comfy
def test_the_run_command(comfyui: Path, tmp_path: Path) -> None:
    pack = tmp_path / "base" / "custom_nodes" / "talk"
    pack.mkdir(parents=True)
    (pack / "__init__.py").write_text(PACK)
    preview = {**WORKFLOW, "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}
    failing = {"7": {"class_type": "NexfortTestTalk", "inputs": {"text": "Nexfort: 1 of 2", "fail": True}}}
    for name, workflow in (("good", WORKFLOW), ("preview", preview), ("failing", failing)):
        (tmp_path / f"{name}.json").write_text(json.dumps(workflow))
    command = [sys.executable, "-m", "nexfort_engine", "run"]
    command += [str(tmp_path / f"{name}.json") for name in ("good", "preview", "failing")]
    command += [
        "--comfyui",
        str(comfyui),
        "--base-dir",
        str(tmp_path / "base"),
        "--output-dir",
        str(tmp_path / "out"),
    ]
    command += ["--report", str(tmp_path / "report.json"), "--cache-dir", str(tmp_path / "cache")]
    root = Path(comfy_server.__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, "COMFYUI_PATH": ""})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Nexfort: 1 of 2" in done.stdout and "ValueError: asked to fail" in done.stdout
    assert "Traceback" not in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [prompt["error"] is None for prompt in report["prompts"]] == [True, True, False]
    assert all(Path(path).is_file() for prompt in report["prompts"][:2] for path in prompt["outputs"])
    assert len(list((tmp_path / "out").glob("*.png"))) == 2
    assert report["prompts"][0]["seconds"] >= 0 and "reports" in report
