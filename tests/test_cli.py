# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, where it looks, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nexfort_engine import cli, doctor, locate
from nexfort_engine.cache.store import Store

ROOT = Path(cli.__file__).parents[1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fill(root: Path, count: int) -> None:
    for number in range(count):
        store = Store(root)
        with store.stage() as staged:
            (staged / "payload" / "code.py").write_bytes(b"x" * 1000)
            store.commit(f"{number:032x}", staged, {"info": {"region": f"blocks.{number}"}})


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out if code == 0 else captured.err


def test_cache_path(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "cache", "path") == (0, f"{cache}\n")
    assert json.loads(run(capsys, "cache", "path", "--json")[1]) == {"path": str(cache)}
    assert run(capsys, "cache", "path", "--dir", str(tmp_path / "other")) == (0, f"{tmp_path / 'other'}\n")
    assert not cache.exists(), "looking creates nothing"


def test_cache_of_a_comfyui(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEXFORT_CACHE_DIR", raising=False)
    root = tmp_path / "ComfyUI"
    (root / "comfy").mkdir(parents=True)
    (root / "main.py").touch()
    expected = root / "user" / "__cache" / "nexfort"
    assert run(capsys, "cache", "path", "--comfyui", str(root)) == (0, f"{expected}\n")
    code, error = run(capsys, "cache", "path", "--comfyui", str(tmp_path))
    assert code == 1 and "found no ComfyUI" in error and "expected" in error
    monkeypatch.setattr(locate, "comfyui_around", lambda: root)
    assert run(capsys, "cache", "path") == (0, f"{expected}\n")
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "chosen"))
    assert run(capsys, "cache", "path") == (0, f"{tmp_path / 'chosen'}\n")


def test_cache_list(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "cache", "list")
    assert code == 0 and "0 artefacts" in text and str(cache) in text and not cache.exists()
    fill(cache, 3)
    code, text = run(capsys, "cache", "list")
    assert code == 0 and "blocks.1" in text and "3 artefacts, 2.9 KiB" in text and "1000 B" in text
    listed = json.loads(run(capsys, "cache", "list", "--json")[1])
    assert listed["path"] == str(cache) and listed["bytes"] == 3000
    assert [row["info"]["region"] for row in listed["entries"]] == ["blocks.0", "blocks.1", "blocks.2"]


def test_cache_prune_and_clear(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(cache, 4)
    code, text = run(capsys, "cache", "prune", "--max-size", "2KiB")
    assert code == 0 and text.startswith("2 artefacts removed")
    assert run(capsys, "cache", "prune")[1].startswith("0 artefacts removed")
    removed = json.loads(run(capsys, "cache", "clear", "--json")[1])
    assert removed == {"path": str(cache), "removed": 2, "bytes": 2000}
    assert Store(cache).entries() == []
    assert run(capsys, "cache", "clear")[0] == 0


def test_a_cache_that_cannot_be_changed_is_one_sentence(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir()
    (cache / "staging").write_text("in the way")
    code, error = run(capsys, "cache", "clear")
    assert code == 1 and "cannot be written" in error and "NEXFORT_CACHE_DIR" in error and "Traceback" not in error
    assert f"found a file at {cache / 'staging'}, expected a directory" in error
    assert (cache / "staging").read_text() == "in the way"
    assert run(capsys, "cache", "list")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["cache"],
        ["unknown"],
        ["cache", "prune", "--max-size", "much"],
        ["run"],
        ["cache", "path", "--dir"],
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
    monkeypatch.setattr("nexfort_engine.headless.find_comfyui", lambda: None)
    code, error = run(capsys, "run", str(workflow))
    assert code == 1 and "--comfyui PATH" in error and "COMFYUI_PATH" in error
    assert "found no ComfyUI at" in run(capsys, "run", str(workflow), "--comfyui", str(tmp_path))[1]


def test_the_module_runs_and_stays_light(cache: Path) -> None:
    fill(cache, 1)
    command = [sys.executable, "-X", "importtime", "-m", "nexfort_engine", "cache", "list", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert len(json.loads(done.stdout)["entries"]) == 1
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "triton", "comfy", "diffusers"}, "the cache is listed without loading torch"


# -- doctor --------------------------------------------------------------------------------------------------


def test_doctor_prints_what_a_bug_report_needs(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXFORT_DISABLE", "1")
    code, text = run(capsys, "doctor", "--no-check")
    assert code == 0
    for word in ("torch:", "triton:", "python:", "compilers:", "comfyui:", str(cache), "NEXFORT_DISABLE: 1"):
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

    module = SimpleNamespace(run=check, __spec__=SimpleNamespace(name="nexfort_engine.selfcheck"))
    monkeypatch.setitem(sys.modules, "nexfort_engine.selfcheck", module)  # type: ignore[arg-type]
    assert doctor.collect()["self_check"]["cpu"] == expected and devices[-1] == "cpu"
