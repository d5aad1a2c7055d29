# SPDX-License-Identifier: Apache-2.0
"""A real ComfyUI for `benchmarks.soak`: started on files and a cache of its own, watched from outside, ended hard."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nexfort_engine.cli.comfy_server import ComfyError, ComfyServer, failure

from .soak_prompts import Prompt

ROOT = Path(__file__).resolve().parent.parent
GRACE = 2.0  # seconds after a server's end in which its workers notice it
_MARK = "NEXFORT_SOAK"  # in the environment of a server and of all that it starts
_LONGEST = 600.0  # of one prompt


@dataclass
class Left:
    """What a server left: processes that still live, names in the cache's staging/ and in the temporary directory."""

    processes: list[str] = field(default_factory=list)
    staging: list[str] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)


class Server:
    """One ComfyUI process on a base folder of its own. cache: where artefacts lie. eager: nothing is compiled."""

    def __init__(self, comfyui: Path, folder: Path, name: str, *, cache: Path | None = None) -> None:
        self.base, self.temporary = folder / name, folder / f"{name}-tmp"
        self.cache = cache or folder / f"{name}-cache"
        self.mark = uuid.uuid4().hex
        for made in (self.base / "custom_nodes", self.temporary):
            made.mkdir(parents=True, exist_ok=True)
        for link, target in (("models", folder / "models"), ("custom_nodes/soak", ROOT / "benchmarks" / "soak_pack")):
            if not (self.base / link).exists():
                (self.base / link).symlink_to(target, target_is_directory=True)
        environment = {"TMPDIR": str(self.temporary), _MARK: self.mark, "NEXFORT_WAIT": "1"}
        environment |= {"NEXFORT_DISABLE": "1"} if cache is None else {}
        arguments = ["--disable-api-nodes", "--force-fp32", "--cache-classic"]
        self.running = ComfyServer(
            comfyui, plugin=ROOT, cache_dir=self.cache, base_dir=self.base, extra_args=arguments, env=environment
        )

    def __enter__(self) -> Server:
        self.running.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.running.stop()

    # -- prompts -----------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> str:
        """Queue a prompt, after ComfyUI was told to free its models if the prompt says so; its id."""
        if prompt.free:
            self.running.post("/free", {"unload_models": True, "free_memory": True})
        return self.running.queue(prompt.workflow())

    def cancel(self, after: float) -> None:
        """Interrupt what runs after so many seconds."""
        time.sleep(after)
        self.running.post("/interrupt")

    def end(self, number: str) -> tuple[Any, str | None]:
        """(latent, None) of a prompt that went well, (None, why) of one that did not, when it has ended."""
        history = self.running.wait(number, _LONGEST)
        if (reason := failure(history)) is not None:
            return None, reason
        from safetensors.numpy import load_file

        (saved,) = history["outputs"]["latent"]["latents"]
        file = self.base / "output" / saved["subfolder"] / saved["filename"]
        latent = load_file(file)["latent_tensor"]
        file.unlink()
        return latent, None

    def run(self, prompt: Prompt) -> tuple[Any, str | None]:
        """As `begin` and `end`."""
        return self.end(self.begin(prompt))

    # -- from outside ------------------------------------------------------------------------------------

    def resident(self) -> float:
        """MB of memory that the server's process holds."""
        pages = int(Path(f"/proc/{self.running.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def artefacts(self) -> int:
        """How many are in the cache."""
        return sum(1 for _ in self.cache.glob("entries/*/*/manifest.json"))

    def kill(self, how: signal.Signals = signal.SIGTERM) -> Left:
        """End the server's own process, and tell what is left of it once its workers had time to notice."""
        pid = self.running.pid
        os.kill(pid, how)
        ended = time.monotonic() + _LONGEST
        while self.running.alive and time.monotonic() < ended:
            time.sleep(0.05)
        time.sleep(GRACE)
        # torch makes one folder of its own for each user, whatever runs
        temporary = [name for name in names_in(self.temporary) if not name.startswith("torchinductor_")]
        left = Left(processes_with(_MARK, self.mark), names_in(self.cache / "staging"), temporary)
        self.running.stop()
        return left


def processes_with(name: str, value: str) -> list[str]:
    """The command lines of living processes that have this in their environment."""
    wanted, found = f"{name}={value}".encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0") and _lives(entry):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                found.append(f"{entry.name} {command.strip()}"[:120])
    return found


def _lives(entry: Path) -> bool:
    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
    return state not in "ZX"


def names_in(folder: Path) -> list[str]:
    """What lies in a folder; nothing where there is none."""
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def unsound(cache: Path) -> str | None:
    """What `cache verify` says against a cache, which reads every file; None where all is sound."""
    command = [sys.executable, "-m", "nexfort_engine", "cache", "verify", "--dir", str(cache)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stdout + done.stderr).strip()[-500:]


def find(given: Path | None) -> Path:
    """The ComfyUI that was named, or that of this machine."""
    from nexfort_engine.hosts.comfy_install import find_comfyui

    if given is not None:
        return given
    found = find_comfyui()
    if found is None:
        raise ComfyError("found no ComfyUI; set COMFYUI_PATH to the root of one")
    return found[0]


def make_files(comfyui: Path, folder: Path, models: Sequence[str]) -> None:
    """Write the models in a process of their own, which imports ComfyUI."""
    command = [sys.executable, "-m", "benchmarks.soak_prompts", str(folder), *models]
    environment = {**os.environ, "COMFYUI_PATH": str(comfyui)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ComfyError(f"making the models failed with status {done.returncode}:\n{done.stderr[-4000:]}")


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system in memory with room for so many bytes; only root may mount one."""
    folder.mkdir(mode=0o700, exist_ok=True)
    options = f"size={size},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ComfyError(f"no file system of {size} bytes can be mounted ({done.stderr.strip()}); expected root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
