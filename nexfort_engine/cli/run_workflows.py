# SPDX-License-Identifier: Apache-2.0
"""What `run` does with a ComfyUI server: workflows in, progress lines out, outputs and a report saved.

The server itself is `comfy_server.ComfyServer`. The report's numbers come from the plugin in that server
(`GET /nexfort/report`); nothing is measured here but seconds a prompt.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..reporting.speed import current, headline
from .comfy_server import ComfyError, ComfyServer, failure

Event = dict[str, Any]
Sink = Callable[[Event], None]
_LONGEST_END = 3.0  # seconds that a server is listened to after the last prompt, however much it says
_COUNTED_EVERY = 10.0  # seconds, where nobody watches
_COUNT = re.compile(r"\b(\d+) of (\d+)\b")
_TEXT_EVENT = 3  # the binary message that carries progress text


class WorkflowError(ValueError):
    """A file is not a workflow in API format."""


def load_workflow(path: Path) -> dict[str, Any]:
    """The workflow in API format in a JSON file; WorkflowError says what the file holds instead."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkflowError(f"the workflow {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WorkflowError(f"the workflow {path} is not JSON: {error}") from error
    if isinstance(content, dict) and isinstance(content.get("nodes"), list):
        raise WorkflowError(
            f"{path} is a workflow in UI format; expected API format: export it with File > Export (API)"
        )
    if isinstance(content, dict) and isinstance(content.get("prompt"), dict):
        content = content["prompt"]
    sound = isinstance(content, dict) and all(
        isinstance(node, dict) and isinstance(node.get("class_type"), str) for node in content.values()
    )
    if not sound or not content:
        raise WorkflowError(
            f"{path} is not a workflow in API format; expected node ids, each with its class_type and inputs"
        )
    return dict(content)


@dataclass
class Run:
    """The results of one call of `run`."""

    comfyui: str
    system: dict[str, Any] = field(default_factory=dict)
    prompts: list[dict[str, Any]] = field(default_factory=list)
    reports: Any = None
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether any prompt failed."""
        return any(prompt["error"] is not None for prompt in self.prompts)

    def as_dict(self) -> dict[str, Any]:
        """The report file's content."""
        return {
            "comfyui": self.comfyui,
            "system": self.system,
            "prompts": self.prompts,
            "reports": self.reports,
            "notes": self.notes,
        }


def run_workflows(
    server: ComfyServer,
    workflows: Mapping[str, Mapping[str, Any]],
    say: Callable[[str], None],
    output_dir: Path | None = None,
) -> Run:
    """Runs the workflows one after another in a started server; a failed one ends the run.

    `say` gets each line of progress. Images that the workflows only preview are saved too if `output_dir` is
    given.
    """
    run = Run(str(server.comfyui), server.get("/system_stats").get("system", {}))
    with listening(server, Console(say)):
        for name, workflow in workflows.items():
            prompt = _run_one(server, name, workflow, say, output_dir)
            run.prompts.append(prompt)
            if prompt["error"] is not None:
                break
    run.notes += server.warnings
    try:
        run.reports = server.get("/nexfort/report")
    except ComfyError as error:
        run.notes.append(f"no compile report: {error}. Is the plugin loaded in this ComfyUI?")
    for note in (*run.notes, *speeds(run.reports["engines"] if run.reports else ())):
        say(note)
    return run


def speeds(engines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each engine of which times are known: how much faster it is, as the server's report has it."""
    rows = [(_name_of(engine), current(engine["report"])) for engine in engines]
    return [f"{name}: {headline(row)}" for name, row in rows if row is not None]


def _name_of(engine: Mapping[str, Any]) -> str:
    """What people call a network: the file that it comes from, with its class, which tells a VAE from the model."""
    files = ", ".join(Path(file).stem for file in engine.get("files") or ())
    return f"{files} ({engine['name']})" if files else str(engine["name"])


def _run_one(
    server: ComfyServer,
    name: str,
    workflow: Mapping[str, Any],
    say: Callable[[str], None],
    output_dir: Path | None,
) -> dict[str, Any]:
    say(f"{name}: queued")
    start = time.monotonic()
    prompt: dict[str, Any] = {
        "workflow": name,
        "prompt_id": None,
        "seconds": None,
        "error": None,
        "outputs": [],
    }
    try:
        prompt["prompt_id"] = server.queue(workflow)
        history = server.wait(prompt["prompt_id"])
    except ComfyError as error:
        prompt["error"] = str(error)
    else:
        prompt["error"] = failure(history)
        prompt["seconds"] = round(_seconds(history, time.monotonic() - start), 3)
        prompt["outputs"] = list(_outputs(server, history, output_dir))
    for output in prompt["outputs"]:
        say(f"{name}: saved {output}")
    say(f"{name}: {prompt['error']}" if prompt["error"] else f"{name}: done in {prompt['seconds']} s")
    return prompt


def _seconds(history: Mapping[str, Any], measured: float) -> float:
    """What the server itself measured, if it told: without the time in the queue."""
    times = [
        data["timestamp"]
        for kind, data in history.get("status", {}).get("messages", [])
        if kind in ("execution_start", "execution_success", "execution_error") and "timestamp" in data
    ]
    return (times[-1] - times[0]) / 1000 if len(times) == 2 else measured


def _outputs(server: ComfyServer, history: Mapping[str, Any], output_dir: Path | None) -> Iterator[str]:
    """The saved files; previews are fetched into `output_dir`, under their bare names."""
    for output in history.get("outputs", {}).values():
        for files in output.values():
            for one in files if isinstance(files, list) else ():
                if not isinstance(one, dict) or "filename" not in one:
                    continue
                name = str(Path(one.get("subfolder") or "") / one["filename"])
                if one.get("type") == "output":
                    yield str((output_dir or _output_directory(server)) / name)
                elif output_dir is not None:
                    query = urllib.parse.urlencode({k: one.get(k) or "" for k in ("filename", "subfolder", "type")})
                    target = output_dir / Path(one["filename"]).name
                    target.write_bytes(server.get_bytes(f"/view?{query}"))
                    yield str(target)


def _output_directory(server: ComfyServer) -> Path:
    return (server.base_dir or server.comfyui) / "output"


class Console:
    """Turns the server's events into few, readable lines.

    is_watched: somebody sees each line as it comes. Else what counts up is said every ten seconds and at its end.
    """

    def __init__(
        self, say: Callable[[str], None], *, is_watched: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock = say, clock
        self._is_watched = sys.stdout.isatty() if is_watched is None else is_watched
        self._last = ""
        self._counted = -math.inf  # when something that counts up was said

    def __call__(self, event: Event) -> None:
        """Says what happened, and nothing twice in a row."""
        line = describe(event)
        if line is None or line == self._last or not self._may_say(line):
            return
        self._last = line
        self._say(line)

    def _may_say(self, line: str) -> bool:
        count = _COUNT.search(line)
        if self._is_watched or count is None or count[1] == count[2]:
            return True
        if self._clock() - self._counted < _COUNTED_EVERY:
            return False
        self._counted = self._clock()
        return True


def describe(event: Event) -> str | None:
    """One line for an event, None for those nobody waits for."""
    data = event.get("data") or {}
    kind = event.get("type")
    if kind == "progress_text":
        return str(data["text"])
    if kind == "progress" and data.get("max", 0) > 1:
        return f"node {data.get('node')}: step {data.get('value')} of {data.get('max')}"
    if kind == "execution_cached" and data.get("nodes"):
        return f"{len(data['nodes'])} nodes unchanged since the last prompt"
    return None


def decode(message: str | bytes) -> Event | None:
    """An event from a message of the server's socket; None for previews and what is not understood."""
    if isinstance(message, str):
        try:
            event = json.loads(message)
        except ValueError:  # not an event
            return None
        return event if isinstance(event, dict) else None
    if len(message) < 8 or struct.unpack(">I", message[:4])[0] != _TEXT_EVENT:
        return None
    length = struct.unpack(">I", message[4:8])[0]
    node, text = message[8 : 8 + length], message[8 + length :]
    return {
        "type": "progress_text",
        "data": {"node": node.decode("utf-8", "replace"), "text": text.decode("utf-8", "replace")},
    }


@contextlib.contextmanager
def listening(server: ComfyServer, sink: Sink) -> Iterator[None]:
    """Hands the server's events to `sink` meanwhile, from another thread; needs a socket library."""
    listen = _listener()
    if listen is None:
        yield
        return
    stop, ready = threading.Event(), threading.Event()
    url = f"{server.url.replace('http', 'ws', 1)}/ws?clientId={server.client_id}"
    thread = threading.Thread(target=listen, args=(url, sink, ready, stop), daemon=True)
    thread.start()
    ready.wait(timeout=10)
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=5)


def _listener() -> Callable[[str, Sink, threading.Event, threading.Event], None] | None:
    try:
        import aiohttp  # noqa: F401  ComfyUI itself needs it
    except ImportError:
        pass
    else:
        return _listen_aiohttp
    try:
        import websocket  # noqa: F401
    except ImportError:
        return None
    return _listen_websocket


def _listen_websocket(url: str, sink: Sink, ready: threading.Event, stop: threading.Event) -> None:
    import websocket

    try:
        connection = websocket.create_connection(url, timeout=0.5, http_no_proxy=["127.0.0.1"])
        ready.set()
        with contextlib.closing(connection):
            last = _Last(stop)
            while not last.passed:
                try:
                    _hand_over(connection.recv(), sink)
                except websocket.WebSocketTimeoutException:
                    last.quiet()
    except (OSError, websocket.WebSocketException) as error:
        _lost(error, sink, ready, stop)


def _listen_aiohttp(url: str, sink: Sink, ready: threading.Event, stop: threading.Event) -> None:
    import asyncio

    import aiohttp

    async def listen() -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as connection:
            ready.set()
            last = _Last(stop)
            while not last.passed and not connection.closed:
                try:
                    message = await connection.receive(timeout=0.5)
                except asyncio.TimeoutError:
                    last.quiet()
                    continue
                if message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    _hand_over(message.data, sink)

    try:
        asyncio.run(listen())
    except (OSError, aiohttp.ClientError) as error:
        _lost(error, sink, ready, stop)


class _Last:
    """When to hang up: what was said before the stop may still be on its way, so not before a moment of quiet."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop, self._deadline, self._quiet = stop, math.inf, False

    def quiet(self) -> None:
        """Nothing came for a moment."""
        self._quiet = self._stop.is_set()

    @property
    def passed(self) -> bool:
        """Whether nobody has to listen any more."""
        if self._stop.is_set() and self._deadline == math.inf:
            self._deadline = time.monotonic() + _LONGEST_END
        return self._quiet or time.monotonic() > self._deadline


def _hand_over(message: str | bytes, sink: Sink) -> None:
    event = decode(message)
    if event is not None:
        sink(event)


def _lost(error: Exception, sink: Sink, ready: threading.Event, stop: threading.Event) -> None:
    """Progress is a convenience: the prompt goes on without it, and the result comes over HTTP."""
    ready.set()
    if not stop.is_set():
        sink({"type": "progress_text", "data": {"node": "", "text": f"no progress from here on: {error}"}})
