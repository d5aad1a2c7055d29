# SPDX-License-Identifier: Apache-2.0
"""The command line but for `cache`: what it prints, where it looks, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nexfort_engine.cli import doctor
from nexfort_engine.cli import main as cli


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out if code == 0 else captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["cache"],
        ["unknown"],
        ["cache", "prune", "--max-size", "much"],
        ["run"],
        ["warm"],
        ["warm", "--model", "a.safetensors", "--workflow", "b.json"],
        ["warm", "--model", "a.safetensors", "--width", "none"],
        ["warm", "--model", "a.safetensors", "--batch", "0"],
        ["cache", "path", "--dir"],
        ["cache", "show"],
        ["cache", "pin"],
        ["cache", "export"],
        ["cache", "list", "--dir", "a", "--comfyui", "b"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2 and "usage" in capsys.readouterr().err


def test_run_without_a_comfyui_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow = tmp_path / "workflow.json"
    assert "cannot be read" in run(capsys, "run", str(workflow))[1]
    workflow.write_text('{"nodes": []}')
    assert "Export (API)" in run(capsys, "run", str(workflow))[1]
    workflow.write_text('{"1": {"class_type": "EmptyImage", "inputs": {}}}')
    monkeypatch.setattr("nexfort_engine.hosts.comfy_install.find_comfyui", lambda: None)
    code, error = run(capsys, "run", str(workflow))
    assert code == 1 and "--comfyui PATH" in error and "COMFYUI_PATH" in error
    assert "found no ComfyUI at" in run(capsys, "run", str(workflow), "--comfyui", str(tmp_path))[1]


# -- doctor --------------------------------------------------------------------------------------------------


def test_doctor_prints_what_a_bug_report_needs(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXFORT_DISABLE", "1")
    code, text = run(capsys, "doctor", "--no-check")
    assert code == 0
    for word in (
        "torch:",
        "bytecode:",
        "triton:",
        "python:",
        "compilers:",
        "comfyui:",
        str(cache),
        "NEXFORT_DISABLE: 1",
    ):
        assert word in text
    facts = json.loads(run(capsys, "doctor", "--json", "--no-check")[1])
    assert facts["cache"]["writable"] is True and facts["cache"]["path"] == str(cache)
    assert facts["settings"]["NEXFORT_DISABLE"] == "1" and "self_check" not in facts


def test_doctor_tells_an_unusable_cache_and_a_wrong_comfyui(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file")
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    facts = doctor.collect(check=False)
    assert facts["cache"]["writable"] is False and str(cache) in facts["cache"]["problem"]
    assert "COMFYUI_PATH is" in facts["comfyui"]["problem"]
    assert "problem" in doctor.as_text(facts)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("switched_off", [True, False])
def test_doctor_says_where_torch_is_read_from_source_at_each_start(
    kept: bool, switched_off: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "torch.pyc"
    if kept:
        file.touch()
    monkeypatch.setattr("importlib.util.cache_from_source", lambda _: str(file))
    monkeypatch.setattr(sys, "dont_write_bytecode", switched_off)
    told = doctor.collect(check=False)["bytecode"]
    packages = Path(torch.__file__).parents[1]
    assert (told == "kept") is kept and (kept or f"-m compileall -q {packages} " in told)
    assert ("PYTHONDONTWRITEBYTECODE" in told) is (switched_off and not kept)


def test_doctor_survives_whatever_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = doctor.collect(check=False)
    assert "problem" in facts["torch"] and json.dumps(facts)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(None, "works"), ("no compiler", "no compiler"), (OSError("gone"), "OSError: gone")],
)
def test_doctor_runs_the_self_check(cache: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, expected: str) -> None:
    devices: list[str] = []

    def check(device: str) -> str | None:
        devices.append(device)
        if isinstance(answer, Exception):
            raise answer
        return answer

    module = SimpleNamespace(run=check, __spec__=SimpleNamespace(name="nexfort_engine.compilation.selfcheck"))
    monkeypatch.setitem(sys.modules, "nexfort_engine.compilation.selfcheck", module)  # type: ignore[arg-type]
    assert doctor.collect()["self_check"]["cpu"] == expected and devices[-1] == "cpu"
