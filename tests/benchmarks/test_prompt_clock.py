# SPDX-License-Identifier: Apache-2.0
"""benchmarks.prompt_clock: its prompts are whole, what was measured is not measured again, and it runs to its rows."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from large_rows import few

from benchmarks import prompt_clock, rows
from benchmarks.clock_workloads import WORKLOADS
from benchmarks.prompt_clock import COLUMNS, Prompt

ROOT = Path(__file__).resolve().parent.parent.parent
# in a process of its own: the text encoder and the VAE that ComfyUI would take the state dicts for
DETECTED = """
import sys
from benchmarks.one_run import as_without_card, find_comfyui
find_comfyui()
import torch
as_without_card()
import comfy.memory_management
import comfy.sd
from benchmarks import clock_workloads
clock_workloads._drawn = lambda like, *_: like  # their shapes are enough
comfy.memory_management.aimdo_enabled = DYNAMIC
for name, row in clock_workloads.WORKLOADS.items():
    files = [clock_workloads.clip_weights(row, i, "cpu") for i in range(len(row.encoder.classes))]
    kinds = [getattr(comfy.sd.detect_te_model(file), "name", "none") for file in files]
    height, width = row.backbone.size
    tensors = sum(map(len, files)), len(clock_workloads.vae_weights(row, "cpu"))
    print(name, *kinds, *tensors, *row.latent(height, width).shape)
"""


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("way", prompt_clock.WAYS)
def test_a_prompt_is_whole(name: str, way: str) -> None:
    row = WORKLOADS[name]
    nodes = Prompt(name, row.steps, 512, 768, row.tokens, lora=1 if row.lora else 0).workflow(way, Path("picture.pt"))
    linked = {value[0] for node in nodes.values() for value in node["inputs"].values() if isinstance(value, list)}
    assert linked == set(nodes) - {"keep"}, "a node is not there, or leads nowhere"
    kinds = [node["class_type"] for node in nodes.values()]
    assert kinds.count("NexfortCompileModel") == (row.networks if way == "nexfort" else 0)
    assert kinds.count("TorchCompileModel") == (row.networks if way == "core" else 0)
    assert kinds.count("ReferenceLatent") == kinds.count("ClockReference") == row.references
    assert kinds.count("ClockLora") == (row.networks if row.lora else 0)
    spans = [n["inputs"] for n in nodes.values() if n["class_type"] == "KSamplerAdvanced"]
    ran = [step for one in spans for step in range(one["start_at_step"], one["end_at_step"])]
    assert ran == list(range(row.steps)), "each step is sampled once"
    assert [one["add_noise"] for one in spans] == ["enable", *["disable"] * (row.networks - 1)]


def test_what_the_csv_has_is_known_by_workload_and_commit(tmp_path: Path) -> None:
    file = tmp_path / "clock.csv"
    assert prompt_clock.measured(file, "sdxl", "abc") == set()
    for what, at in (("step", "abc"), ("new size", "abc"), ("step", "other")):
        rows.append_rows(file, [dict.fromkeys(COLUMNS, "") | {"workload": "sdxl", "what": what, "commit": at}], COLUMNS)
    assert prompt_clock.measured(file, "sdxl", "abc") == {"step", "new size"}
    assert prompt_clock.measured(file, "zimage", "abc") == set()


@pytest.mark.parametrize("dynamic_vram", few([False, True], [True]))
def test_comfyui_knows_the_models_by_their_weights(dynamic_vram: bool) -> None:
    if _comfyui() is None:
        pytest.skip("needs ComfyUI at COMFYUI_PATH")
    script = DETECTED.replace("DYNAMIC", str(dynamic_vram))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0] in WORKLOADS]
    found = {name: rest for name, *rest in lines}
    assert found.keys() == WORKLOADS.keys()
    assert found["zimage-int8"] == ["QWEN3_4B", "398", "244", "1", "16", "128", "128"]
    assert found["klein9b-fp8"][0] == "QWEN3_8B" and found["klein9b-fp8"][3:] == ["1", "128", "64", "64"]
    assert found["krea2-fp8"][0] == "QWEN3VL_4B" and found["qwen-int8"][0] == "QWEN25_7B"
    assert found["wan22-fp8-lora"][0] == "T5_XXL" and found["wan22-fp8-lora"][3:] == ["1", "16", "9", "60", "104"]
    assert found["sdxl"][:2] == ["CLIP_L", "CLIP_G"] and found["sd21-small"][0] == "CLIP_H"


def _comfyui() -> Path | None:
    from nexfort_engine.hosts.comfy_install import find_comfyui

    found = find_comfyui()
    return None if found is None else found[0]


@pytest.mark.large
@pytest.mark.parametrize("from_files", [False, True])
def test_it_runs_to_its_rows(tmp_path: Path, from_files: bool) -> None:
    file, files = tmp_path / "clock.csv", tmp_path / "files"
    flags = ["--size", "128x128", "--processes", "1", "--repeats", "1", "--noise", "--csv", str(file)]
    flags += ["--files", str(files)] if from_files else []
    command = [sys.executable, "-m", "benchmarks.prompt_clock", "sd21-small", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ), timeout=1800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    with file.open(newline="", encoding="utf-8") as opened:
        found = {row["what"]: row for row in csv.DictReader(opened)}
    whats = {"first cold", "first cached", "new seed", "step", "new size", "new length", "lora strength", "lora file"}
    assert found.keys() == whats
    for row in found.values():
        seconds = float(row["eager_s"]), float(row["nexfort_s"])
        assert row["what"] == "step" or min(seconds) > 0, "a step is a difference, which noise outweighs at this size"
        assert row["comfyui"] and row["command"]
        assert float(row["distance"]) <= 2 * float(row["noise_floor"]) + 1e-6
    names = ["sd21-small-clip0", "sd21-small-network1", "sd21-small-vae"] if from_files else []
    assert sorted(one.stem for one in files.glob("*")) == names
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ), timeout=300)
    assert again.returncode == 0 and not again.stdout, "it measured again what the file has"
