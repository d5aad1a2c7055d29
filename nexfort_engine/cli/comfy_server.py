# SPDX-License-Identifier: Apache-2.0
"""A real ComfyUI server without a browser: found, started with this plugin mounted, asked over HTTP, stopped.

It knows ComfyUI's command line and HTTP interface only and never imports it; what a run prints and reports
is in `run_workflows.py`.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cache.ephemeral import Scratch
from ..hosts.comfy_install import ComfyError, find_comfyui, is_comfyui, plugin_root
from .missing_models import HEAD, is_missing_model, missing_models

__all__ = ["ComfyError", "ComfyServer", "failure", "find_comfyui", "is_comfyui", "mount", "plugin_root"]

MOUNT_NAME = "nexfort"
START_TIMEOUT = 300.0
STOP_TIMEOUT = 15.0
LOG_LINES = 20_000
# Arguments with which the caller has chosen the device, so that none is chosen for them.
_DEVICE_ARGS = frozenset({"--cpu", "--directml", "--cuda-device", "--gpu-only"})
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def has_accelerator(python: str = sys.executable) -> bool:
    """Whether the torch of this Python sees a device other than the CPU."""
    if python != sys.executable:
        code = "from torch import cuda, xpu, backends; "
        code += "print(any(one.is_available() for one in (cuda, xpu, backends.mps)))"
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        return asked.stdout.strip() == "True"
    import torch

    return any(one.is_available() for one in (torch.cuda, torch.xpu, torch.backends.mps))


class ComfyServer:
    """One ComfyUI process on a free port of the loopback interface.

    plugin: this plugin's folder, whatever its name; mounted unless it lies in that ComfyUI's custom_nodes.
    cache_dir: where the engine keeps its artefacts (default: where this ComfyUI keeps them).
    base_dir: ComfyUI's models, custom_nodes, input, output and user directories (default: its own).
    extra_args, env: for ComfyUI's command line and environment. on_line: called with each line of its log.
    """

    def __init__(
        self,
        comfyui: Path,
        *,
        plugin: Path | None = None,
        cache_dir: Path | None = None,
        base_dir: Path | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.comfyui = Path(comfyui).expanduser().absolute()
        if not is_comfyui(self.comfyui):
            raise ComfyError(f"found no ComfyUI at {self.comfyui}: expected its root, with main.py and comfy/")
        self.plugin = None if plugin is None else Path(plugin).absolute()
        self.cache_dir = cache_dir
        self.base_dir = None if base_dir is None else Path(base_dir).absolute()
        self.extra_args = list(extra_args)
        self.env = dict(env or {})
        self.python = python
        self.on_line = on_line
        self.client_id = uuid.uuid4().hex
        self.warnings: list[str] = []
        self.port = 0
        self._lines: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._scratch: Scratch | None = None
        # A proxy from the environment is not for the loopback interface.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    # -- life ----------------------------------------------------------------------------------------------

    def __enter__(self) -> ComfyServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout: float = START_TIMEOUT) -> ComfyServer:
        """Starts the server and returns when it answers; ComfyError with the end of its log otherwise."""
        if self._process is not None:
            raise ComfyError("the server is started already")
        self._scratch = Scratch()
        try:
            self._launch(self._scratch.path)
            self._await_ready(timeout)
        except BaseException:  # also on Ctrl-C: a server nobody holds would run on
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends the server and the processes it started. Does nothing if it does not run."""
        process, self._process = self._process, None
        if process is not None:
            _end_group(process)
        if self._reader is not None:
            self._reader.join(timeout=5)
            self._reader = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    @property
    def log(self) -> str:
        """What the server has printed so far (the last 20,000 lines)."""
        return "\n".join(list(self._lines))

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The id of the server's process; ComfyError where it was not started."""
        if self._process is None:
            raise ComfyError("the server does not run: start it first")
        return self._process.pid

    def _launch(self, scratch: Path) -> None:
        self.port = _free_port()
        self._process = subprocess.Popen(
            self.command(scratch),
            cwd=self.comfyui,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=os.name == "posix",
        )
        self._reader = threading.Thread(target=self._read_log, args=(self._process,), daemon=True)
        self._reader.start()

    def command(self, scratch: Path) -> list[str]:
        """The command line; what it refers to is made in `scratch`."""
        web = scratch / "web"  # the server does not start without a front end, and nobody looks at it
        web.mkdir(exist_ok=True)
        (web / "index.html").write_text("<!doctype html><title>ComfyUI, headless</title>", encoding="utf-8")
        command = [self.python, "main.py", "--listen", "127.0.0.1", "--port", str(self.port)]
        # In memory: a ComfyUI that runs beside this one holds the lock of its database file.
        command += [
            "--disable-auto-launch",
            "--front-end-root",
            str(web),
            "--database-url",
            "sqlite:///:memory:",
        ]
        if self.base_dir is not None:
            (self.base_dir / "custom_nodes").mkdir(parents=True, exist_ok=True)
            command += ["--base-directory", str(self.base_dir)]
        if self.plugin is not None and not self._mounted():
            command += ["--extra-model-paths-config", str(mount(self.plugin, scratch))]
        if not _DEVICE_ARGS.intersection(self.extra_args) and not has_accelerator(self.python):
            command += ["--cpu"]
        if "--cpu" in (*command, *self.extra_args) and not any("attention" in arg for arg in self.extra_args):
            command += ["--use-pytorch-cross-attention"]  # the default on a CPU is slower and does not trace
        return command + self.extra_args

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
        if self.cache_dir is not None:
            environment["NEXFORT_CACHE_DIR"] = str(Path(self.cache_dir).absolute())
        return {**environment, **self.env}

    def _mounted(self) -> bool:
        """Whether this ComfyUI loads the plugin by itself."""
        if self.plugin is None or (self.base_dir is not None and self.base_dir != self.comfyui):
            return self.plugin is None
        nodes = self.comfyui / "custom_nodes"
        plugin = self.plugin.resolve()
        return nodes.is_dir() and any(entry.resolve() == plugin for entry in nodes.iterdir())

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.append(_COLOUR.sub("", line.rstrip("\n")))
                if self.on_line is not None:
                    self.on_line(self._lines[-1])

    def _await_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._check_alive()
            with contextlib.suppress(OSError):  # not listening yet
                self._request("/system_stats", timeout=5)
                return
            time.sleep(0.1)
        raise ComfyError(f"ComfyUI at {self.comfyui} did not answer within {timeout:g} s{self._tail()}")

    def _check_alive(self) -> None:
        if self._process is None:
            raise ComfyError("the server does not run: start it first")
        if (code := self._process.poll()) is not None:
            if self._reader is not None:
                self._reader.join(timeout=1)  # not for long: a worker that lives on keeps the pipe open
            raise ComfyError(f"ComfyUI at {self.comfyui} ended with exit code {code}{self._tail()}")

    def _tail(self, lines: int = 30) -> str:
        return "; the end of its log:\n" + "\n".join(f"  {line}" for line in list(self._lines)[-lines:])

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, timeout: float = 60.0) -> Any:
        """GET `path`, as JSON; ComfyError with status and body if it is refused."""
        return self._json(path, None, timeout)

    def get_bytes(self, path: str, timeout: float = 60.0) -> bytes:
        """GET `path`, as it comes."""
        try:
            return self._request(path, timeout=timeout)
        except OSError as error:
            raise self._refusal("GET", path, error) from error

    def post(self, path: str, body: object = None, timeout: float = 60.0) -> Any:
        """POST `body` as JSON and return the answer, None if it is empty; ComfyError if it is refused."""
        return self._json(path, {} if body is None else body, timeout)

    def _json(self, path: str, body: object, timeout: float) -> Any:
        try:
            answer = self._request(path, body, timeout)
        except OSError as error:
            raise self._refusal("GET" if body is None else "POST", path, error) from error
        try:
            return json.loads(answer) if answer.strip() else None
        except ValueError as error:
            raise ComfyError(f"{path} answered {answer[:200]!r}, expected JSON") from error

    def _request(self, path: str, body: object = None, timeout: float = 60.0) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        with self._opener.open(request, timeout=timeout) as answer:
            content: bytes = answer.read()
        return content

    def _refusal(self, method: str, path: str, error: OSError) -> ComfyError:
        if isinstance(error, urllib.error.HTTPError):
            text = error.read().decode("utf-8", "replace")
            return ComfyError(f"{method} {path} was refused with {error.code}: {_refusal_text(text)}")
        if self._process is not None and not isinstance(error, TimeoutError):
            with contextlib.suppress(subprocess.TimeoutExpired):  # the connection breaks before the process ends
                self._process.wait(timeout=2)
        self._check_alive()
        return ComfyError(f"{method} {path} got no answer: {error}")

    # -- prompts ---------------------------------------------------------------------------------------------

    def queue(self, workflow: Mapping[str, Any]) -> str:
        """Queues a workflow in API format and returns its prompt id; ComfyError says which node is wrong."""
        answer = self.post("/prompt", {"prompt": workflow, "client_id": self.client_id})
        # One sound output is enough for the server to accept a workflow; what it leaves out is told here.
        errors = answer.get("node_errors")
        self.warnings += [*_node_problems(errors), *(f"missing: {line}" for line in missing_models(errors))]
        return str(answer["prompt_id"])

    def wait(self, prompt_id: str, timeout: float | None = None) -> dict[str, Any]:
        """The history entry of a prompt when it has ended, well or not: see `failure`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check_alive()
            # Patient: a process that loads a large model may keep its other threads waiting.
            found = self.get(f"/history/{prompt_id}", timeout=600).get(prompt_id)
            if found is not None:
                return dict(found)
            if deadline is not None and time.monotonic() > deadline:
                raise ComfyError(f"the prompt {prompt_id} did not end within {timeout:g} s{self._tail()}")
            time.sleep(0.1)

    def run(self, workflow: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Queues a workflow, waits, and returns its history entry; ComfyError, with the traceback, if a node failed."""
        history = self.wait(self.queue(workflow), timeout)
        if (reason := failure(history)) is not None:
            raise ComfyError(f"{reason}\n{_traceback(history)}".strip())
        return history


def _traceback(history: Mapping[str, Any]) -> str:
    """Where the node of a failed prompt failed; empty if that is not known."""
    messages = (history.get("status") or {}).get("messages", [])
    return "".join(line for kind, data in messages if kind == "execution_error" for line in data.get("traceback") or ())


def failure(history: Mapping[str, Any]) -> str | None:
    """Why the prompt of a history entry failed, with node and message; None if it went well."""
    status = history.get("status") or {}
    for kind, data in status.get("messages", []):
        if kind == "execution_error":
            where = f"node {data.get('node_id')} ({data.get('node_type')})"
            return f"{where}: {data.get('exception_type')}: {str(data.get('exception_message')).strip()}"
        if kind == "execution_interrupted":
            return f"interrupted at node {data.get('node_id')} ({data.get('node_type')})"
    good = status.get("status_str") == "success"
    return None if good else f"the prompt ended with status {status.get('status_str')!r}"


def _refusal_text(text: str) -> str:
    """ComfyUI's answer to an invalid workflow, as one readable line."""
    try:
        content = json.loads(text)
        errors = content.get("node_errors")
        problems, missing = _node_problems(errors), missing_models(errors)
        head = content["error"]["message"]
        said = "; ".join([head, *(problems or filter(None, [] if missing else [content["error"].get("details")]))])
        return "\n  ".join([f"{said}; {HEAD}", *missing]) if missing else said
    except (ValueError, KeyError, TypeError, AttributeError):  # not that kind of answer
        return text[:2000].strip()


def _node_problems(node_errors: Mapping[str, Any] | None) -> list[str]:
    return [
        f"node {node} ({found['class_type']}): {one['message']}: {one['details']}"
        for node, found in (node_errors or {}).items()
        for one in found["errors"]
        if not is_missing_model(one)
    ]


def mount(plugin: Path, scratch: Path, name: str = MOUNT_NAME) -> Path:
    """A configuration that adds `plugin`, and nothing that lies beside it, to the custom nodes."""
    nodes = scratch / "custom_nodes"
    nodes.mkdir(exist_ok=True)
    link = nodes / name
    try:
        link.symlink_to(plugin, target_is_directory=True)
    except OSError:
        if sys.platform != "win32":
            raise
        import _winapi  # Windows lets only administrators link; anybody may make a junction

        _winapi.CreateJunction(str(plugin), str(link))
    config = scratch / "extra_model_paths.yaml"
    # JSON is YAML, and quotes every path safely.
    config.write_text(json.dumps({name: {"custom_nodes": str(nodes)}}), encoding="utf-8")
    return config


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_group(process: subprocess.Popen[str]) -> None:
    """Asks the server to end, then its whole process group: it may have started workers."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_TIMEOUT)
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in it
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
