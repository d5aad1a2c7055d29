# SPDX-License-Identifier: Apache-2.0
"""Workloads of the clock that sample sound beside video: ComfyUI takes their files, and they run as eager does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_clock
import torch

from benchmarks.clock_workloads import WORKLOADS
from benchmarks.prompt_clock import Prompt, Server
from benchmarks.rows import distance

ROOT = Path(__file__).resolve().parent.parent.parent
SUPPORT = ROOT / "tests" / "support"
FULL = tuple(name for name, row in WORKLOADS.items() if row.sound is not None)
# in processes of their own: ComfyUI is told that there is no card, and changed
BEGUN = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(SUPPORT)!r}]
from benchmarks.one_run import as_without_card, find_comfyui
find_comfyui()
import torch
as_without_card()
"""
LOADED = """
import json
import comfy.model_detection
import comfy.sd
from benchmarks import clock_pack, clock_workloads
from benchmarks.backbones import network
clock_workloads._drawn = lambda like, *_: dict(like)  # their shapes are enough
meta, cpu = torch.device("meta"), torch.device("cpu")
devices = {"initial_device": meta, "load_device": cpu, "offload_device": cpu}

def shapes(weights):
    return {name: tuple(one.shape) for name, one in weights.items()}

for name in NAMES:
    row = clock_workloads.WORKLOADS[name]
    weights = network(row.backbone).state_dict()
    kind = comfy.model_detection.model_config_from_unet(dict(weights), "", metadata=row.metadata)
    made = kind.get_model(dict(weights), "", device="meta").diffusion_model
    large = [n for n, w in weights.items() if n.startswith(row.within) and clock_workloads._is_matrix(n, w, row.least)]
    files = [clock_workloads.clip_weights(row, i, "cpu") for i in range(len(row.encoder.classes))]
    clip = comfy.sd.load_text_encoder_state_dicts(
        [dict(file) for file in files], clip_type=getattr(comfy.sd.CLIPType, row.encoder.kind), model_options=devices,
        disable_dynamic=True,
    )
    given = {one for file in files for one in file} - {"spiece_model"}
    own = clip.cond_stage_model.state_dict()
    besides = [name for name in own if not name.endswith(tuple(given))]
    left = [one for one in given if not any(name.endswith(one) for name in own)]
    (empty,), (other,) = [next(iter(clip.tokenize(text).values())) for text in ("", "a horse in the rain")]
    tokens = [one[0] for one in clock_pack._filled(empty, other, [(7, 1.0)] * row.tokens)]
    print(json.dumps({
        "name": name, "kind": type(kind).__name__, "same": shapes(made.state_dict()) == shapes(weights),
        "large": len(large), "numbers": sum(one.numel() for one in weights.values()), "left": left,
        "encoder": sum(one.numel() for file in files for one in file.values()), "besides": besides,
        "tokens": tokens,
        "latent": [list(one.shape) for one in row.latent(*row.backbone.size).unbind()],
    }))
"""
STEPS = """
import tiny_clock
tiny_clock.add()
from benchmarks import step_kinds
step_kinds.main([NAME, "--pictures", "plain"])
"""
NODE = """
import tiny_clock
tiny_clock.add()
tiny_clock.shrink()
NODE_CLASS_MAPPINGS = {}
"""


@pytest.fixture(scope="module", autouse=True)
def root() -> Path:
    from nexfort_engine.hosts.comfy_install import find_comfyui

    found = find_comfyui()
    if found is None or not (found[0] / "comfy" / "ldm" / "minimax" / "model.py").is_file():
        pytest.skip("needs a ComfyUI with MiniMax-H3 at COMFYUI_PATH")
    return found[0]


def _told(script: str, folder: Path, seconds: float) -> list[dict[str, Any]]:
    environment = os.environ | {"NEXFORT_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "missing" not in done.stderr, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.large  # about the files of a benchmark
def test_comfyui_takes_their_files(tmp_path: Path) -> None:
    told = _told(f"{BEGUN}NAMES = {FULL!r}\n{LOADED}", tmp_path, 300)
    found = {one["name"]: SimpleNamespace(**one) for one in told}
    assert found.keys() == set(FULL)
    for one in found.values():
        assert one.same, f"{one.name}: ComfyUI makes another network of these weights"
        assert one.left == [], f"{one.name}: its text encoder has other names"
        assert [name.rpartition(".")[2] for name in one.besides] == ["logit_scale"], "which no file has"
    ltx, h3 = found["ltx23-fp8"], found["h3-int8"]
    assert (ltx.kind, ltx.large, round(ltx.numbers / 1e9)) == ("LTXAV", 48 * 28, 21)
    assert (h3.kind, h3.large, round(h3.numbers / 1e9)) == ("MiniMaxH3", 50 * 4, 20)
    assert (round(ltx.encoder / 1e9), round(h3.encoder / 1e9)) == (13, 26)
    assert ltx.tokens == [*[0] * (1024 - 1 - 128), 2, *[7] * 128], "padding, the beginning, the text"
    assert h3.tokens == [*[7] * 128, 151643], "the text, and what stands for an empty one"
    assert ltx.latent == [[1, 128, 13, 16, 24], [1, 8, 97, 16]]
    assert h3.latent == [[1, 24, 12, 30, 52], [1, 32, 2, 65]]


@pytest.mark.large
@pytest.mark.parametrize("name", tiny_clock.NAMES)
def test_their_steps_are_those_of_eager(name: str, tmp_path: Path) -> None:
    eager, ours = _told(f"{BEGUN}NAME = {name!r}\n{STEPS}", tmp_path, 1800)
    assert eager["plain"]["distance"] == 0
    assert ours["compiled"] > 0 and ours["eager"] == []
    assert ours["plain"]["distance"] < 5e-3, "more than what roundings of int8 make of it"


@pytest.mark.large
@pytest.mark.parametrize("name", tiny_clock.NAMES)
def test_a_prompt_of_theirs_runs_on_a_server(name: str, tmp_path: Path, root: Path) -> None:
    tiny_clock.add()
    row, files = WORKLOADS[name], {}
    prompt = Prompt(name, row.steps, *row.backbone.size, row.tokens)
    for way in ("eager", "nexfort"):
        pack = tmp_path / f"base-{way}" / "custom_nodes" / "a_tiny_clock.py"
        pack.parent.mkdir(parents=True)
        pack.write_text(f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(SUPPORT)!r}]\n{NODE}")
        server = Server(root, tmp_path, way, waits=True, files=tmp_path / "files")
        (tmp_path / "files").mkdir(exist_ok=True)
        with server.running:
            ran = server.run(prompt)
        assert {"text", "model", "latent"} <= ran.parts.keys()
        files[way] = ran.file
    picture = torch.load(files["eager"])
    assert picture.shape == (row.backbone.frames, *row.backbone.size, 3)
    assert picture.isfinite().all() and picture.std() > 1e-3, "nothing is in the picture"
    assert distance(files["nexfort"], files["eager"]) < 5e-3
    assert any((tmp_path / "cache" / "entries").iterdir()), "nothing was compiled"
    whole = {f"{name}-{part}.safetensors" for part in ("network0", "clip0", "vae")}
    assert whole <= {one.name for one in (tmp_path / "files").iterdir()}
