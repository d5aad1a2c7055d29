# SPDX-License-Identifier: Apache-2.0
"""Lowering several graphs at once in worker processes, largest first, as many as the machine holds.

Workers live as long as one batch of lowerings, and may be started a little before it: an idle one would keep memory
that the next picture wants. What stays for a while is the process that forks them, which holds the imported compiler
and nothing else, because a pipeline compiles its next part soon after. On a small machine, or for one graph, lowering
stays in the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .capture import Captured
from .worker import FORK, pack

log = logging.getLogger("nexfort")

VARIABLE = "NEXFORT_WORKERS"
_MOST = 16
_MANY = 8  # workers; where the machine holds so many, the pieces of one graph are lowered at once, too
_MEMORY = 1 << 30  # bytes of main memory that one worker may need; forked ones share most of it
_DEVICE_MEMORY = 1 << 30
_KERNEL_MEMORY = 1 << 28  # bytes of main memory that a process for one kernel may need beside what it shares
_PATIENCE = 600.0  # seconds after which workers that are not needed end
_KEPT = 60.0  # seconds that the process which forks them stays after the last of them ended
_LOOK = 1.0  # seconds between two looks at whether there is memory for it
_SHORT = 2 << 30  # bytes of main memory below which it goes at once; it holds 0.4 GiB by itself


def count_for(jobs: int, device: str) -> int:
    """How many workers to start for a number of graphs; 0 means to lower in the process."""
    asked = os.environ.get(VARIABLE, "").strip()
    if asked.isdigit():
        return min(int(asked), jobs)
    cores = _cores()
    if jobs < 2 or cores < 2 or (cores < 4 and jobs < 4):
        return 0
    # as many as cores: workers give way to the process that captures, which is done before they are
    workers = min(jobs, cores, _MOST, max(0, _free_memory() // _MEMORY))
    if device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info()
        workers = min(workers, free // _DEVICE_MEMORY)
    return workers if workers > 1 else 0


def _kernels_at_once() -> int:
    """How many processes besides the workers may compile a kernel each."""
    return max(0, min(_cores(), _free_memory() // _KERNEL_MEMORY))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


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


class WorkerGone(Exception):
    """A worker ended before it answered: it was killed, or could not start."""


@dataclass
class _Line:
    """The line to one worker: a job a line one way, an answer a line the other way."""

    answers: IO[str]
    jobs: IO[str]

    def ask(self, job: dict[str, Any]) -> str | None:
        """Have one job done. The failure, or None. Raises WorkerGone."""
        try:
            self.jobs.write(json.dumps(job) + "\n")
            self.jobs.flush()
            line = self.answers.readline()
        except OSError as error:
            raise WorkerGone(str(error)) from error
        if not line:
            raise WorkerGone("it ended without an answer")
        answer = json.loads(line)
        return None if answer["ok"] else str(answer["error"])

    def close(self) -> None:
        """The worker ends as soon as it sees this."""
        for stream in (self.jobs, self.answers):
            with contextlib.suppress(OSError):
                stream.close()


_expected: Pool | None = None
_expecting = threading.Lock()


def expect(device: str, probes: Path | None) -> None:
    """Start workers before there is anything to lower: they take seconds to import the compiler. Once; see `taken`."""
    global _expected
    with _expecting:
        workers = count_for(_MOST, device) if _expected is None else 0
        if workers:
            _expected = Pool(workers, device, probes)
            timer = threading.Timer(_PATIENCE, dismiss)
            timer.daemon = True
            timer.start()


def taken(workers: int, device: str, probes: Path | None) -> Pool:
    """The workers that are expected if there are any for this device, or new ones."""
    global _expected
    with _expecting:
        found, _expected = _expected, None
    if found is not None and (found.device, found.probes) == (device, probes):
        return found
    if found is not None:
        found.close()
    return Pool(workers, device, probes)


def dismiss() -> None:
    """End workers that nobody took."""
    global _expected
    if _expected is None:  # asked after every step
        return
    with _expecting:
        found, _expected = _expected, None
    if found is not None:
        found.close()


class Pool:
    """Workers for one batch. Use as a context manager; leaving it lets running jobs end in the background."""

    def __init__(self, workers: int, device: str, probes: Path | None) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self.device, self.probes = device, probes
        # on Linux one process imports the compiler, which takes seconds of a core, and forks the workers
        self._forker = _Forker.lent(device) if sys.platform == "linux" else None
        self._processes: list[subprocess.Popen[str]] = []
        if self._forker is not None:
            try:
                lines = self._forker.lines(workers)
            except BaseException:
                self._forker.give_back()
                raise
        else:
            lines, self._processes = _spawned(workers)
        self._serving = len(lines)
        self._lock = threading.Lock()
        for line in lines:
            threading.Thread(target=self._serve, args=(line,), name="nexfort-worker", daemon=True).start()
        self._workers = workers

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more jobs; the workers end when they have done what they are at."""
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
        instead: Callable[[], str | None],
    ) -> None:
        """Lower a graph into `folder`/payload; `then` is called on another thread with the failure, or None.

        instead: does the job in this process where the worker is gone.
        """
        file = folder / "graph.bin"
        file.write_bytes(pack(captured))
        job = {
            "file": str(file),
            "payload": str(folder / "payload"),
            "modules": modules,
            "options": options,
            "device": device,
            "probes": str(self.probes or ""),
            "kernels": self._forker.kernels if self._forker is not None else "",
            "spread": self._workers >= _MANY,
        }
        self._queue.put((job, then, instead))

    def _serve(self, line: _Line) -> None:
        """Feed one worker until the pool closes; the last one ends what is left."""
        while self._fed(line, self._queue.get()):
            pass
        line.close()
        with self._lock:
            self._serving -= 1
            last = self._serving == 0
        if last:
            for process in self._processes:
                _end(process)
            if self._forker is not None:
                self._forker.give_back()

    @staticmethod
    def _fed(line: _Line, item: Any) -> bool:
        """Have one job done; False for the end. What the job holds, a model among it, goes with this call."""
        if item is None:
            return False
        job, then, instead = item
        try:
            problem = line.ask(job)
        except WorkerGone as error:
            log.warning("Nexfort: a lowering worker is gone (%s); lowering goes on in this process", error)
            problem = instead()
        then(problem)
        return True


class _Forker:
    """The process that has imported the compiler and forks workers. It never holds a device.

    One serves all batches for a kind of device that follow each other. It ends when nothing was asked of it for a
    while, when memory gets short, for another kind of device, and with this process.
    """

    _lock = threading.Lock()
    _current: _Forker | None = None

    def __init__(self, device: str) -> None:
        self.device = device
        self._shared = _folder()
        self.kernels = self._shared.name if self._shared is not None else ""  # where its workers share kernels
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = [FORK, device, str(theirs.fileno()), str(_kernels_at_once()), self.kernels]
            self._process = _started(arguments, pass_fds=[theirs.fileno()])
        self._users = 0
        self._wanted = threading.Event()  # one for each time that it is idle

    @classmethod
    def lent(cls, device: str) -> _Forker:
        """The one that is there, or a new one; until it is given back."""
        with cls._lock:
            found = cls._current
            if found is None or found.device != device or found._process.poll() is not None:
                if found is not None and not found._users:
                    found._end()
                found = cls._current = cls(device)
            found._users += 1
            found._wanted.set()
            return found

    def give_back(self) -> None:
        """One of those that use it has no worker left."""
        cls = type(self)
        with cls._lock:
            self._users -= 1
            if self._users:
                return
            if cls._current is not self:
                self._end()
                return
            self._wanted = threading.Event()
            threading.Thread(target=self._stay, args=(self._wanted,), name="nexfort-forker", daemon=True).start()

    def _stay(self, wanted: threading.Event) -> None:
        """End it, unless it is wanted again before."""
        deadline = time.monotonic() + _KEPT
        while time.monotonic() < deadline and _free_memory() >= _SHORT:
            if wanted.wait(min(_LOOK, _KEPT)):
                return
        cls = type(self)
        with cls._lock:
            if not wanted.is_set():
                wanted.set()
                self._end()
                if cls._current is self:
                    cls._current = None

    def _end(self) -> None:
        self._wanted.set()
        self._control.close()
        if self._process.poll() is None:  # or its number may be another's by now
            _end(self._process)
        if self._shared is not None:
            self._shared.cleanup()

    def lines(self, count: int) -> list[_Line]:
        """Lines to so many new workers."""
        lines = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                with contextlib.suppress(OSError):  # it is gone; the line ends then, and whoever asks learns of it
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                # the streams keep it open
                lines.append(_Line(ours.makefile("r", encoding="utf-8"), ours.makefile("w", encoding="utf-8")))
        return lines


def _folder() -> tempfile.TemporaryDirectory[str] | None:
    """A folder that goes with what holds it; None where there can be none. Workers may still write there then."""
    try:
        return tempfile.TemporaryDirectory(prefix="nexfort-kernels-", ignore_cleanup_errors=True)
    except OSError as error:
        log.debug("Nexfort: there is no folder for kernels that workers share: %s", error)
        return None


def _spawned(count: int) -> tuple[list[_Line], list[subprocess.Popen[str]]]:
    """Workers that start by themselves, each on its standard input and output."""
    processes = [_started([], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    return [_Line(p.stdout, p.stdin) for p in processes if p.stdout and p.stdin], processes


def _started(arguments: list[str], **pipes: Any) -> subprocess.Popen[str]:
    # one thread each: a worker must not start a pool of compiler processes of its own
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCH_WARM_POOL": "0"}
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other check would keep forked processes from the device
    # sizes as expressions are most of the work, and SymPy forgets all but its last thousand: a tenth of the time
    environment.setdefault("SYMPY_CACHE_SIZE", "100000")
    package_root = str(Path(__file__).resolve().parent.parent)
    path = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    environment["PYTHONPATH"] = os.pathsep.join([*path, package_root])
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.worker", *arguments],
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **pipes},
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        cwd=package_root,
        start_new_session=True,  # so that it can be ended with whatever it started
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and what it started at once: one that takes its time slows every step."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
