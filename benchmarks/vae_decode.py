# SPDX-License-Identifier: Apache-2.0
"""Seconds of decoding and encoding by the VAE of a workload, eager beside Nexfort, with memory and distances.

    COMFYUI_PATH=... python -m benchmarks.vae_decode wan22-fp8-lora [--frames 81] [--size 480x832] [--exact] [--encode]
    COMFYUI_PATH=... python -m benchmarks.vae_decode sdxl --options '{}' --options '{"options": ...}'

The workloads are those of `clock_workloads.py`; weights and latents are random. All ways run in one process, one after
another: eager, Nexfort with each --options, and with --exact eager in float32. A JSON line ends each: seconds of the
first call, of the fastest call after it and its ratio to eager's, the most GiB that torch's allocator held in later
calls, and ||ours - eager|| / ||eager||. With --exact the distance to float32 too. The first call of Nexfort waits for
all that is compiled where NEXFORT_WAIT=1 is set. The copy of the result to main memory counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .one_run import as_without_card, find_comfyui


@dataclass
class Way:
    """One way of running the VAE."""

    label: str
    vae: Any


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--size", default="", help="HEIGHTxWIDTH, default the workload's")
    parser.add_argument("--frames", type=int, default=0, help="default the workload's")
    parser.add_argument("--runs", type=int, default=4, help="calls of each way behind the first")
    parser.add_argument("--options", action="append", default=[], help="of one more way of running it, as JSON")
    parser.add_argument("--exact", action="store_true", help="eager in float32 too")
    parser.add_argument("--encode", action="store_true", help="encode what eager decoded, too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = parse(argv)
    find_comfyui()
    as_without_card()
    import comfy.model_management
    import comfy.sd
    import torch

    from nexfort_engine.config.compile_config import CompileConfig
    from nexfort_engine.hosts.comfy.model import attach_vae

    from .clock_workloads import WORKLOADS, vae_of, vae_weights

    row = WORKLOADS[args.workload]
    if args.frames:
        count = row.latents(args.frames)
        row = replace(row, latents=lambda _: count)
    height, width = map(int, args.size.split("x")) if args.size else row.backbone.size
    weights = vae_weights(row, comfy.model_management.get_torch_device())
    ways = [Way("eager", vae_of(row, dict(weights)))]
    for options in args.options or [""]:
        ours = attach_vae(vae_of(row, dict(weights)), CompileConfig.parse(options or None))
        ways.append(Way(f"nexfort {options}".strip(), ours))
    if args.exact:
        exact = comfy.sd.VAE(sd=dict(weights), metadata=row.metadata, dtype=torch.float32)
        ways.append(Way("float32", exact))
    latent = row.latent(height, width)
    video = latent.tensors[0] if row.sound is not None else latent
    video = torch.randn(video.shape, generator=torch.Generator().manual_seed(1))
    decoded = _measured(args, "decode", ways, lambda vae: vae.decode(video))
    if args.encode:
        pixels = decoded.float().flatten(0, decoded.ndim - 4)[..., :3]
        _measured(args, "encode", ways, lambda vae: vae.encode(pixels))
    return 0


def _measured(args: argparse.Namespace, what: str, ways: Sequence[Way], run: Callable[[Any], Any]) -> Any:
    """Print a line of each way; gives eager's result."""
    import comfy.model_management

    from nexfort_engine.hosts.comfy.model import report_of

    from . import card

    results: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    for way in ways:
        comfy.model_management.unload_all_models()  # the weights of the way before
        first, results[way.label] = _timed(run, way.vae)
        card.count_anew()
        seconds = min(_timed(run, way.vae)[0] for _ in range(args.runs))
        line = {"workload": args.workload, "what": what, "way": way.label, "gpu": card.name()}
        line |= {"shape": list(results[way.label].shape), "first_s": round(first, 3), "s": round(seconds, 4)}
        line |= {"ratio": round(seconds / lines[0]["s"], 3) if lines else 1.0, "peak_gib": card.peak()}
        if way.label.startswith("nexfort"):
            report = report_of(way.vae)
            found = report.as_dict() if report is not None else {"eager": [], "notes": []}
            line |= {"artefacts": found.get("artefacts_compiled"), "eager": found["eager"][:5], "notes": found["notes"]}
        lines.append(line)
    for line in lines:
        line["distance"] = _distance(results[line["way"]], results["eager"])
        if "float32" in results:
            line["to_float32"] = _distance(results[line["way"]], results["float32"])
        print(json.dumps(line), flush=True)
    return results["eager"]


def _timed(run: Callable[[Any], Any], vae: Any) -> tuple[float, Any]:
    """Seconds of one call, and its result in main memory."""
    import torch

    from . import card

    card.settle()
    began = time.perf_counter()
    with torch.inference_mode():  # as ComfyUI runs its nodes
        found = run(vae)
    card.settle()
    return time.perf_counter() - began, found


def _distance(ours: Any, theirs: Any) -> float:
    return float(f"{float((ours.double() - theirs.double()).norm() / theirs.double().norm()):.4g}")


if __name__ == "__main__":
    sys.exit(main())
