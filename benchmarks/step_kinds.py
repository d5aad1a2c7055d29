# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of each step of pictures in turn, eager beside Nexfort, and what Nexfort's steps were.

    COMFYUI_PATH=... python -m benchmarks.step_kinds zimage-int8-lora [--dynamic-vram]

The workloads are those of `clock_workloads.py`. The pictures: without a LoRA, twice; with one, twice; at another
strength, twice; without again. A step of Nexfort is observed, captured, replayed, or ran on weights that were fetched.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .one_run import Sampling, as_without_card, find_comfyui

PICTURES = (("plain", 0.0), ("plain", 0.0), ("lora 0.8", 0.8), ("again", 0.8), ("lora 0.4", 0.4), ("again", 0.4))
_KINDS = ("_observe", "_capture", "_fetched")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--dynamic-vram", action="store_true", help="as ComfyUI's default on NVIDIA")
    args = parser.parse_args(argv)
    find_comfyui()
    if args.dynamic_vram:
        import comfy_aimdo.control

        comfy_aimdo.control.init()  # before torch loads CUDA
    as_without_card()
    import comfy.model_management
    import comfy.sd

    from nexfort_engine.config.compile_config import CompileConfig
    from nexfort_engine.hosts.comfy.model import attach, report_of

    from . import card
    from .clock_workloads import WORKLOADS, lora_of, model_of

    row, device = WORKLOADS[args.workload], comfy.model_management.get_torch_device()
    if args.dynamic_vram:
        card.use_dynamic_vram(device.index)
    eager, ours = model_of(row, device), attach(model_of(row, device), CompileConfig.parse(None))
    file, kinds = lora_of(eager, row, 1), _watched()
    own = row.backbone
    inputs = SimpleNamespace(
        latent=row.latent, conditioning=own.conditioning, cfg=own.cfg, scheduler=own.scheduler, size=own.size
    )
    sampling, patched = Sampling(inputs, ""), dict[tuple[int, float], Any]()
    for what, strength in (*PICTURES, ("plain", 0.0)):
        for label, patcher in (("eager", eager), ("nexfort", ours)):
            key = id(patcher), strength
            if key not in patched:
                with_file = comfy.sd.load_lora_for_models(patcher, None, file, strength, 0)[0] if strength else patcher
                patched[key] = with_file
            kinds.clear()
            times: list[float] = []
            began = time.perf_counter()
            sampling(patched[key], row.steps, None, times)
            steps = " ".join(f"{seconds * 1e3:.1f}" for seconds in times)
            print(f"{what}, {label}: {time.perf_counter() - began:.2f} s; ms {steps}; {' '.join(kinds)}", flush=True)
    report = report_of(ours).as_dict()
    print(f"compiled {report['artefacts_compiled']}, eager {report['eager'][:5]}, notes {report['notes']}", flush=True)
    return 0


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
