# SPDX-License-Identifier: Apache-2.0
"""`warm`: refused where it would be in vain, and against a real ComfyUI, which afterwards compiles nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import served
import tiny_checkpoints

from nexfort_engine.cache import model_names
from nexfort_engine.cli import comfy_server, warm
from nexfort_engine.cli import main as cli
from nexfort_engine.cli.missing_models import HEAD

MODEL = "flux_unet"
HEADLINE = re.compile(
    r"(.+): (\d+) blocks compiled in ([\d.]+) s, (\d+) loaded in ([\d.]+) s, ([\d.]+) s in all, for (.+)"
)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["warm", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    path = tmp_path / "workflow.json"
    path.write_text('{"1": {"class_type": "EmptyImage", "inputs": {}}}')
    return path


# ---- refused -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "has_accelerator", lambda *_: False)
    monkeypatch.setattr(comfy_server, "has_accelerator", lambda *_: False)


def test_without_a_gpu_the_cpu_has_to_be_meant(no_gpu: None, workflow: Path, capsys: Any) -> None:
    code, _, error = run(capsys, "--workflow", workflow)
    assert code == 1 and error == f"nexfort: {warm.NO_GPU}\n"
    assert "needs a GPU of the target kind" in error and "--cpu" in error


@pytest.mark.parametrize(("name", "value"), [("NEXFORT_DISABLE", "1"), ("NEXFORT_GRAPH_CACHE", "0")])
def test_where_nothing_would_be_kept_it_says_so(
    workflow: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    code, _, error = run(capsys, "--cpu", "--workflow", workflow)
    assert code == 1 and name in error and "unset it" in error


def test_what_cannot_be_read_is_refused_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    root = tmp_path / "ComfyUI"
    (root / "comfy").mkdir(parents=True)
    (root / "main.py").write_text("raise SystemExit('it was started')")
    common = ("--cpu", "--comfyui", root)
    code, out, error = run(capsys, *common, "--workflow", tmp_path / "missing.json")
    assert code == 1 and "cannot be read" in error and out == f"{warm.CPU_ONLY}\n"
    (tmp_path / "ui.json").write_text('{"nodes": []}')
    assert "Export (API)" in run(capsys, *common, "--workflow", tmp_path / "ui.json")[2]
    assert "no safetensors file" in run(capsys, *common, "--model", tmp_path / "model.gguf")[2]
    assert "--width goes with --model" in run(capsys, *common, "--workflow", tmp_path / "ui.json", "--width", 64)[2]
    (tmp_path / "api.json").write_text('{"1": {"class_type": "EmptyImage", "inputs": {}}}')
    assert "it was started" in run(capsys, *common, "--workflow", tmp_path / "api.json")[2]
    assert "found no ComfyUI at" in run(capsys, "--cpu", "--comfyui", tmp_path, "--workflow", tmp_path / "api.json")[2]


def done_with(kept: int = 0, error: str | None = None, **counts: Any) -> warm.Warmed:
    report = {"artefacts_compiled": 0, "artefacts_loaded": 0, "seconds_cold": 0.0, "seconds_warm": 0.0,
              "eager": [], "notes": [], **counts}  # fmt: skip
    return warm.Warmed("a.json", "cpu", 1.0, error, [{"name": "Flux", "report": report}], kept)


def test_a_warming_that_kept_nothing_has_failed() -> None:
    assert done_with(6, artefacts_compiled=6).problem is None
    assert done_with(6, artefacts_loaded=6).problem is None
    assert done_with(6, "node 3: out of memory", artefacts_compiled=6).problem == "node 3: out of memory"
    problem = done_with(2, artefacts_compiled=6, notes=["the disk is full"]).problem
    assert problem == "6 blocks were compiled and the cache holds 2; the disk is full"


def test_a_warming_that_compiled_nothing_has_failed() -> None:
    done = done_with(eager=[{"region": "blocks.0", "reason": "it carries hooks"}])
    assert done.problem is not None and "nothing ran compiled" in done.problem and "it carries hooks" in done.problem
    assert "not warm: " in str(done) and done.as_dict()["problem"] == done.problem


# ---- against a real ComfyUI --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comfyui() -> Path:
    return served.comfyui_or_skip()


@pytest.fixture(scope="module")
def elsewhere(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that no folder of ComfyUI's holds, made in one go."""
    return tiny_checkpoints.make(comfyui, tmp_path_factory.mktemp("elsewhere"), MODEL, "kl_vae", "taesd_flux")


@pytest.fixture(scope="module")
def base(comfyui: Path, elsewhere: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory as a user has one; the model of `--model` lies elsewhere."""
    return served.base_folder(tmp_path_factory.mktemp("base"), comfyui, MODEL, "taesd_flux")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warmed")


def as_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`warm --cpu` as a process of its own, into a pipe."""
    command = [sys.executable, "-m", "nexfort_engine", "warm", "--cpu", *map(str, arguments)]
    return subprocess.run(command, cwd=served.ROOT, capture_output=True, text=True, check=False, timeout=500)


@pytest.fixture(scope="module")
def warmed(comfyui: Path, base: Path, cache: Path, elsewhere: dict[str, Path]) -> dict[str, Any]:
    """A cold `warm --model`, with the options of a server farm: what it said, and the figures of its headline."""
    sizes = ("--width", 96, "--height", 64, "--length", 5)
    where = ("--comfyui", comfyui, "--base-directory", base, "--cache-dir", cache)
    done = as_process("--model", elsewhere[MODEL], *sizes, *where)
    assert done.returncode == 0, done.stdout + done.stderr
    (headline,) = [found for line in done.stdout.splitlines() if (found := HEADLINE.fullmatch(line))]
    name, compiled, *seconds, device = headline.groups()
    assert name == str(elsewhere[MODEL])
    told = dict(zip(("compiling", "loaded", "loading", "all"), map(float, seconds), strict=True))
    return {"compiled": int(compiled), "device": device, **told, "said": done.stdout, "error": done.stderr}


def set_writable(folder: Path, writable: bool) -> None:
    """For its owner, all through a directory: a base cache is one that nobody can write."""
    for place, _, files in os.walk(folder):
        for name in (".", *files):
            path = Path(place, name)
            mode = path.stat().st_mode & ~0o222
            path.chmod(mode | 0o200 if writable else mode)


def left_behind(base: Path) -> list[Path]:
    return [path for name in ("output", "temp", "input") for path in (base / name).rglob("*") if path.is_file()]


@pytest.mark.comfy
@pytest.mark.slow
def test_a_model_file_warms_the_cache(
    warmed: dict[str, Any], base: Path, cache: Path, elsewhere: dict[str, Path]
) -> None:
    assert warmed["compiled"] > 0 and warmed["loaded"] == 0 and warmed["device"] == "cpu"
    assert warmed["all"] >= warmed["compiling"] > 0
    said, lines = warmed["said"], warmed["said"].splitlines()
    assert "not warm: " not in said and " ran uncompiled: " not in said and "Traceback" not in warmed["error"]
    assert lines[0] == warm.CPU_ONLY and "compiling what is not in the cache" in said
    counted = [line for line in lines if re.search(r"\d of \d", line)]
    assert len(counted) <= 2 + warmed["all"] / 10 and "\x1b" not in said + warmed["error"], counted
    assert left_behind(base) == []
    assert list(model_names.read(cache)[0].values()) == [[elsewhere[MODEL].name]], "what the cache shows the model as"


@pytest.mark.comfy
@pytest.mark.slow
def test_a_run_after_it_compiles_nothing(
    warmed: dict[str, Any], comfyui: Path, base: Path, cache: Path, tmp_path: Path
) -> None:
    """At other sizes, from the warmed directory as a base cache that cannot be written, under an empty one."""
    set_writable(cache, False)
    server = served.server(comfyui, base, tmp_path / "own")
    server.env |= {"NEXFORT_CACHE_BASE": str(cache), "NEXFORT_CACHE_BASE_OWNER": str(os.getuid())}
    with server:
        asked = served.resize(served.tiny_workflow("flux_compile_model", tokens=11), 128, 96, 2)
        server.run(asked, timeout=300)
        reports = [engine["report"] for engine in server.get("/nexfort/report")["engines"]]
        listed = server.get("/nexfort/cache")["entries"]
    assert sum(one["artefacts_compiled"] for one in reports) == 0
    assert sum(one["artefacts_loaded"] for one in reports) == warmed["compiled"]
    assert len(listed) == warmed["compiled"] and all(one["state"] == "base" for one in listed)


@pytest.mark.large  # test_run_workflows.py has it for `run`
@pytest.mark.comfy
@pytest.mark.slow
def test_a_workflow_without_its_models_lists_them_and_fails(comfyui: Path, base: Path, tmp_path: Path) -> None:
    workflow = served.API / "flux_plain.json"
    done = as_process("--workflow", workflow, "--comfyui", comfyui, "--base-directory", base)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "\x1b" not in done.stdout + done.stderr
    head, *files = done.stderr.splitlines()
    assert head.startswith("nexfort: ") and head.endswith(HEAD)
    for name, line in zip(("ae", "clip_l", "flux1-dev", "t5xxl_fp16"), sorted(files), strict=True):
        assert line.startswith(f"  {name}.safetensors -> models/") and line.count("https://") == 1


@pytest.mark.comfy
@pytest.mark.slow
@pytest.mark.large  # how nodes are put in is in test_warm_workflow.py
def test_a_workflow_without_compile_nodes_gets_them(
    warmed: dict[str, Any], comfyui: Path, base: Path, cache: Path, tmp_path: Path, capsys: Any
) -> None:
    set_writable(cache, True)
    workflow = served.tiny_workflow("flux_compile_model")
    (compiler,) = [number for number, one in workflow.items() if one["class_type"] == "NexfortCompileModel"]
    source = workflow.pop(compiler)["inputs"]["model"]
    for one in workflow.values():
        one["inputs"] = {name: source if link == [compiler, 0] else link for name, link in one["inputs"].items()}
    (tmp_path / "plain.json").write_text(json.dumps(workflow))
    before = left_behind(base)
    common = ("--cpu", "--json", "--comfyui", comfyui, "--base-directory", base, "--cache-dir", cache)
    code, out, error = run(capsys, *common, "--workflow", tmp_path / "plain.json")
    told = json.loads(out)
    assert code == 0, error
    names = {engine["name"]: engine["report"] for engine in told["engines"]}
    assert set(names) == {"Flux", "TAESD"} and warm.CPU_ONLY in error
    assert names["Flux"]["artefacts_compiled"] == 0 and names["Flux"]["artefacts_loaded"] == warmed["compiled"]
    assert names["TAESD"]["artefacts_compiled"] > 0
    assert left_behind(base) == before, "its pictures and latents went elsewhere"


@pytest.mark.comfy
@pytest.mark.slow
@pytest.mark.large
def test_a_model_nobody_has_inputs_for_is_one_sentence(
    comfyui: Path, base: Path, elsewhere: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    common = ("--cpu", "--json", "--comfyui", comfyui, "--base-directory", base, "--cache-dir", tmp_path / "cache")
    code, out, _ = run(capsys, *common, "--model", elsewhere["kl_vae"])
    assert code == 1 and json.loads(out)["problem"]
