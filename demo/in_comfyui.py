# SPDX-License-Identifier: Apache-2.0
"""The demo in a real ComfyUI: a shipped workflow, run headless by the ComfyUI that is on this machine.

Nothing of that ComfyUI is changed or used but its code: models, outputs and the artefact cache lie in a folder of the
demo's own. The checkpoint is a tiny one with random weights, made here by ComfyUI's own classes. Two servers run one
after another on one artefact cache: the first finds it empty, the second does not.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nexfort_engine.cli.comfy_server import ComfyServer
from nexfort_engine.cli.run_workflows import listening
from nexfort_engine.hosts.comfy_install import comfyui_version

from .outcome import SIZES, STEPS, Outcome, Stop, first_step_s, per_step_ms

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = "flux_compile_model"
FILES = {"unet_name": "flux_unet", "vae_name": "taesd_flux"}
# The real text encoders cannot be tiny: random conditioning of the tiny model's width stands in for them.
TEXT = {"tokens": 77, "width": 64, "pooled": 32}
Say = Callable[[str], None]


def run(comfyui: Path, output: Path, scratch: Path, say: Say) -> Outcome:
    """Run both servers and put together what they found. Pictures land in `output`."""
    base = scratch / "base"
    names = _prepare(comfyui, base, say)
    host = f"ComfyUI {comfyui_version(comfyui) or ''}".strip()
    outcome = Outcome(host=host, model=f"{WORKFLOW} with a tiny model", device="")
    say("first server, empty cache: eager and compiled at each size")
    with _server(comfyui, base, scratch) as server:
        first = _first_server(server, base, names, output, outcome, say)
        outcome.device = _device(server)
        outcome.reports["cold"] = _report(server)
    say("second server, same cache: compiled once more")
    with _server(comfyui, base, scratch) as server:
        _sample(server, base, _workflow(names, SIZES[0], compiled=False))
        latent, _, ends = _sample(server, base, _workflow(names, SIZES[0]), say)
        outcome.warm_first_step = first_step_s(ends)
        report = outcome.reports["warm"] = _report(server)
        outcome.warm_compiled, outcome.warm_loaded = report["artefacts_compiled"], report["artefacts_loaded"]
        outcome.same_bits = bool((latent == first).all())
    return outcome


def _first_server(
    server: ComfyServer, base: Path, names: dict[str, str], output: Path, outcome: Outcome, say: Say
) -> Any:
    """The walk over all sizes, from an empty cache. Gives the compiled latent at the first."""
    _sample(server, base, _workflow(names, SIZES[0], compiled=False, steps=2))  # loads the model
    first = None
    for size in SIZES:
        eager, eager_pictures, eager_ends = _sample(server, base, _workflow(names, size, compiled=False))
        before = _report(server)["artefacts_compiled"]
        latent, pictures, ends = _sample(server, base, _workflow(names, size), say)
        stop = Stop(size, per_step_ms(eager_ends), per_step_ms(ends), _distance(latent, eager))
        stop.artefacts_compiled = _report(server)["artefacts_compiled"] - before
        outcome.stops.append(stop)
        if first is None:
            first, outcome.cold_first_step = latent, first_step_s(ends)
            other, _, _ = _sample(server, base, _workflow(names, size, compiled=False, prompt=2))
            outcome.moved = _distance(other, eager)
        for kind, found in (("eager", eager_pictures), ("compiled", pictures)):
            outcome.images.append(f"{size[0]}x{size[1]}_{kind}.png")
            shutil.copy(found[0], output / outcome.images[-1])
    return first


# ---- what runs ---------------------------------------------------------------------------------------------


def _prepare(comfyui: Path, base: Path, say: Say) -> dict[str, str]:
    """Make the tiny files below `base`; gives loader input -> file name."""
    # The tests make the same files; they live there because tests run where no demo is installed.
    sys.path.append(str(ROOT / "tests" / "support"))
    import tiny_checkpoints

    say("making a tiny checkpoint with random weights")
    made = tiny_checkpoints.make(comfyui, base / "models", *FILES.values())
    (base / "custom_nodes").mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "tests" / "support" / "testing_nodes", base / "custom_nodes" / "testing_nodes")
    return {key: made[name].name for key, name in FILES.items()}


def _server(comfyui: Path, base: Path, scratch: Path) -> ComfyServer:
    arguments = ["--disable-api-nodes", "--force-fp32"]
    waits = {"NEXFORT_WAIT": "1"}  # the first picture is compared with the uncompiled one
    return ComfyServer(
        comfyui, plugin=ROOT, base_dir=base, cache_dir=scratch / "cache", extra_args=arguments, env=waits
    )


def _workflow(
    names: dict[str, str], size: tuple[int, int], *, compiled: bool = True, steps: int = STEPS, prompt: int = 1
) -> dict[str, Any]:
    """The shipped workflow with the tiny files in it, at a size, with its latent saved beside its picture."""
    workflow = json.loads((ROOT / "workflows" / "api" / f"{WORKFLOW}.json").read_text(encoding="utf-8"))
    for number in list(workflow):
        node = workflow[number]
        inputs, kind = node["inputs"], node["class_type"]
        inputs.update({key: name for key, name in names.items() if key in inputs})
        if kind == "NexfortCompileModel":
            inputs["enabled"] = compiled
        elif kind == "KSampler":
            inputs.update(steps=steps, seed=7)
            samples = [number, 0]
        elif kind == "DualCLIPLoader":
            del workflow[number]
        elif kind == "CLIPTextEncode":
            workflow[number] = {"class_type": "TestRandomConditioning", "inputs": {**TEXT, "seed": prompt}}
        elif {"width", "height"} <= inputs.keys():
            inputs["width"], inputs["height"] = size
    workflow["latent"] = {"class_type": "SaveLatent", "inputs": {"samples": samples, "filename_prefix": "latents/demo"}}
    return dict(workflow)


def _sample(
    server: ComfyServer, base: Path, workflow: dict[str, Any], say: Say | None = None
) -> tuple[Any, list[Path], list[tuple[int, float]]]:
    """(latent, pictures, (steps done, when) from the sampler's beginning on) of one run."""
    (sampler,) = [number for number, node in workflow.items() if node["class_type"] == "KSampler"]
    with _watching(server, sampler, workflow[sampler]["inputs"]["steps"], say) as ends:
        history = server.run(workflow)
    (saved,) = history["outputs"]["latent"]["latents"]
    from safetensors.numpy import load_file

    latent = load_file(base / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]
    pictures = [
        base / "output" / image["subfolder"] / image["filename"]
        for out in history["outputs"].values()
        for image in out.get("images", [])
    ]
    return latent, pictures, ends


@contextmanager
def _watching(server: ComfyServer, sampler: str, steps: int, say: Say | None) -> Iterator[list[tuple[int, float]]]:
    """Collects when a sampler began and when its steps ended, as the server tells its clients; complete afterwards.

    The server tells the first step and the last one always, and those between at most ten times a second.
    """
    ends: list[tuple[int, float]] = []
    complete = threading.Event()
    shown = [""]

    def sink(event: dict[str, Any]) -> None:
        now, data = time.perf_counter(), event.get("data") or {}
        kind, step = event.get("type"), data.get("value", 0)
        if kind == "executing" and data.get("node") == sampler:
            ends[:] = [(0, now)]
        elif kind == "progress" and data.get("node") == sampler and ends and step > 0:
            ends.append((step, now))
            if step == steps:
                complete.set()
        elif kind == "progress_text" and say is not None:
            text = str(data.get("text")).partition(",")[0]
            if text != shown[0]:
                shown[0] = text
                say(f"  {text}")

    with listening(server, sink):
        yield ends
        if not complete.wait(timeout=10):
            raise RuntimeError(f"ComfyUI did not tell of the end of {steps} steps, so they cannot be timed: {ends}")


def _report(server: ComfyServer) -> dict[str, Any]:
    """The report of the one compiled model that is alive; an empty one before there is any."""
    engines = server.get("/nexfort/report")["engines"]
    found = [engine["report"] for engine in engines if engine["report"]["calls"]]
    return dict(found[0]) if found else {"artefacts_compiled": 0, "artefacts_loaded": 0}


def _device(server: ComfyServer) -> str:
    stats = server.get("/system_stats")
    kinds = ", ".join(device["name"] for device in stats["devices"])
    return f"{kinds}, float32, torch {stats['system'].get('pytorch_version', '?')}"


def _distance(ours: Any, eager: Any) -> float:
    """||ours - eager|| / ||eager||."""
    import numpy

    return float(numpy.linalg.norm(ours - eager) / numpy.linalg.norm(eager))
