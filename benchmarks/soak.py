# SPDX-License-Identifier: Apache-2.0
"""A real ComfyUI under random prompts, killed while it compiles, and with a full disk: what holds and what is left.

    python -m benchmarks.soak --prompts 500 [--kill-at 30] [--full-disk 12] [--models flux wan sd21]

--prompts: random prompts for small models: sizes, prompt lengths, LoRAs and strengths, seeds, a cancel in the
middle, /free, the compile node bypassed. A second server, with NEXFORT_DISABLE=1, runs the same: each latent is
compared with its own, and our memory with its memory. MB a prompt is the slope of a line through the resident memory
after each prompt of the second half, by least squares, with twice its standard error.
--kill-at: kill -9 at so many random moments while it compiles; after each the cache is verified, and the next server,
on the same cache, must leave nothing of the last one.
--full-disk: prompts with a cache on so many file systems of different sizes, of a few pages up to enough; needs root.

It runs on Linux. Exit code 1: something did not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nexfort_engine.hosts.comfy_install import ComfyError

from .soak_prompts import MODELS, Prompt, first, prompts
from .soak_server import Left, Server, find, make_files, names_in, small_disk, unsound

TOLERANCE = 1e-4  # of the norm, in float32
MOST_SLOPE = 0.3  # MB a prompt beyond eager's that may be left, and the error of both
_MOMENT = 3.0  # seconds from the end of one region at most, within which a server is killed
_ROOM = 24 << 20  # bytes that all artefacts of one model need, and more
Say = Callable[[str], None]


@dataclass(frozen=True)
class Given:
    """What is soaked in what. until: when nothing new begins, on the clock."""

    comfyui: Path
    folder: Path
    models: list[str]
    seed: int
    until: float
    say: Say

    @property
    def goes_on(self) -> bool:
        """Whether there is time."""
        return time.monotonic() < self.until


@dataclass
class Soak:
    """What the prompts gave. first: how many may compile. mb: resident memory after each of them, ours and eager's."""

    prompts: int = 0
    first: int = 0
    cancelled: int = 0
    bypassed: int = 0
    compared: int = 0
    farthest: float = 0.0
    unequal: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    compiled: int = 0
    compiled_late: int = 0
    mb: list[float] = field(default_factory=list)
    eager_mb: list[float] = field(default_factory=list)
    left: Left = field(default_factory=Left)
    left_after_start: list[str] = field(default_factory=list)

    def slopes(self) -> dict[str, tuple[float, float]]:
        """MB a prompt and its error, ours and eager's."""
        return {"ours": slope(self.mb), "eager": slope(self.eager_mb)}

    def broken(self) -> list[str]:
        """What did not hold."""
        found = [f"unequal: {one}" for one in self.unequal] + [f"error: {one}" for one in self.errors]
        if self.compiled_late:
            found.append(f"{self.compiled_late} artefacts compiled after the first {self.first} prompts")
        found += [f"lives {name} s after its server" for name in self.left.processes]
        found += [f"left after the next start: {name}" for name in self.left_after_start]
        (ours, error), (eager, besides) = self.slopes().values()
        if ours - error > eager + besides + MOST_SLOPE:
            found.append(f"memory grows by {ours:.2f} MB a prompt, eager's by {eager:.2f}")
        return found


@dataclass
class Kill:
    """One kill -9. done: what it had compiled then, of `total`. left_after_start: what the next start left of it."""

    done: int
    total: int = 0
    artefacts: int = 0
    unsound: str | None = None
    processes: list[str] = field(default_factory=list)
    left_after_start: list[str] = field(default_factory=list)

    def broken(self) -> list[str]:
        """What did not hold."""
        found = [f"the cache is not sound: {self.unsound}"] if self.unsound else []
        found += [f"lives after its server: {name}" for name in self.processes]
        return found + [f"left after the next start: {name}" for name in self.left_after_start]


@dataclass
class Disk:
    """Prompts with a cache on a file system of `bytes`. artefacts: how many found room."""

    bytes: int
    prompts: int = 0
    artefacts: int = 0
    problems: list[str] = field(default_factory=list)

    def broken(self) -> list[str]:
        """What did not hold."""
        return [f"{self.bytes} bytes: {problem}" for problem in self.problems]


def slope(values: Sequence[float]) -> tuple[float, float]:
    """(slope, twice its standard error) of a line through the second half of the values, by least squares."""
    late = values[len(values) // 2 :]
    if len(late) < 3:
        return 0.0, math.inf
    line = statistics.linear_regression(range(len(late)), late)
    rest = [value - (line.intercept + line.slope * place) for place, value in enumerate(late)]
    spread = math.sqrt(sum(one * one for one in rest) / (len(late) - 2))
    width = math.sqrt(sum((place - (len(late) - 1) / 2) ** 2 for place in range(len(late))))
    return line.slope, 2 * spread / width


def distance(ours: Any, eager: Any) -> float:
    """||ours - eager|| / ||eager||; infinite for other shapes and for what is no number."""
    import numpy

    if ours.shape != eager.shape or not numpy.isfinite(ours).all():
        return math.inf
    return float(numpy.linalg.norm(ours - eager) / numpy.linalg.norm(eager))


# ---- random prompts ----------------------------------------------------------------------------------------


def soak(given: Given, count: int) -> Soak:
    """Run random prompts on a server and on one without Nexfort, and look what the first leaves."""
    found, cache = Soak(first=first(given.models)), given.folder / "cache"
    place = given.comfyui, given.folder
    with Server(*place, "ours", cache=cache) as ours, Server(*place, "eager") as eager:
        for prompt in prompts(count, given.seed, given.models):
            if not given.goes_on:
                break
            _one(found, ours, eager, prompt)
            if found.prompts % 10 == 0:
                told = f"{found.prompts} prompts, {found.compiled} compiled, {found.mb[-1]:.0f} MB"
                given.say(f"{told}, eager {found.eager_mb[-1]:.0f} MB")
        found.left = ours.kill()
    found.left_after_start = _after_next_start(given, "ours", cache, found.left)
    return found


def _one(found: Soak, ours: Server, eager: Server, prompt: Prompt) -> None:
    before = ours.artefacts()
    wanted, number = eager.begin(prompt), ours.begin(prompt)
    if prompt.cancel is not None:
        ours.cancel(prompt.cancel)
    latent, problem = ours.end(number)
    expected, failed = eager.end(wanted)
    found.prompts += 1
    found.bypassed += prompt.bypass
    made = ours.artefacts() - before
    found.compiled += made
    found.compiled_late += made if found.prompts > found.first else 0
    if prompt.cancel is not None and problem is not None and "interrupted" in problem:
        found.cancelled += 1
    elif problem is not None or failed is not None:
        found.errors.append(f"{prompt}: {problem or 'none'}; eager: {failed or 'none'}")
    else:
        found.compared += 1
        away = distance(latent, expected)
        found.farthest = max(found.farthest, away)
        if away > TOLERANCE:
            found.unequal.append(f"{prompt}: {away:.2g} away")
    found.mb.append(ours.resident())
    found.eager_mb.append(eager.resident())


def _after_next_start(given: Given, name: str, cache: Path, left: Left) -> list[str]:
    """What of a server's leavings is there once the next one on its cache has run a prompt."""
    with Server(given.comfyui, given.folder, name, cache=cache) as again:
        again.run(next(prompts(1, 0, given.models)))
        return _still_there(again, left)


def _still_there(server: Server, left: Left) -> list[str]:
    staging = set(left.staging) & set(names_in(server.cache / "staging"))
    return sorted(staging | (set(left.temporary) & set(names_in(server.temporary))))


# ---- kill -9 while compiling -------------------------------------------------------------------------------


def kills(given: Given, count: int) -> list[Kill]:
    """Kill a server while it compiles, again and again on one cache, which is emptied once all is compiled."""
    draw, found = random.Random(given.seed), []
    cache, left = given.folder / "cache-killed", Left()
    while len(found) < count and given.goes_on:
        with Server(given.comfyui, given.folder, "killed", cache=cache) as server:
            number = server.begin(next(prompts(1, draw.randrange(1 << 20), given.models)))
            compiled = _wait_for_compiling(server, number, draw)
            if found:
                found[-1].left_after_start += _still_there(server, left)
                left = Left()
            if compiled is None:
                server.running.post("/nexfort/cache/clear", {"confirm": True})
                continue
            left = server.kill(signal.SIGKILL)
            found.append(Kill(*compiled, server.artefacts(), unsound(cache), left.processes))
            told = f"killed {len(found)} times, this time with {compiled[0]} of {compiled[1]} regions compiled"
            given.say(f"{told}, {found[-1].artefacts} artefacts in the cache")
    if found:
        found[-1].left_after_start += _after_next_start(given, "killed", cache, left)
    return found


def _wait_for_compiling(server: Server, number: str, draw: random.Random) -> tuple[int, int] | None:
    """Wait until a random part is compiled, and a moment more: (how much, of how much). None: all is compiled.

    All is among the parts: where one region is left that takes longer than the moment, it would never be compiled.
    """
    share, moment = draw.random(), draw.uniform(0.0, _MOMENT)
    while True:
        nodes = server.running.get("/nexfort/nodes")["nodes"]
        compiling = [(node["done"], node["total"]) for node in nodes if node["state"] == "compiling"]
        if compiling and compiling[0][0] >= int(share * (compiling[0][1] + 1)):
            time.sleep(moment)
            return compiling[0]
        if not compiling and server.running.get(f"/history/{number}"):  # it has ended
            return None
        time.sleep(0.02)


# ---- a full disk -------------------------------------------------------------------------------------------


def disks(given: Given, count: int) -> list[Disk]:
    """Two prompts with a cache on each of so many file systems, the first of a few pages, the last large enough."""
    found = []
    with Server(given.comfyui, given.folder, "eager") as eager:
        for number in range(count):
            if not given.goes_on:
                break
            share = number / max(count - 1, 1)
            disk = Disk(int(16384 * (_ROOM / 16384) ** share))
            with small_disk(given.folder / f"disk{number}", disk.bytes) as cache:
                _on(disk, cache, given, eager)
            found.append(disk)
            given.say(f"a disk of {disk.bytes} bytes: {disk.artefacts} artefacts, {len(disk.problems)} problems")
    return found


def _on(disk: Disk, cache: Path, given: Given, eager: Server) -> None:
    with Server(given.comfyui, given.folder, "full", cache=cache) as server:
        for prompt in prompts(2, disk.bytes, given.models):
            latent, problem = server.run(prompt)
            expected, _ = eager.run(prompt)
            disk.prompts += 1
            if problem is not None:
                disk.problems.append(problem)
            elif (away := distance(latent, expected)) > TOLERANCE:
                disk.problems.append(f"{prompt}: {away:.2g} away")
        disk.artefacts = server.artefacts()
    if (reason := unsound(cache)) is not None:
        disk.problems.append(f"the cache is not sound: {reason}")


# ---- the command -------------------------------------------------------------------------------------------


def table(soaked: Soak | None, killed: list[Kill], full: list[Disk]) -> str:
    """What was found, for people."""
    rows: list[tuple[str, object]] = []
    if soaked is not None:
        rows += [("prompts", soaked.prompts), ("  cancelled", soaked.cancelled), ("  bypassed", soaked.bypassed)]
        rows += [("compared with eager", soaked.compared), ("  unequal", len(soaked.unequal))]
        rows += [("  farthest", f"{soaked.farthest:.1e}"), ("errors", len(soaked.errors))]
        rows += [("compiled", soaked.compiled), (f"  after the first {soaked.first}", soaked.compiled_late)]
        for name, (value, error) in soaked.slopes().items():
            rows.append((f"memory, {name}", f"{value:+.3f} +- {error:.3f} MB a prompt"))
        rows += [("left: processes, after 2 s", len(soaked.left.processes)), ("  staging/", len(soaked.left.staging))]
        rows += [("  temporary files", len(soaked.left.temporary))]
        rows += [("  of both, after the next start", len(soaked.left_after_start))]
    if killed:
        rows += [("killed while compiling", len(killed)), ("  caches unsound", sum(bool(k.unsound) for k in killed))]
        rows += [("  workers alive after 2 s", sum(bool(k.processes) for k in killed))]
        rows += [("  left after the next start", sum(bool(k.left_after_start) for k in killed))]
    if full:
        rows += [("full disks", len(full)), ("  prompts", sum(disk.prompts for disk in full))]
        rows += [("  problems", sum(len(disk.problems) for disk in full))]
    return "\n".join(f"{name:34}{value}" for name, value in rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=0, metavar="N")
    parser.add_argument("--kill-at", type=int, default=0, metavar="N")
    parser.add_argument("--full-disk", type=int, default=0, metavar="N")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after so many")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["flux", "sd21"], metavar="MODEL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--comfyui", type=Path, help="its root (default: that of this machine)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found to this file")
    args = parser.parse_args(argv)
    if max(args.prompts, args.kill_at, args.full_disk) <= 0:
        parser.error("nothing to do; expected --prompts, --kill-at or --full-disk with a number")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Soak and print."""
    args = parse(argv)
    until = time.monotonic() + args.seconds

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    folder = Path(tempfile.mkdtemp(prefix="nexfort-soak-"))
    try:
        given = Given(find(args.comfyui), folder, args.models, args.seed, until, say)
        make_files(given.comfyui, folder / "models", args.models)
        soaked = soak(given, args.prompts) if args.prompts else None
        killed = kills(given, args.kill_at)
        full = disks(given, args.full_disk) if args.full_disk else []
    except ComfyError as error:
        say(str(error))
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(soaked, killed, full))
    broken = [line for one in (soaked, *killed, *full) if one is not None for line in one.broken()]
    for line in broken:
        print(f"DID NOT HOLD: {line}")
    if args.json:
        whole = {"soak": soaked and asdict(soaked) | {"slopes": soaked.slopes()}, "broken": broken}
        whole |= {"kills": [asdict(kill) for kill in killed], "disks": [asdict(disk) for disk in full]}
        args.json.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
