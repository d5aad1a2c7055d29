# SPDX-License-Identifier: Apache-2.0
"""The command line as a process of its own: which cache it finds, what it refuses, what it says into a pipe."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundle_parts import put
from pages import ROOT

from nexfort_engine import __version__
from nexfort_engine.cache.store import Store
from nexfort_engine.cli import main, run_workflows
from nexfort_engine.cli.missing_models import missing_models
from nexfort_engine.hosts.comfy_install import comfyui_cache

BESIDE = ("NEXFORT_CACHE_DIR", "NEXFORT_CACHE_BASE", "TORCHINDUCTOR_CACHE_DIR", "COMFYUI_PATH")


def nexfort(*arguments: object, home: Path, source: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command line of the plugin that lies in `source`."""
    kept = {name: value for name, value in os.environ.items() if name not in BESIDE}
    given = {**kept, "PYTHONPATH": str(source), "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    command = [sys.executable, "-m", "nexfort_engine", *map(str, arguments)]
    return subprocess.run(command, cwd=home, env=given, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """The plugin in the custom_nodes of a base directory, with a cache of one artefact beside it."""
    base = tmp_path / "base"
    (base / "custom_nodes").mkdir(parents=True)
    (base / "models").mkdir()
    plugin = base / "custom_nodes" / "nexfort"
    plugin.symlink_to(ROOT, target_is_directory=True)
    put(Store(comfyui_cache(base)))
    return plugin


def test_it_finds_the_cache_of_the_base_directory_it_lies_in(linked: Path, tmp_path: Path) -> None:
    expected = comfyui_cache(tmp_path / "base")
    for where in ((), ("--base-directory", tmp_path / "base")):
        done = nexfort("cache", "list", *where, home=tmp_path, source=linked if not where else ROOT)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("1 artefacts, ") and done.stdout.endswith(f", in {expected}\n")
    assert str(expected) in nexfort("doctor", "--no-check", home=tmp_path, source=linked).stdout


def on_a_terminal(*arguments: object, home: Path, **variables: str) -> str:
    """What the command line draws on a terminal of 160 columns."""
    pty = pytest.importorskip("pty", reason="terminals are POSIX's here")
    ours, theirs = pty.openpty()
    given = {name: value for name, value in os.environ.items() if name not in (*BESIDE, "NO_COLOR")}
    given |= {"PYTHONPATH": str(ROOT), "HOME": str(home), "TERM": "xterm-256color", "COLUMNS": "160", **variables}
    command = [sys.executable, "-m", "nexfort_engine", *map(str, arguments)]
    with subprocess.Popen(command, cwd=home, env=given, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        drawn = b""
        try:
            while part := os.read(ours, 65536):
                drawn += part
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    return drawn.decode()


def test_a_terminal_gets_a_table_in_colours_and_a_pipe_plain_lines(tmp_path: Path) -> None:
    pytest.importorskip("rich", reason="rich draws tables; pip install rich")
    put(Store(tmp_path / "store"))
    where = ("--dir", tmp_path / "store")
    drawn = on_a_terminal("cache", "list", *where, home=tmp_path)
    assert "\x1b[32mready" in drawn and "\x1b[1mregion" in drawn, drawn
    assert "\x1b[31mnexfort: " in on_a_terminal("cache", "show", "f00", *where, home=tmp_path)
    said = nexfort("cache", "list", *where, home=tmp_path).stdout
    assert "\x1b" not in said and said.splitlines()[0].split()[:2] == ["id", "region"]
    assert "\x1b[32m" not in on_a_terminal("cache", "list", *where, home=tmp_path, NO_COLOR="1")
    without = tmp_path / "without"
    without.mkdir()
    (without / "rich.py").write_text("raise ImportError('not here')\n")
    plain = on_a_terminal("cache", "list", *where, home=tmp_path, PYTHONPATH=f"{without}{os.pathsep}{ROOT}")
    assert "\x1b" not in plain and plain.replace("\r", "") == said


@pytest.mark.parametrize(
    "arguments",
    [
        ("cache", "list", "--dir", "nowhere"),
        ("cache", "verify", "--base-directory", "nowhere"),
        ("cache", "clear", "--comfyui", "nowhere"),
        ("plan", "--dir", "nowhere"),
        ("run", "workflow.json", "--comfyui", "imitated", "--base-directory", "nowhere"),
        ("warm", "--workflow", "workflow.json", "--cpu", "--comfyui", "imitated", "--base-directory", "nowhere"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_directory_that_is_not_there_is_an_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "workflow.json").write_text('{"1": {"class_type": "EmptyImage", "inputs": {}}}')
    (tmp_path / "imitated" / "comfy").mkdir(parents=True)
    (tmp_path / "imitated" / "main.py").touch()
    done = nexfort(*arguments, home=tmp_path)
    assert done.returncode == 1 and "nowhere" in done.stderr and "expected" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "nowhere").exists()


def test_it_says_its_version_its_name_and_examples(tmp_path: Path) -> None:
    assert nexfort("--version", home=tmp_path).stdout == f"nexfort {__version__}\n"
    said = nexfort("--help", home=tmp_path).stdout
    assert said.startswith("usage: nexfort ") and "examples:\n  nexfort " in said


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command below the parser, with its words."""
    for action in parser._subparsers._group_actions if parser._subparsers is not None else ():
        for name, below in dict(action.choices or {}).items():
            yield (name,), below
            for words, further in commands_of(below):
                yield (name, *words), further


COMMANDS = dict(commands_of(main._parser()))


def test_every_command_is_looked_at() -> None:
    assert {("run",), ("warm",), ("doctor",), ("plan",), ("cache",), ("cache", "import")} <= COMMANDS.keys()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_has_examples_that_can_be_typed(words: tuple[str, ...]) -> None:
    parser, whole = COMMANDS[words], main._parser()
    lines = parser.format_help().partition("\nexamples:\n")[2].splitlines()
    given = [shlex.split(line.strip().partition("   ")[0]) for line in lines]  # what an example is for stands behind it
    assert given and all(one[: 1 + len(words)] == ["nexfort", *words] for one in given)
    for one in given:
        whole.parse_args(one[1:])


def test_the_base_directory_is_spelt_in_one_way(tmp_path: Path) -> None:
    for command in ("run", "warm", "cache list", "cache clear", "plan"):
        said = nexfort(*command.split(), "--help", home=tmp_path).stdout
        assert "--base-directory DIR" in said and "--base-dir " not in said, command


# ---- into a pipe -------------------------------------------------------------------------------------------


def test_what_counts_up_is_no_line_a_second_in_a_pipe() -> None:
    said: list[str] = []
    now = [0.0]
    console = run_workflows.Console(said.append, is_watched=False, clock=lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        left = f", about {30 - second} s left" if second < 30 else ""
        text = f"Nexfort: {second // 3} of 10 blocks{left}"
        console({"type": "progress_text", "data": {"node": "5", "text": text}})
    assert [line.split(",")[0] for line in said] == [f"Nexfort: {count} of 10 blocks" for count in (0, 3, 6, 10)]
    watched: list[str] = []
    console = run_workflows.Console(watched.append, is_watched=True)
    for value in (1, 2, 3):
        console({"type": "progress", "data": {"node": "5", "value": value, "max": 9}})
    assert len(watched) == 3


# ---- models that are missing -------------------------------------------------------------------------------


def refusal(name: str, node: str = "12") -> dict[str, object]:
    """ComfyUI's answer for a loader whose file is in no list."""
    extra = {"input_name": "unet_name", "received_value": name}
    problem = {"type": "value_not_in_list", "message": "Value not in list", "details": "...", "extra_info": extra}
    return {node: {"class_type": "UNETLoader", "errors": [problem]}}


def test_each_missing_model_is_a_line_with_its_link() -> None:
    (line,) = missing_models(refusal("flux1-dev.safetensors"))
    assert line.startswith("flux1-dev.safetensors -> models/diffusion_models (node 12, UNETLoader)  https://")
    assert missing_models(refusal("folder\\own.safetensors")) == ["folder\\own.safetensors (node 12, UNETLoader)"]
    assert missing_models({**refusal("euler"), "3": {"class_type": "A", "errors": []}}) == [] == missing_models(None)
