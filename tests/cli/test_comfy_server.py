# SPDX-License-Identifier: Apache-2.0
"""The headless server: against a small imitation for every fault, against a real ComfyUI for the truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imitated_comfyui
import pytest
from imitated_comfyui import WORKFLOW, ends

from nexfort_engine.cli import comfy_server, run_workflows
from nexfort_engine.cli.comfy_server import ComfyError, ComfyServer
from nexfort_engine.cli.missing_models import HEAD
from nexfort_engine.hosts import comfy_install

imitation = imitated_comfyui.imitation  # a fixture


def arguments_of(server: ComfyServer) -> list[str]:
    line = next(line for line in server.log.splitlines() if line.startswith("arguments "))
    return list(json.loads(line.removeprefix("arguments ")))


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
        assert ends(child), "what the server started is stopped too"
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
        for line in text.split("|"):
            PromptServer.instance.send_progress_text(line, node)
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
    text = f"Nexfort: 3 of 14 blocks, through {library}"
    workflow = {"7": {"class_type": "NexfortTestTalk", "inputs": {"text": text, "fail": False}}}
    said: list[str] = []
    with run_workflows.listening(server, run_workflows.Console(said.append)):
        server.run(workflow, timeout=60)
    assert text in said, "what was said just before the end is waited for"


@pytest.mark.comfy
def test_a_run_without_its_models_lists_them(server: ComfyServer) -> None:
    path = Path(comfy_server.__file__).parents[2] / "workflows" / "api" / "flux_plain.json"
    said: list[str] = []
    run = run_workflows.run_workflows(server, {"flux": json.loads(path.read_text(encoding="utf-8"))}, said.append)
    text = "\n".join(said)
    lines = [line for line in text.splitlines() if "https://" in line]
    assert run.failed and HEAD in text and len(lines) == 4, text
    assert all(line.startswith("  ") and "-> models/" in line for line in lines)
    assert "Value not in list" not in text
    (prompt,) = run.prompts
    assert HEAD in prompt["error"]


@pytest.mark.comfy
def test_the_run_command(comfyui: Path, tmp_path: Path) -> None:
    pack = tmp_path / "base" / "custom_nodes" / "talk"
    pack.mkdir(parents=True)
    (pack / "__init__.py").write_text(PACK)
    preview = {**WORKFLOW, "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}
    text = "|".join(f"Nexfort: {count} of 30 blocks, about {30 - count} s left" for count in range(1, 31))
    failing = {"7": {"class_type": "NexfortTestTalk", "inputs": {"text": text, "fail": True}}}
    for name, workflow in (("good", WORKFLOW), ("preview", preview), ("failing", failing)):
        (tmp_path / f"{name}.json").write_text(json.dumps(workflow))
    command = [sys.executable, "-m", "nexfort_engine", "run"]
    command += [str(tmp_path / f"{name}.json") for name in ("good", "preview", "failing")]
    command += [
        "--comfyui",
        str(comfyui),
        "--base-directory",
        str(tmp_path / "base"),
        "--output-dir",
        str(tmp_path / "out"),
    ]
    command += ["--report", str(tmp_path / "report.json"), "--cache-dir", str(tmp_path / "cache")]
    root = Path(comfy_server.__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, "COMFYUI_PATH": ""})
    assert done.returncode == 1, done.stdout + done.stderr
    counted = [line.split(",")[0] for line in done.stdout.splitlines() if " of 30 blocks" in line]
    assert counted == ["Nexfort: 1 of 30 blocks", "Nexfort: 30 of 30 blocks"], "a pipe gets no line a second"
    assert "ValueError: asked to fail" in done.stdout and "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [prompt["error"] is None for prompt in report["prompts"]] == [True, True, False]
    assert all(Path(path).is_file() for prompt in report["prompts"][:2] for path in prompt["outputs"])
    assert len(list((tmp_path / "out").glob("*.png"))) == 2
    assert report["prompts"][0]["seconds"] >= 0 and "reports" in report
