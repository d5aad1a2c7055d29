# SPDX-License-Identifier: Apache-2.0
"""Rung by rung: eager, torch.compile as ComfyUI has it, Nexfort with each switch of its config alone and together.

    COMFYUI_PATH=... python -m benchmarks.ladder sdxl flux [--rungs fp32,eager,core,plain,plain+cudagraphs,default]

A rung of Nexfort is `plain` (regions with all switches off) or `default` (what a user gets), and switches joined by
"+"; `fuse` stands for every graph rewrite at once. What compiles runs in two processes: with empty caches, and warm
with what the first left. Rows go to results.csv as they are measured, so that one that is stopped keeps what it has.
A rung that fails, or that this device cannot have, is in the table with its reason, and the exit code is 1 at the end.

With --small the networks are of a size for a processor; such rows go nowhere unless --csv names a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ladder_table import line_of, table
from benchmarks.rows import COLUMNS, Row, append_rows, child, commit, device, distance, row_of
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.config.option_catalogue import OPTION_ROWS
from nexfort_engine.config.pass_catalogue import PASSES

RESULTS = Path(__file__).resolve().parent / "results.csv"
REWRITES = tuple(name for name in OPTION_ROWS if name.startswith("fuse."))
OPTIONS = tuple(name for name, row in OPTION_ROWS.items() if row.rung)
FOR_GPUS = {one.option for one in PASSES if one.gpu}
SWITCHES: dict[str, dict[str, Any]] = {
    **{OPTION_ROWS[name].rung: {"options": {name: True}} for name in OPTIONS},
    "fuse": {"options": dict.fromkeys(REWRITES, True)},
    "channels_last": {"memory_format": "channels_last"},
    "max-autotune": {"mode": "max-autotune"},
    "O3": {"mode": "O3"},
}
_OFF = {
    "memory_format": "contiguous_format",
    "options": dict.fromkeys(OPTIONS, False),
}
BASES: dict[str, dict[str, Any]] = {"plain": _OFF, "default": {}}
OTHERS = {"fp32": False, "eager": False, "noise": False, "core": True, "regional": True}  # whether it compiles
RUNGS = (
    *OTHERS,
    "plain",
    *(f"plain+{name}" for name in SWITCHES if name != "fuse" or len(REWRITES) > 1),
    *("plain+fuse+channels_last", "default", "default+max-autotune", "default+O3", "default+max-autotune+O3"),
)


class Unknown(ValueError):
    """A rung that there is not. The text says what was found and what was expected."""


@dataclass(frozen=True)
class Rung:
    """One line of the table. way: of one_run. switches: those that are on besides the base. options: Nexfort's."""

    name: str
    way: str
    compiles: bool
    switches: tuple[str, ...] = ()
    options: str = ""

    def ways(self) -> tuple[str, ...]:
        """What its processes are called in results.csv, the cold one first."""
        if self.name == "default":
            return "cold", "warm"  # as benchmarks.record calls them, for the table and the chart of both
        return (self.name, f"{self.name}, warm") if self.compiles else (self.name,)


def rung(name: str) -> Rung:
    """The rung of that name. Raises Unknown."""
    if name in OTHERS:
        return Rung(name, name, OTHERS[name])
    base, *switches = name.split("+")
    if base not in BASES or any(switch not in SWITCHES for switch in switches):
        raise Unknown(
            f"there is no rung {name!r}; expected one of {', '.join(OTHERS)}, or one of {', '.join(BASES)} with any of "
            f"{', '.join(SWITCHES)} after a '+', such as plain+{next(iter(SWITCHES))}"
        )
    given: dict[str, Any] = {**BASES[base], "options": dict(BASES[base].get("options", {}))}
    modes = []
    for switch in switches:
        change = SWITCHES[switch]
        modes += [change["mode"]] if "mode" in change else []
        given["options"].update(change.get("options", {}))
        given.update({key: value for key, value in change.items() if key not in ("mode", "options")})
    if modes:
        given["mode"] = ":".join(modes if "O3" in modes else ["O2", *modes])
    given = {key: value for key, value in given.items() if value != {}}
    CompileConfig.parse(given)  # a switch that the config no longer has is told before anything runs
    return Rung(name, "nexfort", True, tuple(switches), json.dumps(given) if given else "")


def refusal(wanted: Rung, under: Row) -> str:
    """Why a device cannot have a rung, or nothing. under: the device, as rows.device gives it."""
    for switch in wanted.switches:
        if switch == "cudagraphs" and under["type"] != "cuda":
            return "CUDA graphs need an NVIDIA GPU, and there is none"
        if switch == "O3" and under["no_fp8"]:
            return under["no_fp8"]
        if set(SWITCHES[switch].get("options", {})) & FOR_GPUS and under["type"] != "cuda":
            return "graphs are rewritten for a GPU only, which is where that was measured to win"
    return ""


def main(argv: list[str] | None = None) -> int:
    """Measure, append, print."""
    args = parse(argv)
    try:
        rungs = [rung(name) for name in args.rungs.split(",")]
        _known(args.backbones, args.small)
    except ValueError as error:
        sys.stderr.write(f"ladder: {error}\n")
        return 2
    rungs.sort(key=lambda one: {"fp32": 0, "eager": 1}.get(one.name, 2))  # what the others are compared with
    rows: list[Row] = []
    try:
        for backbone in args.backbones:
            with tempfile.TemporaryDirectory() as folder:
                climb(backbone, rungs, args, Path(folder), rows)
    except KeyboardInterrupt:
        sys.stderr.write("ladder: stopped; what was measured until then is below, and in the file\n")
        print(table(rows))
        return 130
    print(table(rows))
    return 1 if any(row["ms"] == "" for row in rows) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbones", nargs="*", default=["sdxl", "flux", "pixart", "sd21", "wan"])
    parser.add_argument("--rungs", default=",".join(RUNGS), help="which, joined by commas (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="networks of a size for a processor, in float32")
    parser.add_argument("--csv", default="", help="file to append to (default: results.csv beside this; small: none)")
    parser.add_argument("--commit", default="", help="what is measured; default: git's HEAD")
    parser.add_argument("--log", default="", help="folder for the full output of each process")
    return parser.parse_args(argv)


def _known(backbones: list[str], small: bool) -> None:
    """Raise ValueError for a network that there is not, or not at that size."""
    from benchmarks.backbones import BACKBONES

    for name in backbones:
        if name not in BACKBONES:
            raise ValueError(f"the network is {name!r}; expected one of {', '.join(BACKBONES)}")
        if small:
            BACKBONES[name].at_small_size()


def climb(backbone: str, rungs: list[Rung], args: argparse.Namespace, folder: Path, rows: list[Row]) -> None:
    """Run the rungs on one backbone; rows grow, and the file with them, process by process."""
    file = args.csv or ("" if args.small else str(RESULTS))
    called = f"{backbone}, small" if args.small else backbone
    about = {"backbone": called, "commit": commit(args.commit), "command": command_line(backbone, args)}
    under = device()
    for one in rungs:
        refused = refusal(one, under)
        for number, way in enumerate(one.ways()):
            if refused:
                known = {"gpu": under["gpu"], "torch": under["torch"], "steps": args.steps, "reason": refused}
            else:
                known = one_process(backbone, one, number, args, folder)
            latent = folder / f"{one.name}_{number}.pt"
            row = row_of(known, **about, way=way, options=one.options, **_distances(latent, folder))
            rows.append(row)
            if file:
                append_rows(Path(file), [row], COLUMNS)
            print(line_of(row), flush=True)
            if row["ms"] == "":
                break  # there is nothing to start warm from


def one_process(backbone: str, one: Rung, number: int, args: argparse.Namespace, folder: Path) -> Row:
    """Measure a rung cold (number 0) or, in a second process, warm."""
    flags = ["--steps", str(args.steps), "--flops", *(["--small"] if args.small else [])]
    flags += ["--options", one.options] if one.options else []
    name = f"{one.name}_{number}"
    log = Path(args.log) / f"{backbone}_{name}.log" if args.log else None
    found = child(backbone, one.way, flags, latent=folder / f"{name}.pt", caches=folder / one.name, log=log)
    return {**found, "reason": found.get("reason") or remarks(found.get("report") or {})}


def remarks(report: dict[str, Any]) -> str:
    """What of a rung did not go as asked although it ran, as its report has it."""
    found = [f"{row['region']} ran eager: {row['reason']}" for row in report.get("eager", ())]
    found += [f"{row['token']} is not active: {row['reason']}" for row in report.get("inactive", ())]
    return "; ".join([*found, *report.get("notes", ())])


def _distances(latent: Path, folder: Path) -> dict[str, Any]:
    """How far the last latent of a process is from float32's and from eager's."""
    return {
        "error_to_fp32": distance(latent, folder / "fp32_0.pt"),
        "error_to_eager": distance(latent, folder / "eager_0.pt"),
    }


def command_line(backbone: str, args: argparse.Namespace) -> str:
    """The command that gives such rows again."""
    rungs = f" --rungs {args.rungs}" if args.rungs != ",".join(RUNGS) else ""
    return f"python -m benchmarks.ladder {backbone}{rungs} --steps {args.steps}{' --small' if args.small else ''}"


if __name__ == "__main__":
    sys.exit(main())
