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


HERE, GONE = {"available": True, "disabled": False}, {"available": False, "unavailable_reason": "no GPU here"}
ASKED_FOR = "in use where ComfyUI is started with --enable-triton-backend"


@pytest.mark.parametrize(
    ("told", "cuda", "expected"),
    [
        ({"cuda": HERE, "eager": HERE}, "13.0", {"cuda": "in use", "eager": "in use"}),
        ({"cuda": GONE, "eager": HERE}, "13.0", {"cuda": "not in use: no GPU here", "eager": "in use"}),
        ({"cuda": {**HERE, "disabled": True}}, "13.0", {"cuda": "not in use: it is switched off"}),
        ({"cuda": {"available": False}}, None, {"cuda": "not in use: it is not there"}),
        (
            {"cuda": HERE, "triton": HERE},
            "12.8",
            {
                "cuda": "not in use: ComfyUI switches it off with a torch for CUDA 12.8, it asks for 13.0 or newer",
                "triton": ASKED_FOR,
            },
        ),
    ],
)
def test_doctor_says_which_back_ends_of_kitchen_are_in_use(
    told: dict[str, Any], cuda: str | None, expected: dict[str, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = SimpleNamespace(list_backends=lambda: told)
    spec = SimpleNamespace(name="comfy_kitchen")
    package = SimpleNamespace(__version__="0.2.40", __spec__=spec, __path__=[])
    monkeypatch.setitem(sys.modules, "comfy_kitchen", package)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "comfy_kitchen.registry", SimpleNamespace(registry=registry))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.version, "cuda", cuda)
    facts = doctor.collect(check=False)
    assert facts["kitchen"] == {"version": "0.2.40", "back_ends": expected}
    assert all(f"{name}: {text}" in doctor.as_text(facts) for name, text in expected.items())


def test_doctor_without_kitchen_says_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = doctor.importlib.util.find_spec
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name: None if name == "comfy_kitchen" else there(name)
    )
    facts = doctor.collect(check=False)
    assert facts["kitchen"] is None and "kitchen: none" in doctor.as_text(facts)


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("NVIDIA H200", "for fp8 measured on such a card; for int8 those of another card"),
        ("NVIDIA GH200 480GB", "for fp8 measured on another card, an H200; for int8 those of another card"),
        ("NVIDIA GeForce RTX 4090", "for fp8 measured on another card, an H200; for int8 those of another card"),
        ("NVIDIA A100-SXM4-80GB", "for fp8 measured on another card, an H200; for int8 such a card's"),
        (None, ""),
    ],
)
def test_doctor_says_whose_figures_decide_about_8_bits(
    card: str | None, expected: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name=card, major=9, minor=0, total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    facts = doctor.collect(check=False)
    if card is None:
        assert facts["card_figures"] == {}
    else:
        assert facts["card_figures"]["cuda:0"].startswith(f"{card}: {expected}")
        assert f"cuda:0: {card}: {expected}" in doctor.as_text(facts)


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
