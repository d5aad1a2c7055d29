# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of each step of pictures in turn, eager beside Nexfort, and what Nexfort's steps were.

    COMFYUI_PATH=... python -m benchmarks.step_kinds zimage-int8-lora [--dynamic-vram] [--pictures plain] [--noise]
    COMFYUI_PATH=... python -m benchmarks.step_kinds zimage-int8 --options '{}' --options '{"options": ...}'

The workloads are those of `clock_workloads.py`. The pictures: without a LoRA, four times, since short pictures have
their graph from the third on; with one, four times; at another strength, twice; without again. A step of Nexfort is
observed, captured, replayed, or ran on weights that were
fetched. The distance is ||ours - eager|| / ||eager|| of the latent, the noise floor that of eager itself with torch's
memory-efficient attention. A JSON line ends each way of running: the median step, without the first, of the fastest
picture of each kind, and its ratio to eager's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .one_run import Sampling, as_without_card, find_comfyui, use_only_efficient_attention

PICTURES: dict[str, tuple[tuple[str, float], ...]] = {
    "plain": (("plain", 0.0),) * 4,
    "lora": (("lora 0.8", 0.8),) * 4,
    "all": (
        *(("plain", 0.0),) * 4,
        *(("lora 0.8", 0.8),) * 4,
        *(("lora 0.4", 0.4),) * 2,
        ("plain", 0.0),
    ),
}
_KINDS = ("_observe", "_capture", "_fetched")


@dataclass
class Way:
    """One way of running the network. latents: of the last picture of a kind. medians: of the fastest, in seconds."""

    label: str
    patcher: Any
    patched: dict[float, Any] = field(default_factory=dict)
    latents: dict[str, Any] = field(default_factory=dict)
    medians: dict[str, float] = field(default_factory=dict)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--dynamic-vram", action="store_true", help="as ComfyUI's default on NVIDIA")
    parser.add_argument("--options", action="append", default=[], help="of one more way of running it, as JSON")
    parser.add_argument("--pictures", choices=tuple(PICTURES), default="all")
    parser.add_argument("--steps", type=int, default=0, help="default: the workload's")
    parser.add_argument("--noise", action="store_true", help="the noise floor too")
    parser.add_argument("--profile", type=Path, help="folder for the kernels of four queued steps of each way")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = parse(argv)
    find_comfyui()
    if args.dynamic_vram:
        import comfy_aimdo.control

        comfy_aimdo.control.init()  # before torch loads CUDA
    as_without_card()
    import comfy.model_management

    from nexfort_engine.config.compile_config import CompileConfig
    from nexfort_engine.hosts.comfy.model import attach, report_of

    from . import card
    from .clock_workloads import WORKLOADS, lora_of, model_of, weights_of

    row, device = WORKLOADS[args.workload], comfy.model_management.get_torch_device()
    if args.dynamic_vram:
        card.use_dynamic_vram(device.index)
    weights = weights_of(row, device)
    ways = [Way("eager", model_of(row, weights))]
    for options in args.options or [""]:
        ours = attach(model_of(row, weights), CompileConfig.parse(options or None))
        ways.append(Way(f"nexfort {options}".strip(), ours))
    del weights
    file, kinds = lora_of(ways[0].patcher, row, 1), _watched()
    own = row.backbone
    inputs = SimpleNamespace(
        latent=row.latent, conditioning=row.conditioning, cfg=own.cfg, scheduler=own.scheduler, size=own.size
    )
    sampling, steps = Sampling(inputs, ""), args.steps or row.steps
    for what, strength in PICTURES[args.pictures]:
        for way in ways:
            kinds.clear()
            times: list[float] = []
            patcher, began = _patched(way, file, strength), time.perf_counter()
            way.latents[what] = sampling(patcher, steps, None, times)
            took = time.perf_counter() - began
            way.medians[what] = min(statistics.median(times[1:]), way.medians.get(what, math.inf))
            each = " ".join(f"{seconds * 1e3:.1f}" for seconds in times)
            print(f"{what}, {way.label}: {took:.2f} s; ms {each}; {' '.join(kinds)}", flush=True)
    if args.profile:
        for number, way in enumerate(ways):
            _profile(way, sampling, args.profile / f"{args.workload}-{number}.txt")
    floors = _noise(ways[0], sampling, steps) if args.noise else {}
    for way in ways:
        found = _summary(way, ways[0], floors) | {"workload": row.name, "gpu": card.name()}
        if way is not ways[0]:
            report = report_of(way.patcher).as_dict()
            found |= {"compiled": report["artefacts_compiled"], "eager": report["eager"][:5], "notes": report["notes"]}
        print(json.dumps(found), flush=True)
    return 0


def _patched(way: Way, file: dict[str, Any], strength: float) -> Any:
    """The way's network with the LoRA at a strength."""
    import comfy.sd

    if not strength:
        return way.patcher
    if strength not in way.patched:
        way.patched[strength] = comfy.sd.load_lora_for_models(way.patcher, None, file, strength, 0)[0]
    return way.patched[strength]


def _noise(eager: Way, sampling: Sampling, steps: int) -> dict[str, float]:
    """The distance of eager's latent with other kernels for attention to eager's own, by picture."""
    use_only_efficient_attention()
    found = {}
    for what, latent in eager.latents.items():
        strength = float(what.partition(" ")[2] or 0)
        found[what] = _distance(sampling(eager.patched.get(strength, eager.patcher), steps), latent)
    return found


def _distance(ours: Any, eager: Any) -> float:
    return float((ours.double() - eager.double()).norm() / eager.double().norm())


def _summary(way: Way, eager: Way, floors: dict[str, float]) -> dict[str, Any]:
    """One line of the way's figures."""
    found: dict[str, Any] = {"way": way.label}
    for what, seconds in way.medians.items():
        each = {"ms": round(seconds * 1e3, 2), "ratio": round(seconds / eager.medians[what], 4)}
        each["distance"] = float(f"{_distance(way.latents[what], eager.latents[what]):.4g}")
        if what in floors:
            each["noise_floor"] = float(f"{floors[what]:.4g}")
        found[what] = each
    return found


def _profile(way: Way, sampling: Sampling, file: Path) -> None:
    """Write the card's kernels of four queued steps."""
    from contextlib import redirect_stderr

    from . import card

    file.parent.mkdir(parents=True, exist_ok=True)
    patcher = next(reversed(way.patched.values()), way.patcher)
    with file.open("w", encoding="utf-8") as opened, redirect_stderr(opened):
        print(way.label, file=sys.stderr)
        card.profile(lambda: sampling.queued(patcher, 4))


def _watched() -> list[str]:
    """The names of what the engine does with whole steps, as it does it."""
    from nexfort_engine.cudagraphs.step_graph import StepGraph
    from nexfort_engine.cudagraphs.step_graphs import StepGraphs

    found: list[str] = []

    def watch(owner: type, name: str) -> None:
        own = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            found.append(name.strip("_"))
            return own(*args, **kwargs)

        setattr(owner, name, noted)

    for name in _KINDS:
        watch(StepGraphs, name)
    watch(StepGraph, "replay")
    return found


if __name__ == "__main__":
    sys.exit(main())
