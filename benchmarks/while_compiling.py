# SPDX-License-Identifier: Apache-2.0
"""Steps beside the compiler: how long they take eager, while artefacts are made in the background, and compiled.

    COMFYUI_PATH=... python -m benchmarks.while_compiling sdxl
    COMFYUI_PATH=... python -m benchmarks.while_compiling flux --small --size 1024x1024 --steps 12

The cache is empty at first. Pictures are sampled one after another until everything is made, as ComfyUI does it with a
full queue. Each step is waited for. Prints a JSON line: milliseconds of a step, the ratio to eager's mean, the first
step apart, which plans what is to be made. Steps beside a capture, which takes this process's Python, are apart from
those beside lowering alone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from .one_run import Sampling, as_without_card, find_comfyui

MOST_PICTURES = 200


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone")
    parser.add_argument("--options", default="{}", help="options of Nexfort as JSON")
    parser.add_argument("--steps", type=int, default=20, help="of a picture")
    parser.add_argument("--size", default="", help="HEIGHTxWIDTH, default the backbone's")
    parser.add_argument("--small", action="store_true", help="the backbone at a size for a processor, in float32")
    parser.add_argument("--processes", type=int, default=None, help="that compile at once; default: as Nexfort has it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    args = parse(argv)
    find_comfyui()
    if args.processes is not None:
        os.environ["NEXFORT_WORKERS"] = str(args.processes)
    import torch

    from .backbones import BACKBONES, state_dict

    backbone = BACKBONES[args.backbone].at_small_size() if args.small else BACKBONES[args.backbone]
    as_without_card()
    import comfy.model_management
    import comfy.sd

    weights = state_dict(backbone, comfy.model_management.get_torch_device())
    patcher = comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": backbone.dtype})
    del weights
    with tempfile.TemporaryDirectory(prefix="nexfort-beside-") as folder, torch.inference_mode():
        os.environ["NEXFORT_CACHE_DIR"] = folder
        found = measure(patcher, Sampling(backbone, args.size), args)
    print(json.dumps({"backbone": backbone.name, **found}), flush=True)
    return 0


def measure(patcher: Any, sampling: Sampling, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of steps: eager, while it compiles, compiled."""
    from nexfort_engine.config.compile_config import CompileConfig
    from nexfort_engine.hosts.comfy import model as host

    sampling(patcher, 2)
    eager: list[float] = []
    for _ in range(2):
        sampling(patcher, args.steps, times=eager)
    config = CompileConfig.parse(json.loads(args.options)).without_waiting()
    compiled = host.attach(patcher, config)
    engine = host.engine_for(patcher.model.diffusion_model, config, patcher.model)
    background = engine.builder.background
    if background is None:
        raise ValueError(f"these options have each step wait for what it lacks: {args.options}")
    began = time.perf_counter()
    first = None
    with captures() as spans:
        beside: list[tuple[float, float]] = []
        for _ in range(MOST_PICTURES):
            times: list[float] = []
            sampling(compiled, args.steps, times=times)
            ends = list(itertools.accumulate(reversed(times), initial=0.0))
            now = time.perf_counter()
            rows = [(now - ends[i + 1], now - ends[i]) for i in reversed(range(len(times)))]
            if first is None:
                first = times[0]
                rows = rows[1:]
            if not background.busy:
                break  # some of this picture's steps were no longer beside anything
            beside += rows
    captured = [row for row in beside if any(row[0] < end and begin < row[1] for begin, end in spans)]
    if not background.join(600):
        raise TimeoutError("it still compiles after ten minutes")
    made = time.perf_counter() - began
    sampling(compiled, args.steps)
    after: list[float] = []
    sampling(compiled, args.steps, times=after)
    told = engine.report.as_dict()
    return {
        "eager": of(eager),
        "first_step_ms": round(first * 1e3, 1) if first is not None else None,
        "beside_captures": of([end - begin for begin, end in captured], statistics.fmean(eager)),
        "beside_lowering": of(
            [end - begin for begin, end in beside if (begin, end) not in captured], statistics.fmean(eager)
        ),
        "after": of(after, statistics.fmean(eager)),
        "seconds_of_captures": round(sum(end - begin for begin, end in spans), 1),
        "seconds_until_made": round(made, 1),
        "artefacts": told["artefacts_compiled"],
        "uncompiled": [row["reason"] for row in told["eager"]],
    }


@contextlib.contextmanager
def captures() -> Iterator[list[tuple[float, float]]]:
    """When blocks were captured inside the block, from and to."""
    from nexfort_engine.capture import exporter

    spans: list[tuple[float, float]] = []
    own = exporter._on_tracing_thread

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return own(*args)
        finally:
            spans.append((began, time.perf_counter()))

    exporter._on_tracing_thread = timed
    try:
        yield spans
    finally:
        exporter._on_tracing_thread = own


def of(seconds: list[float], eager: float | None = None) -> dict[str, Any]:
    """Median, 95th percentile and most of steps, and the ratio of their mean to eager's."""
    if not seconds:
        return {"steps": 0}
    ordered = sorted(seconds)
    found = {
        "steps": len(ordered),
        "median_ms": round(statistics.median(ordered) * 1e3, 1),
        "p95_ms": round(ordered[int(0.95 * (len(ordered) - 1))] * 1e3, 1),
        "most_ms": round(ordered[-1] * 1e3, 1),
        "mean_ms": round(statistics.fmean(ordered) * 1e3, 1),
    }
    return found if eager is None else {**found, "ratio": round(statistics.fmean(ordered) / eager, 3)}


if __name__ == "__main__":
    raise SystemExit(main())
