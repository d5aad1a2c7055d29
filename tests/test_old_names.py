# SPDX-License-Identifier: Apache-2.0
"""Variables that users of the old engine know: NEXFORT_GRAPH_CACHE, and TORCHINDUCTOR_CACHE_DIR set from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nexfort_engine.cache import startup_env
from nexfort_engine.cli import main as cli
from nexfort_engine.system import process_settings

ROOT = Path(cli.__file__).parents[2]
BESIDE = ("NEXFORT_", "TORCHINDUCTOR_CACHE_DIR")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(BESIDE)}


def answer(code: str, **environment: str) -> Any:
    """The JSON that a Python of its own prints at last."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, os, sys\n{code}"],
        capture_output=True, text=True, cwd=ROOT, env={**CLEAN, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- TORCHINDUCTOR_CACHE_DIR -------------------------------------------------------------------------------

DEFAULT = "from nexfort_engine.cache.paths import default_root; print(json.dumps(str(default_root())))"


def test_what_was_set_at_the_start_is_honoured(tmp_path: Path) -> None:
    given = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    assert answer(DEFAULT, **given) == str(tmp_path / "inductor" / "nexfort"), "above the platform's place"
    chosen = {**given, "NEXFORT_CACHE_DIR": str(tmp_path / "chosen")}
    assert answer(DEFAULT, **chosen) == str(tmp_path / "chosen"), "below the engine's own name"


def test_the_command_line_finds_the_same_cache(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nexfort_engine", "cache", "path"]
    environment = {**CLEAN, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert done.stdout.strip() == str(tmp_path / "nexfort")


INDUCTOR = "import torch._inductor.runtime.cache_dir_utils as c; c.cache_dir()"
BY_HAND = "os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/somewhere/else'"


@pytest.mark.parametrize(
    ("later", "proc"),
    [
        (INDUCTOR, True),
        pytest.param(INDUCTOR, False, marks=pytest.mark.large),
        pytest.param(BY_HAND, True, marks=pytest.mark.large),
        (BY_HAND, False),
    ],
)
def test_what_is_written_later_is_not(tmp_path: Path, later: str, proc: bool) -> None:
    """With /proc and, as on other systems, without: there the value counts that the engine's import found."""
    first = (
        ""
        if proc
        else "from nexfort_engine.cache import startup_env as inherited; inherited.AT_START = inherited.Path('/none')"
    )
    given = {"XDG_CACHE_HOME": str(tmp_path / "xdg")}
    code = f"import nexfort_engine\n{first}\n{later}\nassert 'TORCHINDUCTOR_CACHE_DIR' in os.environ\n{DEFAULT}"
    assert answer(code, **given) == str(tmp_path / "xdg" / "nexfort")
    given["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "chosen")
    assert answer(code, **given) == str(tmp_path / "chosen" / "nexfort")


def test_torchs_own_default_handed_down_is_no_choice(tmp_path: Path) -> None:
    """A process that used torch has the variable in its environment, and so have those that it starts."""
    handed_down = str(Path(tempfile.gettempdir()) / "torchinductor_somebody")
    found = answer(DEFAULT, TORCHINDUCTOR_CACHE_DIR=handed_down, XDG_CACHE_HOME=str(tmp_path))
    assert found == str(tmp_path / "nexfort")


def test_a_compiler_that_was_there_first_may_have_written_it(tmp_path: Path) -> None:
    code = (
        "import torch._inductor; os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/somewhere/else'\n"
        "from nexfort_engine.cache import startup_env as inherited; inherited.AT_START = inherited.Path('/none')\n"
    )
    assert answer(code + DEFAULT, XDG_CACHE_HOME=str(tmp_path)) == str(tmp_path / "nexfort")


@pytest.mark.skipif(not startup_env.AT_START.exists(), reason="no /proc/self/environ")
def test_names_that_only_begin_alike_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = tmp_path / "environ"
    environment.write_bytes(b"TORCHINDUCTOR_CACHE_DIR_2=/a\0XTORCHINDUCTOR_CACHE_DIR=/b\0TORCHINDUCTOR_CACHE_DIR=\0")
    monkeypatch.setattr(startup_env, "AT_START", environment)
    assert startup_env.inductor_directory() is None
    environment.write_bytes(b"A=1\0TORCHINDUCTOR_CACHE_DIR=/c=d\0B=2\0")
    assert startup_env.inductor_directory() == Path("/c=d")


@pytest.mark.comfy
@pytest.mark.large  # above the command line is told, by the same function
def test_comfyui_keeps_its_artefacts_where_it_was_told(comfyui: Path, tmp_path: Path) -> None:
    code = (
        f"sys.path.insert(0, {str(comfyui)!r})\n"
        "import comfy.cli_args; comfy.cli_args.args.cpu = True\n"
        "from nexfort_engine.hosts.comfy.model import cache_root; print(json.dumps(str(cache_root())))"
    )
    given = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    assert answer(code, **given) == str(tmp_path / "inductor" / "nexfort")
    assert answer(code, **given, NEXFORT_CACHE_DIR=str(tmp_path / "own")) == str(tmp_path / "own")
    neither = answer(code)
    assert Path(neither).name == "nexfort" and "inductor" not in neither


# ---- NEXFORT_GRAPH_CACHE -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "nothing"),
    [(None, False), ("", False), ("1", False), ("true", False), ("0", True), ("false", True), ("Off", True)],
)
def test_the_variable_is_read_afresh(monkeypatch: pytest.MonkeyPatch, value: str | None, nothing: bool) -> None:
    monkeypatch.delenv(process_settings.DISK_VARIABLE, raising=False)
    assert not process_settings.keeps_nothing()
    if value is not None:
        monkeypatch.setenv(process_settings.DISK_VARIABLE, value)
    assert process_settings.keeps_nothing() is nothing


COMPILE = """
import torch, nexfort_engine
from nexfort_engine.api import store_at
torch.manual_seed(0)
module = nexfort_engine.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
with torch.no_grad():
    module(torch.ones(2, 8))
    again = nexfort_engine.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    again(torch.ones(3, 8))
facts = module.report.as_dict()
print(json.dumps({"compiled": facts["artefacts_compiled"], "eager": facts["eager"], "root": str(store_at().root),
                  "again": again.report.as_dict()["artefacts_compiled"], "rows": len(store_at().rows())}))
"""


@pytest.mark.large  # above is how the variable is read
@pytest.mark.slow
def test_with_0_nothing_is_read_from_or_written_to_disk(tmp_path: Path) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    given = {"NEXFORT_CACHE_DIR": str(cache), "TMPDIR": str(temporary), "NEXFORT_WORKERS": "0"}
    kept = answer(COMPILE, **given, NEXFORT_GRAPH_CACHE="1")
    assert kept["compiled"] == 1 and kept["root"] == str(cache)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    off = answer(COMPILE, **given, NEXFORT_GRAPH_CACHE="0", NEXFORT_CACHE_BASE=str(cache))
    assert off["compiled"] == 1 and off["eager"] == [], "what lies there was not read"
    assert off["again"] == 0 and off["rows"] == 1, "within the process it is kept"
    assert Path(off["root"]).parent == temporary and not Path(off["root"]).exists(), "it went with the process"
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
