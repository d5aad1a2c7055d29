# SPDX-License-Identifier: Apache-2.0
"""Seconds of whole prompts, from their submission to the picture, through a real ComfyUI: eager, core's compile, ours.

    COMFYUI_PATH=... python -m benchmarks.prompt_clock zimage-int8-lora [--processes 5] [--repeats 5] [--core] [--noise]

A prompt encodes its text, samples and decodes; `clock_workloads.py` lists what is there. Weights are random numbers of
the published sizes. One workload a call, and rows are appended as they are measured: what the CSV has of this commit,
card and workload is not measured again. The server's start does not count.

Drawing the numbers of the models is taken off the seconds, on both sides. With `--files FOLDER` the models are read
from files there, written once, and reading them counts.

`first cold`: the first prompt of a process with nothing cached. `first cached`: with everything cached, the median of
so many processes. The other rows are medians of prompts in turns with eager, in two processes that have run before:
`new seed`, `new size`, `new length`, `lora strength`, `lora file`, each with a value that was not there before. `step`
is a prompt of twice the steps less one of the steps, by step. Memory is what the card has in use at most in a process's
first prompt. The distance is ||ours - eager|| / ||eager|| of the picture; the noise floor is that of eager itself with
torch's memory-efficient attention.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nexfort_engine.cli.comfy_server import ComfyServer, failure
from nexfort_engine.hosts.comfy_install import ComfyError

from .rows import Row, append_rows, commit, distance
from .soak_server import find

COLUMNS = (
    "date card torch comfyui commit workload what eager_s core_s nexfort_s gib_eager gib_nexfort distance noise_floor "
    "command"
).split()
ROOT = Path(__file__).resolve().parent.parent
CSV = ROOT / "benchmarks" / "prompt_clock.csv"
WAYS = ("eager", "core", "nexfort", "noise")
_LONGEST = 900.0  # seconds of one prompt
_FAILED = "execution_error"  # ComfyUI's name of the message


@dataclass(frozen=True)
class Prompt:
    """What a prompt asks for."""

    workload: str
    steps: int
    height: int
    width: int
    tokens: int
    seed: int = 1
    text: int = 1
    lora: int = 0
    strength: float = 0.8

    def workflow(self, way: str, file: Path) -> dict[str, Any]:
        """In ComfyUI's API format. file: where the picture goes."""
        from .clock_workloads import WORKLOADS

        row = WORKLOADS[self.workload]
        nodes: dict[str, Any] = {
            "files": _node("ClockFiles", workload=self.workload),
            "prompt": _node("ClockText", clip=["files", 0], tokens=self.tokens, seed=self.text),
            "text": _node("ClockMark", value=["prompt", 0], name="text"),
            "empty": _node("ClockLatent", workload=self.workload, height=self.height, width=self.width),
        }
        for place in range(row.references):
            sized = {"height": self.height, "width": self.width, "seed": self.text + place}
            nodes[f"reference{place}"] = _node("ClockReference", workload=self.workload, **sized)
            told, picture = nodes["text"]["inputs"]["value"], [f"reference{place}", 0]
            nodes[f"edited{place}"] = _node("ReferenceLatent", conditioning=told, latent=picture)
            nodes["text"]["inputs"]["value"] = [f"edited{place}", 0]
        latent = ["empty", 0]
        for place in range(row.networks):
            model = self._model(nodes, way, place)
            each = self.steps // row.networks
            more = {"steps": self.steps, "start_at_step": place * each, "end_at_step": (place + 1) * each}
            more |= {"add_noise": "disable" if place else "enable", "noise_seed": self.seed, "cfg": row.backbone.cfg}
            more["return_with_leftover_noise"] = "enable" if place + 1 < row.networks else "disable"
            nodes[f"sampler{place}"] = _node(
                "KSamplerAdvanced", model=model, positive=["text", 0], negative=["text", 0], latent_image=latent,
                sampler_name="euler", scheduler=row.backbone.scheduler, **more,
            )  # fmt: skip
            latent = [f"sampler{place}", 0]
        nodes["latent"] = _node("ClockMark", value=latent, name="latent")
        video = ["latent", 0]
        if row.sound is not None:
            nodes["video"], video = _node("LTXVSeparateAVLatent", av_latent=video), ["video", 0]
        nodes["image"] = _node("VAEDecode", samples=video, vae=["files", 1])
        nodes["keep"] = _node("ClockKeep", image=["image", 0], file=str(file))
        return nodes

    def _model(self, nodes: dict[str, Any], way: str, place: int) -> list[Any]:
        nodes[f"network{place}"] = _node("ClockModel", workload=self.workload, number=place)
        nodes[f"model{place}"] = _node("ClockMark", value=[f"network{place}", 0], name="model")
        model: list[Any] = [f"model{place}", 0]
        if self.lora:
            more = {"seed": self.lora + place, "strength": self.strength, "workload": self.workload}
            nodes[f"lora{place}"] = _node("ClockLora", model=model, **more)
            model = [f"lora{place}", 0]
        if way == "nexfort":
            widgets = {"mode": "O2", "dynamic": True, "memory_format": "channels_last"}
            nodes[f"compile{place}"] = _node("NexfortCompileModel", model=model, **widgets)
            model = [f"compile{place}", 0]
        elif way == "core":
            nodes[f"compile{place}"] = _node("TorchCompileModel", model=model, backend="inductor")
            model = [f"compile{place}", 0]
        return model


def _node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


@dataclass(frozen=True)
class Ran:
    """One prompt: its seconds, those of its parts, GiB of the card, the picture's file, and what it ran on."""

    seconds: float
    parts: dict[str, float]
    gib: float
    file: Path
    gpu: str


class Server:
    """One ComfyUI process."""

    def __init__(
        self,
        comfyui: Path,
        folder: Path,
        way: str,
        arguments: Sequence[str] = (),
        *,
        waits: bool = False,
        files: Path | None = None,
    ) -> None:
        """waits: prompts wait for what is compiled for them. files: folder that models are read from."""
        self.way, self._folder, self._count = way, folder, 0
        base = folder / f"base-{way}"
        (base / "custom_nodes").mkdir(parents=True, exist_ok=True)
        pack = base / "custom_nodes" / "clock"
        if not pack.exists():
            pack.symlink_to(ROOT / "benchmarks" / "clock_pack", target_is_directory=True)
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")} if way == "core" else {}
        environment |= {"NEXFORT_CLOCK_NOISE": "1"} if way == "noise" else {}
        environment |= {"NEXFORT_WAIT": "1"} if waits else {}
        environment |= {"NEXFORT_DISABLE": "1"} if way != "nexfort" else {}
        environment |= {"NEXFORT_CLOCK_FILES": str(files.resolve())} if files else {}
        self.running = ComfyServer(
            comfyui, plugin=ROOT, cache_dir=folder / "cache", base_dir=base, env=environment,
            extra_args=["--disable-api-nodes", "--cache-classic", *arguments],
        )  # fmt: skip

    def run(self, prompt: Prompt) -> Ran:
        """Run a prompt. Raises ComfyError where a node fails, with the node's own traceback."""
        self._count += 1
        file = self._folder / f"{self.way}-{self.running.pid}-{self._count}.pt"
        history = self.running.wait(self.running.queue(prompt.workflow(self.way, file)), _LONGEST)
        if (reason := failure(history)) is not None:
            told = [data.get("traceback", []) for kind, data in history["status"]["messages"] if kind == _FAILED]
            raise ComfyError("\n".join([reason, *(line for lines in told for line in lines)]))
        at = {kind: data["timestamp"] / 1e3 for kind, data in history["status"]["messages"] if "timestamp" in data}
        told = history["outputs"]["keep"]
        parts, before = dict[str, float](), at["execution_start"]
        for name, moment in sorted(told["marks"][0].items(), key=lambda mark: mark[1]):
            parts[name], before = moment - before, moment
        seconds = at["execution_success"] - at["execution_start"] - told["making"][0]
        return Ran(seconds, parts, told["gib"][0], file, told["gpu"][0])


class Clock:
    """One workload's measurement."""

    def __init__(self, comfyui: Path, folder: Path, args: argparse.Namespace) -> None:
        from .clock_workloads import WORKLOADS

        row = WORKLOADS[args.workload]
        height, width = map(int, args.size.split("x")) if args.size else row.backbone.size
        self.prompt = Prompt(row.name, row.steps, height, width, row.tokens, lora=1 if row.lora else 0)
        self._comfyui, self._folder, self._args, self._row = comfyui, folder, args, row
        self._known = dict[str, Any]()  # of every row

    @contextmanager
    def _server(self, way: str, *, waits: bool = False) -> Iterator[Server]:
        server = Server(self._comfyui, self._folder, way, self._args.arguments, waits=waits, files=self._args.files)
        with server.running:
            yield server

    def _first(self, way: str, *, waits: bool = False) -> Ran:
        """The first prompt of a process."""
        with self._server(way, waits=waits) as server:
            time.sleep(self._args.idle)
            return server.run(self.prompt)

    def _fill_cache(self) -> None:
        """Have all that the workload needs in the cache."""
        self._first("nexfort", waits=True)

    def firsts(self) -> Iterator[Row]:
        """First prompts, of processes in turn."""
        ways = ["eager", *(["core"] if self._args.core else []), "nexfort"]
        cold = {way: self._first(way) for way in ways}
        self._known |= self._distances(self.prompt, cold["eager"], cold["nexfort"])
        yield self._row_of("first cold", cold)
        self._fill_cache()
        each: dict[str, list[Ran]] = {way: [] for way in ways}
        for _ in range(self._args.processes):
            for way in ways:
                each[way].append(self._first(way))
        yield self._row_of("first cached", {way: _median(rans) for way, rans in each.items()})

    def _distances(self, prompt: Prompt, eager: Ran, ours: Ran) -> Row:
        """How far the picture of a prompt is from eager's, and eager's own from that of other kernels."""
        found = {"distance": distance(ours.file, eager.file), "noise_floor": ""}
        if self._args.noise:
            with self._server("noise") as server:
                found["noise_floor"] = distance(server.run(prompt).file, eager.file)
        return found

    def turns(self) -> Iterator[Row]:
        """Prompts of two processes in turn."""
        if not (self._folder / "cache" / "entries").exists():
            self._fill_cache()
        ways = ["eager", *(["core"] if self._args.core else []), "nexfort"]
        with ExitStack() as stack:
            servers = [stack.enter_context(self._server(way)) for way in ways]
            for server in servers:
                for seed in (1, 2, 3):
                    server.run(replace(self.prompt, seed=seed))
            steps: dict[str, list[float]] = {}
            for what, prompts in self._changes():
                each: dict[str, list[Ran]] = {way: [] for way in ways}
                for prompt in prompts:
                    for server in servers:
                        each[server.way].append(server.run(prompt))
                medians = {way: _median(rans) for way, rans in each.items()}
                if what == "new seed":
                    self._known |= self._distances(prompts[-1], each["eager"][-1], each["nexfort"][-1])
                    steps = {way: [ran.seconds] for way, ran in medians.items()}
                if what == "twice the steps":
                    medians = {
                        way: replace(ran, seconds=(ran.seconds - steps[way][0]) / self.prompt.steps)
                        for way, ran in medians.items()
                    }
                yield self._row_of("step" if what == "twice the steps" else what, medians)

    def _changes(self) -> Iterator[tuple[str, list[Prompt]]]:
        base, times = self.prompt, range(self._args.repeats)
        yield "new seed", [replace(base, seed=200 + i) for i in times]
        yield "twice the steps", [replace(base, seed=300 + i, steps=2 * base.steps) for i in times]
        grid = 64 if base.height >= 512 else 16
        sizes = [(base.height - grid * (i + 1), base.width + grid * (i + 1)) for i in times]
        yield "new size", [replace(base, height=height, width=width) for height, width in sizes]
        lengths = [base.tokens - 5 * (i + 1) for i in times]
        yield "new length", [replace(base, tokens=max(4, n), text=400 + i) for i, n in enumerate(lengths)]
        if self._row.lora:
            yield "lora strength", [replace(base, strength=0.3 + 0.05 * i) for i in times]
            yield "lora file", [replace(base, lora=10 + 2 * i) for i in times]

    def _row_of(self, what: str, rans: dict[str, Ran]) -> Row:
        row: Row = dict.fromkeys(COLUMNS, "") | self._known
        row |= {f"{way}_s": f"{ran.seconds:.3f}" for way, ran in rans.items()}
        row |= {f"gib_{way}": rans[way].gib for way in ("eager", "nexfort") if rans[way].gib}
        for way, ran in rans.items():
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in ran.parts.items())
            print(f"{self._row.name}, {what}, {way}: {ran.seconds:.3f} s ({parts}), {ran.gib} GiB", flush=True)
        return row | {"what": what, "workload": self._row.name, "card": rans["eager"].gpu}


def _median(rans: Sequence[Ran]) -> Ran:
    """The run of the median seconds; with an even number the slower of the two."""
    return sorted(rans, key=lambda ran: ran.seconds)[len(rans) // 2]


def measured(file: Path, workload: str, at: str) -> set[str]:
    """What the CSV has of a workload at a commit."""
    if not file.exists():
        return set()
    with file.open(newline="", encoding="utf-8") as opened:
        return {row["what"] for row in csv.DictReader(opened) if (row["workload"], row["commit"]) == (workload, at)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--processes", type=int, default=5, help="of which `first cached` is the median")
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each change")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds from a server's start to its first prompt")
    parser.add_argument("--only", choices=("firsts", "turns"), help="one half of the rows")
    parser.add_argument("--size", default="", help="HEIGHTxWIDTH, default the workload's")
    parser.add_argument("--files", type=Path, help="folder of files that the models are read from")
    parser.add_argument("--core", action="store_true", help="ComfyUI's own TorchCompileModel beside them")
    parser.add_argument("--noise", action="store_true", help="the noise floor too")
    parser.add_argument("--comfyui", type=Path, help="the root of a ComfyUI (default: the one that is found)")
    parser.add_argument("--csv", type=Path, default=CSV, help="file to append to")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    parser.add_argument("--arguments", type=shlex.split, default=[], help="more of ComfyUI's own")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and append."""
    import torch

    args = parse(argv)
    if args.files:
        args.files.mkdir(parents=True, exist_ok=True)
    comfyui = find(args.comfyui)
    at = commit(args.commit)
    known = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "commit": at}
    version = (comfyui / "comfyui_version.py").read_text(encoding="utf-8").partition('"')[2].partition('"')[0]
    known |= {"comfyui": version, "command": shlex.join(["prompt_clock", *(sys.argv[1:] if argv is None else argv)])}
    done = measured(args.csv, args.workload, at)
    with tempfile.TemporaryDirectory(prefix="nexfort-clock-") as name:
        clock = Clock(comfyui, Path(name), args)
        halves = {"firsts": ("first cached", clock.firsts), "turns": ("new length", clock.turns)}
        for half, (last, rows) in halves.items():
            if args.only not in (None, half) or last in done:
                continue
            for row in rows():
                append_rows(args.csv, [row | known], COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
