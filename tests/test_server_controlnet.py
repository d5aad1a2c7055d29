# SPDX-License-Identifier: Apache-2.0
"""A compiled control net in a real ComfyUI server: its loader, its nodes, unloading, and a restart.

What is asked of the engine's host is in hosts/test_comfy_controlnet.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import served

from nexfort_engine.cli.comfy_server import ComfyServer

pytestmark = [pytest.mark.comfy, pytest.mark.slow, pytest.mark.large]  # in one process: hosts/test_comfy_controlnet.py
FILES = ("sd15_checkpoint", "sd15_controlnet")
TOLERANCE = 1e-4  # fp32 on a CPU
WIDGETS = {"mode": "O2", "dynamic": True, "memory_format": "channels_last"}


def workflow(*, compiled: bool, strength: float = 1.0, size: tuple[int, int] = (96, 64), cfg: float = 4.0) -> Any:
    """Loader, compile node, "Apply ControlNet (Advanced)" twice in a chain, sampler."""
    words = {"class_type": "TestRandomConditioning", "inputs": {"tokens": 20, "width": 768, "pooled": 0}}
    found: dict[str, dict[str, Any]] = {
        "model": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "tiny_sd15_checkpoint.safetensors"}},
        "net": {"class_type": "ControlNetLoader", "inputs": {"control_net_name": "tiny_sd15_controlnet.safetensors"}},
        "compile": {
            "class_type": "NexfortCompileControlNet",
            "inputs": {"control_net": ["net", 0], **WIDGETS, "enabled": compiled},
        },
        "image": {
            "class_type": "EmptyImage",
            "inputs": {"width": size[0], "height": size[1], "batch_size": 1, "color": 0x406080},
        },
        "positive": {**words, "inputs": {**words["inputs"], "seed": 1}},  # type: ignore[dict-item]
        "negative": {**words, "inputs": {**words["inputs"], "seed": 2}},  # type: ignore[dict-item]
        "empty": {
            "class_type": "EmptyLatentImage",
            "inputs": {"width": size[0], "height": size[1], "batch_size": 1},
        },
    }
    before = (["positive", 0], ["negative", 0])
    for name, part in (("first", {"start_percent": 0.0, "end_percent": 1.0}), ("second", {"start_percent": 0.4})):
        inputs = {"positive": before[0], "negative": before[1], "control_net": ["compile", 0], "image": ["image", 0]}
        inputs |= {"strength": strength, "end_percent": 1.0, **part}
        found[name] = {"class_type": "ControlNetApplyAdvanced", "inputs": inputs}
        before = ([name, 0], [name, 1])
    sampler = {"seed": 3, "steps": 2, "cfg": cfg, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    sampler |= {"model": ["model", 0], "positive": before[0], "negative": before[1], "latent_image": ["empty", 0]}
    found["sampler"] = {"class_type": "KSampler", "inputs": sampler}
    saving = {"samples": ["sampler", 0], "filename_prefix": "latents/control"}
    found["latent"] = {"class_type": "SaveLatent", "inputs": saving}
    return found


class Served:
    """A server with its folders."""

    def __init__(self, server: ComfyServer, comfyui: Path, base: Path, cache: Path) -> None:
        self.server, self.comfyui, self.base, self.cache = server, comfyui, base, cache

    def latent(self, **given: Any) -> numpy.ndarray:
        """What a run of `workflow` gives."""
        return served.latent(self.base, self.server.run(workflow(**given), timeout=300))

    def report(self, server: ComfyServer | None = None) -> dict[str, int]:
        """Counts over all reports that are alive."""
        engines = (server or self.server).get("/nexfort/report")["engines"]
        keys = ("calls", "artefacts_compiled", "artefacts_loaded")
        counts = {key: sum(one["report"][key] for one in engines) for key in keys}
        return {**counts, "eager": sum(len(one["report"]["eager"]) for one in engines)}


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    comfyui = served.comfyui_or_skip()
    base = served.base_folder(tmp_path_factory.mktemp("base"), comfyui, *FILES)
    served.picture(base)
    cache = tmp_path_factory.mktemp("cache")
    with served.server(comfyui, base, cache, "--cache-classic") as running:
        yield Served(running, comfyui, base, cache)


def test_the_latent_is_eager_s_and_the_node_switched_off_is_eager(at: Served) -> None:
    eager = at.latent(compiled=False)
    assert served.distance(at.latent(compiled=False, strength=0.0), eager) > 100 * TOLERANCE
    assert at.report()["calls"] == 0
    assert served.distance(at.latent(compiled=True), eager) < TOLERANCE
    assert at.report()["artefacts_compiled"] and not at.report()["eager"]
    assert numpy.array_equal(at.latent(compiled=False), eager)


def test_other_sizes_and_a_freed_control_net_compile_nothing(at: Served) -> None:
    wanted = at.latent(compiled=True)
    before = at.report()
    for given in ({"size": (64, 128)}, {"cfg": 1.0}, {"strength": 0.5}):
        assert served.distance(at.latent(compiled=True, **given), at.latent(compiled=False, **given)) < TOLERANCE
    assert at.report()["calls"] > before["calls"] and at.report()["artefacts_compiled"] == before["artefacts_compiled"]
    at.server.post("/free", {"unload_models": True, "free_memory": True})
    assert numpy.array_equal(at.latent(compiled=True, strength=1.0), wanted)
    assert at.report()["artefacts_compiled"] in (0, before["artefacts_compiled"]), "0: it was loaded anew"


def test_the_shipped_workflow_gives_the_eager_image(at: Served) -> None:
    name = "sd15_compile_model_controlnet"
    at.latent(compiled=True)
    before = at.report()
    runs = []
    for compiled in (False, True):
        shipped = served.tiny_workflow(name, compiled=compiled)
        for node in shipped.values():
            if node["class_type"] == "NexfortCompileModel":  # test_server.py compiles that network, and it takes long
                node["inputs"]["enabled"] = False
        runs.append(at.server.run(shipped, timeout=300))
    eager, ours = runs
    assert at.report()["calls"] > before["calls"] and not at.report()["eager"]
    assert served.distance(served.latent(at.base, ours), served.latent(at.base, eager)) < TOLERANCE
    for image, expected in zip(served.images(at.base, ours), served.images(at.base, eager), strict=True):
        assert abs(image - expected).max() <= 1  # one step of 8 bits, where rounding tips over


def test_a_restart_starts_warm(at: Served) -> None:
    wanted = at.latent(compiled=True)
    with served.server(at.comfyui, at.base, at.cache, "--cache-classic") as restarted:
        again = served.latent(at.base, restarted.run(workflow(compiled=True), timeout=300))
        found = at.report(restarted)
    assert found["artefacts_compiled"] == 0 and found["artefacts_loaded"] > 0 and found["eager"] == 0
    assert numpy.array_equal(again, wanted)
