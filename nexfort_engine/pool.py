# SPDX-License-Identifier: Apache-2.0
"""Lowering several graphs at once in worker processes, largest first, as many as the machine holds.

Workers live as long as one batch of lowerings: an idle one would keep a device context and memory that the next picture
wants. On a small machine, or for one graph, lowering stays in the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .capture import Captured
from .worker import pack

log = logging.getLogger("nexfort")

VARIABLE = "NEXFORT_WORKERS"
_MOST = 12
_MEMORY = 2 << 30  # bytes of main memory that one worker may need
_DEVICE_MEMORY = 1 << 30


def count_for(jobs: int, device: str) -> int:
    """How many workers to start for a number of graphs; 0 means to lower in the process."""
    asked = os.environ.get(VARIABLE, "").strip()
    if asked.isdigit():
        return min(int(asked), jobs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if jobs < 2 or cores < 4:
        return 0
    workers = min(jobs, cores * 3 // 4, _MOST, max(0, _free_memory() // _MEMORY))
    if device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info()
        workers = min(workers, free // _DEVICE_MEMORY)
    return workers if workers > 1 else 0


def _free_memory() -> int:
    try:
        text = Path("/proc/meminfo").read_text()
        return int(text.split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return _MOST * _MEMORY  # not Linux: the number of cores decides


def portable(modules: list[str]) -> bool:
    """Whether all operators come from installed packages, which a worker can import without the host."""
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if "site-packages" not in file and "dist-packages" not in file:
            return False
    return True


class Pool:
    """Worker processes for one batch. Use as a context manager; leaving it lets running jobs end in the background."""

    def __init__(self, workers: int, probes: Path | None) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self._probes = probes
        self._closed = False
        # one thread each: a worker must not start a pool of compiler processes of its own
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "TORCH_WARM_POOL": "0"}
        package_root = str(Path(__file__).resolve().parent.parent)
        path = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        environment["PYTHONPATH"] = os.pathsep.join([*path, package_root])
        for _ in range(workers):
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
                cwd=package_root,
                start_new_session=True,  # so that it can be ended with whatever it started
            )
            threading.Thread(target=self._serve, args=(process,), name="nexfort-worker", daemon=True).start()
        self._workers = workers

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_error: object) -> None:
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:  # what has not begun is dropped; what runs is finished and stored
                self._queue.get_nowait()
        for _ in range(self._workers):
            self._queue.put(None)

    def submit(
        self,
        captured: Captured,
        folder: Path,
        modules: list[str],
        options: dict[str, object],
        device: str,
        then: Callable[[str | None], None],
    ) -> None:
        """Lower a graph into `folder`/payload; `then` is called on another thread with the failure, or None."""
        file = folder / "graph.bin"
        file.write_bytes(pack(captured))
        job = {
            "file": str(file),
            "payload": str(folder / "payload"),
            "modules": modules,
            "options": options,
            "device": device,
            "probes": str(self._probes or ""),
        }
        self._queue.put((job, then))

    def _serve(self, process: subprocess.Popen[str]) -> None:
        """Feed one worker until the pool closes."""
        assert process.stdin is not None and process.stdout is not None
        while (item := self._queue.get()) is not None:
            job, then = item
            then(self._ask(process, job))
        _end(process)

    @staticmethod
    def _ask(process: subprocess.Popen[str], job: dict[str, Any]) -> str | None:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError as error:
            return f"the lowering worker is gone: {error}"
        if not line:
            return f"the lowering worker ended with status {process.wait()}"
        answer = json.loads(line)
        return None if answer["ok"] else str(answer["error"])


def _end(process: subprocess.Popen[str]) -> None:
    """End a worker at once: one that takes its time holds a context on the device, which slows every step."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
