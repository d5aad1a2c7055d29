# SPDX-License-Identifier: Apache-2.0
"""Lowering several graphs at once in worker processes, largest first, as many as the machine holds.

Workers live as long as one batch of lowerings, and may be started a little before it: an idle one would keep memory
that the next picture wants. What stays for a while is the process that forks them, which holds the imported compiler
and nothing else, because a pipeline compiles its next part soon after. On a small machine, or for one graph, lowering
stays in the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..cache.ephemeral import Scratch
from ..capture.types import Captured
from ..reporting.resource_shortages import begun, describe_error
from . import worker_lifetime
from .worker import FORK, pack
from .worker_connection import Line, NoWorkers, Watch, WorkerGone

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
_TEMPORARY = "temporary"  # in a folder of its own


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
    """Bytes of main memory that programs can have without swapping. ComfyUI and accelerate bring psutil."""
    try:
        import psutil
    except ImportError:
        return _MOST * _MEMORY  # the number of cores decides
    return int(psutil.virtual_memory().available)


def portable(modules: list[str]) -> bool:
    """Whether all operators come from installed packages, which a worker can import without the host."""
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if "site-packages" not in file and "dist-packages" not in file:
            return False
    return True


_expected: Pool | None = None
_expecting = threading.Lock()


def expect(device: str, probes: Path | None) -> None:
    """Start workers before there is anything to lower: they take seconds to import the compiler. Once; see `taken`.

    Raises NoWorkers.
    """
    global _expected
    with _expecting:
        workers = count_for(_MOST, device) if _expected is None else 0
        if workers:
            found = Pool(workers, device, probes)
            timer = threading.Timer(_PATIENCE, dismiss)
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError as error:
                found.close()
                raise NoWorkers(describe_error(error)) from error
            _expected = found


def taken(workers: int, device: str, probes: Path | None) -> Pool:
    """The workers that are expected if there are any for this device, or new ones. Raises NoWorkers."""
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
        """Raises NoWorkers where there is not one to be had."""
        self._queue: queue.Queue[Any] = queue.Queue()
        self.device, self.probes = device, probes
        self._forker: _Forker | None = None
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._watch = Watch(self._leaders)
        lines: list[Line] = []
        try:
            # on Linux one process imports the compiler, which takes seconds of a core, and forks the workers
            if sys.platform == "linux":
                self._forker = _Forker.lent(device)
                self._forker.lines(workers, lines)
            else:
                _spawned(workers, lines, self._processes)
        except (OSError, RuntimeError) as error:
            reason: str | None = describe_error(error)
            log.debug("Nexfort: not all lowering workers were started", exc_info=True)
        else:
            reason = begun("nexfort-watch", self._watch.run)
        self._workers = self._serving = len(lines)
        for line in lines:
            reason = reason or begun("nexfort-worker", self._serve, line)
            if reason is not None:
                self._leave(line)
                self._workers -= 1
        if not lines:
            self._end()
        if not self._workers:
            raise NoWorkers(reason)

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
        gone: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Lower a graph into `folder`/payload; `then` is called on another thread with the failure, or None.

        instead: does the job in this process where the worker is gone; `gone` is told why. Raises what keeps the graph
        from being written for a worker.
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
        self._queue.put((job, then, instead, gone))

    def _serve(self, line: Line) -> None:
        """Feed one worker until the pool closes; the last one ends what is left."""
        while self._fed(line, self._queue.get()):
            pass
        self._leave(line)

    def _leave(self, line: Line) -> None:
        line.close()
        with self._lock:
            self._serving -= 1
            last = self._serving == 0
        if last:
            self._end()

    def _leaders(self) -> list[int]:
        """The processes whose groups all workers are in."""
        return [one.pid for one in self._processes] if self._forker is None else [self._forker.number]

    def _end(self) -> None:
        self._watch.end()
        for process in self._processes:
            _end(process)
        if self._forker is not None:
            self._forker.give_back()

    def _fed(self, line: Line, item: Any) -> bool:
        """Have one job done; False for the end. What the job holds, a model among it, goes with this call."""
        if item is None:
            return False
        job, then, instead, gone = item
        try:
            with self._watch.waiting():
                problem = line.ask(job)
        except WorkerGone as error:
            reason = self._watch.why or str(error)
            log.warning("Nexfort: a lowering worker is gone (%s); lowering goes on in this process", reason)
            gone(reason)
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
        with contextlib.ExitStack() as made:
            self.kernels = _folder(made)  # where its workers share kernels
            self._control, theirs = socket.socketpair()
            made.enter_context(self._control)
            with theirs:
                arguments = [FORK, device, str(theirs.fileno()), str(_kernels_at_once()), self.kernels]
                self._process = _started(arguments, self.kernels, pass_fds=[theirs.fileno()])
            self._made = made.pop_all()
        self._users = 0
        self._wanted = threading.Event()  # one for each time that it is idle

    @property
    def number(self) -> int:
        """Its process's, and so its group's."""
        return self._process.pid

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
            if begun("nexfort-forker", self._stay, self._wanted) is not None:
                self._end()  # nobody would end it later
                cls._current = None

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
        if self._process.poll() is None:  # or its number may be another's by now
            _end(self._process)
        self._made.close()

    def lines(self, count: int, lines: list[Line]) -> None:
        """Adds lines to so many new workers."""
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                with contextlib.suppress(OSError):  # it is gone; the line ends then, and whoever asks learns of it
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                # the streams keep it open
                lines.append(Line(ours.makefile("r", encoding="utf-8"), ours.makefile("w", encoding="utf-8")))


def _folder(held: contextlib.ExitStack) -> str:
    """A folder with one for temporary files; "" where there can be none. Workers may still write there when it goes."""
    try:
        folder = held.enter_context(Scratch())
        (folder / _TEMPORARY).mkdir(mode=0o700)
    except (OSError, RuntimeError) as error:
        log.debug("Nexfort: there is no folder for kernels that workers share: %s", error)
        return ""
    return str(folder)


def _spawned(count: int, lines: list[Line], processes: list[subprocess.Popen[str]]) -> None:
    """Adds workers that start by themselves, each on its standard input and output."""
    for _ in range(count):
        processes.append(_started([], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        lines.append(Line(processes[-1].stdout, processes[-1].stdin))  # type: ignore[arg-type]


def _started(arguments: list[str], folder: str = "", **pipes: Any) -> subprocess.Popen[str]:
    """A process that works for this one and ends with it. folder: for its temporary files, and its compilers'."""
    # one thread each: a worker must not start a pool of compiler processes of its own
    environment = {
        **os.environ,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCH_WARM_POOL": "0",
        **worker_lifetime.works_for(),
    }
    if folder:
        environment["TMPDIR"] = os.path.join(folder, _TEMPORARY)
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other check would keep forked processes from the device
    # sizes as expressions are most of the work, and SymPy forgets all but its last thousand: a tenth of the time
    environment.setdefault("SYMPY_CACHE_SIZE", "100000")
    package_root = str(Path(__file__).resolve().parents[2])
    path = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    environment["PYTHONPATH"] = os.pathsep.join([*path, package_root])
    return subprocess.Popen(
        [sys.executable, "-m", worker_lifetime.MAIN, *arguments],
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
