# SPDX-License-Identifier: Apache-2.0
"""A small imitation of ComfyUI's server that does wrong what it is told to. No test lives here."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nexfort_engine.cli import comfy_server

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
            speed = [{"compiled": 0.5, "eager": 1.0, "eager_at": 1.0, "source": "verified", "saved": 0, "made": 22.0}]
            self.answer(200, {"engines": [{"name": "Flux", "report": {"artefacts_compiled": 0, "speed": speed}}]})
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
        if "missing" in prompt:
            error = {"type": "value_not_in_list", "message": "Value not in list", "details": "..."}
            names = prompt["missing"]["inputs"].values()
            errors = [{**error, "extra_info": {"received_value": name}} for name in names]
            node_errors = {"missing": {"class_type": "Loader", "errors": errors}}
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


def ends(pid: int, within: float = 10.0) -> bool:
    """Whether a process that was killed is gone so many seconds later: it ends when the system next runs it."""
    until = time.monotonic() + within
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not runs(pid)


def runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split(") ")[1][0] not in "ZX"
