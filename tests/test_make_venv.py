# SPDX-License-Identifier: Apache-2.0
"""tools/make_venv.py: which Python it takes, when it installs, and what it says where it cannot. Installs nothing."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from types import ModuleType

import by_path
import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(os.name == "nt", reason="make and its scripts are for Unix shells")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    module = by_path.load("make_venv", ROOT / "tools" / "make_venv.py")
    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return module


def fake_python(folder: Path, name: str, answer: str, status: int = 0) -> Path:
    """A program on the path that answers the probe with a fixed line."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{answer}'\nexit {status}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_the_first_usable_python_with_headers_is_taken(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    names = ("pya", "pyb", "pyc", "pyd")
    fake_python(tmp_path / "bin", "pya", "pya: command not found", 127)  # what a version manager leaves
    fake_python(tmp_path / "bin", "pyb", "/old/python False True")
    fake_python(tmp_path / "bin", "pyc", "/bare/python True False")
    with pytest.raises(tool.SetupError, match=r"3\.10 or newer"):
        tool.find_python(names[:2])
    assert tool.find_python(names) == "/bare/python"
    fake_python(tmp_path / "bin", "pyd", "/with a space/python True True")
    assert tool.find_python(names) == "/with a space/python"


def test_a_named_python_is_the_only_one_tried(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON", str(fake_python(tmp_path / "bin", "mine", "/mine/python True True")))
    assert tool.find_python() == "/mine/python"
    monkeypatch.setenv("PYTHON", "/no/such/python")
    with pytest.raises(tool.SetupError, match="/no/such/python"):
        tool.find_python()


def test_it_installs_once_and_again_when_a_requirement_changed(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("one\n")
    comfyui = tmp_path / "comfyui.txt"
    comfyui.write_text("two\n")
    monkeypatch.setattr(tool, "ensure_venv", lambda venv: Path("python"))
    monkeypatch.setattr(tool, "REQUIREMENTS", {"test": requirements, "lint": requirements})
    monkeypatch.setattr(tool, "_comfyui_requirements", lambda: comfyui)
    monkeypatch.setattr(tool, "_run", lambda command, failure: ran.append(command))
    tool.install(tmp_path, "test")
    assert [command[-1] for command in ran] == [str(requirements), str(comfyui)]
    assert all(str(tool.CONSTRAINTS) in command for command in ran)
    tool.install(tmp_path, "test")
    assert len(ran) == 2
    comfyui.write_text("two==2\n")
    tool.install(tmp_path, "test")
    assert len(ran) == 4
    (tmp_path / "nexfort-test.json").write_text("{")  # interrupted
    tool.install(tmp_path, "test")
    assert len(ran) == 6
    assert json.loads((tmp_path / "nexfort-test.json").read_text())


def test_another_torch_has_an_environment_of_its_own_and_what_fits_it(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(tool, "ensure_venv", lambda venv: venv.mkdir(parents=True, exist_ok=True) or Path("python"))
    monkeypatch.setattr(tool, "_comfyui_requirements", lambda: None)
    monkeypatch.setattr(tool, "_run", lambda command, failure: ran.append(command))
    monkeypatch.setattr(tool, "_make_torchaudio_import", lambda python: None)
    for version in ("2.15.0", "2.15.0", "2.14.1"):
        assert tool.main(["test", "--venv", str(tmp_path), "--torch", version]) == 0
    assert len(ran) == 2, "it installs once for each"
    folder = tmp_path / "torch-2.15.0"
    held = (folder / "constraints.txt").read_text().splitlines()
    assert ran[0][ran[0].index("--constraint") + 1] == str(folder / "constraints.txt")
    assert held[0] == "torch==2.15.0" and not any(row.startswith(("torchvision", "torchaudio")) for row in held)
    of_the_project = tool.CONSTRAINTS.read_text().splitlines()
    assert held[1:] == [row for row in of_the_project if not row.startswith(("#", "torch"))]
    assert (folder / "nexfort-test.json").is_file() and not (tmp_path / "nexfort-test.json").exists()


@pytest.mark.parametrize("cuda", ["13.0", "13.2"])
def test_a_torchaudio_for_another_cuda_loses_its_compiled_part(tool: ModuleType, tmp_path: Path, cuda: str) -> None:
    package = tmp_path / "torchaudio"
    (package / "lib").mkdir(parents=True)
    package.joinpath("__init__.py").write_text(
        "from pathlib import Path\n"
        f"if {cuda != '13.0'} and list(Path(__file__).parent.glob('lib/_torchaudio.*')):\n"
        "    raise RuntimeError('torch and torchaudio were compiled with different CUDA versions')\n"
    )
    built = package / "lib" / "_torchaudio.abi3.so"
    built.touch()
    python = fake_python(tmp_path, "python", "")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    tool._make_torchaudio_import(python)
    assert built.exists() == (cuda == "13.0")


def test_another_front_end_goes_into_a_folder_of_its_own_once(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(tool, "install", lambda venv, purpose, torch: None)
    monkeypatch.setattr(tool, "_run", lambda command, failure: ran.append(command))
    folder = tmp_path / "front-ends" / "1.58.1"
    for place in (None, folder / "comfyui_frontend_package" / "static"):
        if place is not None:
            place.mkdir(parents=True)
        assert tool.main(["test", "--venv", str(tmp_path), "--front-end", "1.58.1"]) == 0
    (command,) = ran
    assert command[-4:] == ["--no-deps", "--target", str(folder), "comfyui-frontend-package==1.58.1"]


def test_a_failed_install_leaves_no_mark(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "ensure_venv", lambda venv: Path("/bin/false"))
    monkeypatch.setattr(tool, "_comfyui_requirements", lambda: None)
    with pytest.raises(tool.SetupError, match="pip says why"):
        tool.install(tmp_path, "test")
    assert not list(tmp_path.iterdir())


def test_a_wrong_comfyui_path_is_one_sentence(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    monkeypatch.setattr(tool, "ensure_venv", lambda venv: Path("python"))
    assert tool.main(["test", "--venv", str(tmp_path / "venv")]) == 1
    told = capsys.readouterr().err
    assert "COMFYUI_PATH is" in told and "Traceback" not in told


def test_no_registry_is_named_anywhere() -> None:
    requirements = ("constraints.txt", "requirements-test.txt", "tools/requirements-lint.txt")
    for name in ("tools/make_venv.py", "Makefile", ".ci/run", *requirements):
        text = (ROOT / name).read_text()
        assert "://" not in text and "index-url" not in text, name


def test_the_check_is_executable_and_runs_the_linters_and_then_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line.split() for line in script.read_text().splitlines() if line.startswith("make ")]
    assert [words[1] for words in commands] == ["lint", "test"]


def test_each_linter_has_one_version_and_mypy_has_the_types_of_torch() -> None:
    lines = (ROOT / "tools" / "requirements-lint.txt").read_text().splitlines()
    wanted = dict(line.partition("==")[::2] for line in lines if not line.startswith("#"))
    assert wanted.keys() == {"mypy", "ruff", "torch"}
    assert wanted["mypy"] and wanted["ruff"]
    assert "torch==" in (ROOT / "constraints.txt").read_text()
