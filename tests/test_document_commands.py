# SPDX-License-Identifier: Apache-2.0
"""What pages tell people to type is there: commands, flags, make's targets, variables, routes, words of a config."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from bundle_parts import put
from pages import DESIGN, ROOT, USER, name_of, read
from test_project import ENGINE, sources

from nexfort_engine.cache import key
from nexfort_engine.cache.store import Store
from nexfort_engine.cli import main
from nexfort_engine.config.options import KEYS, MEMORY_FORMATS, OPTIONS, TOKENS

COMMAND = re.compile(
    r"(?:\bpython3? -m ((?:nexfort_engine|benchmarks)[\w.]*)|^ *nexfort\b|`nexfort(?= [a-z]))([^\n`]*)", re.MULTILINE
)
PAGES = [*USER, *DESIGN, ROOT / "benchmarks" / "README.md", ROOT / "CONTRIBUTING.md"]
CLI = read(ROOT / "docs" / "cli.md")
INTERNAL = {"NEXFORT_WORKS_FOR"}  # the engine sets it for its own processes


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """(module, its arguments) of each command of a page, up to a comment or another command."""
    found = []
    for module, rest in COMMAND.findall(read(page)):
        rest = re.split(r"\s#|\s\\$|;|&&|[,.:)](?:\s|$)", rest)[0]
        found.append(
            (module or "nexfort_engine", shlex.split(rest, posix=True) if rest.count("'") % 2 == 0 else rest.split())
        )
    return found


def helped(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `--help` of a command says; AssertionError where there is no such command."""
    with pytest.raises(SystemExit) as ended:
        main.main([*arguments, "--help"])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    return said.out


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_command_is_there_with_its_flags(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for module, given in commands(page):
        spec = importlib.util.find_spec(module)
        assert spec, f"{name_of(page)}: python -m {module}"
        words = [word for word in given if re.fullmatch(r"[a-z]+", word)]
        flags = [flag.split("=")[0] for flag in given if flag.startswith("--")]
        if module == "nexfort_engine" and words:
            told = helped(words[:2] if words[0] == "cache" else words[:1], capsys)
        else:
            told = read(Path(spec.origin or "")) + "--help"
        assert [flag for flag in flags if flag not in told] == [], f"{name_of(page)}: {' '.join(given)}"


ORDER = ["list", "path", "verify", "pin", "export", "import", "prune", "clear"]  # the last ones leave nothing
RUNS = """
import contextlib, io, runpy, sys
for module in sys.argv[1:]:
    sys.argv, code = [module, "--help"], 0
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code
    assert not code and "usage" in said.getvalue(), module
"""


def test_commands_of_the_cache_run_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a cache that holds an artefact. Those for a ComfyUI and its models run in the tests of `run` and `warm`."""
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "cache"))
    entry = put(Store(tmp_path / "cache"), info={"fingerprint": key.fingerprint("cpu"), "machine": key.machine("cpu")})
    values = {"FILE": str(tmp_path / "all.tar"), "artefacts.tar": str(tmp_path / "all.tar"), "ID": entry.id}
    written = {tuple(given) for page in PAGES for module, given in commands(page) if module == "nexfort_engine"}
    mine = [
        given
        for given in written
        if given[:1] in {("cache",), ("doctor",), ("plan",)} and not {"--comfyui", "--base-directory"} & {*given}
    ]
    assert len(mine) > 8
    for given in sorted(mine, key=lambda given: (ORDER.index(given[1]) if given[1:] else -1, given)):
        code = main.main([values.get(word, word) for word in given])
        told = capsys.readouterr().err
        asks = given[1:2] == ("import",) and "--trust" not in given  # what a bundle holds is code
        assert ("with --trust" in told) if asks else code == 0, (given, told)


def test_other_commands_start() -> None:
    modules = {module for page in PAGES for module, _ in commands(page)}
    command = [sys.executable, "-c", RUNS, *sorted(modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_of_commands_has_each_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    listed = re.findall(r"^    ([a-z]+) ", helped([], capsys), re.MULTILINE)
    assert len(listed) >= 5
    assert [one for one in listed if f"| `{one}`" not in CLI] == []


def test_targets_of_make_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    named = {one for page in PAGES for one in re.findall(r"`?make ([a-z-]+)`?", "\n".join(code(page)))}
    assert named and named <= targets


def code(page: Path) -> list[str]:
    """Everything of a page that is written as code."""
    text = read(page)
    return [one[0] for pattern in (pages.FENCED, pages.INDENTED, pages.CODE) for one in pattern.finditer(text)]


def test_each_variable_is_read_and_explained() -> None:
    source = "\n".join(read(path) for path in sources(ENGINE, ROOT / "nodes", ROOT / "tests"))
    known = set(re.findall(r"\bNEXFORT_[A-Z_]+", "\n".join(read(p) for p in sources(ENGINE, ROOT / "nodes"))))
    named = {one for page in PAGES for one in re.findall(r"\bNEXFORT_[A-Z_]+", read(page))}
    assert [one for one in named if one not in source] == []
    assert [one for one in sorted(known - INTERNAL) if f"`{one}" not in CLI] == []


def test_each_route_is_there() -> None:
    routes = read(ROOT / "nodes" / "routes.py")
    named = {one for page in USER for one in re.findall(r"[ `](/nexfort(?:/[a-z]+)+)", read(page))}
    assert len(named) >= 5
    missing = [one for one in named if one.removeprefix("/nexfort") not in routes]
    assert missing == []


def test_messages_that_troubleshooting_quotes_are_said() -> None:
    """They are put together in code; each piece between values stands there."""
    rows = [line for line in read(ROOT / "docs" / "troubleshooting.md").splitlines() if line.startswith("| ")]
    quoted = [one for row in rows for one in re.findall(r'"([^"]+)"', row.split("|")[1])]
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(read(path) for path in sources(ENGINE, ROOT / "nodes")))
    assert len(quoted) > 3 and [one for one in quoted if one not in source] == []


# ---- words of a config ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*USER, *DESIGN], ids=name_of)
def test_options_that_a_page_names_are_there(page: Path) -> None:
    groups = "|".join(sorted({name.split(".")[0] for name in OPTIONS} - {"inductor"}))
    named = set(re.findall(rf"[`\"]((?:{groups})\.[a-z_0-9]+)[`\"]", read(page)))
    assert [name for name in named if name not in OPTIONS and f"{name}(" not in read(page)] == []


def test_every_mode_key_and_option_has_its_line() -> None:
    page = read(ROOT / "docs" / "options.md")
    assert [name for name in (*TOKENS, *KEYS, *OPTIONS) if f"\n| `{name}` |" not in page] == []
    assert [name for name in MEMORY_FORMATS if f"`{name}`" not in page] == []


def test_the_front_end_offers_the_modes_of_the_nodes() -> None:
    """A setting chooses the mode of new nodes; web/nexfort.js names all that nodes/compile_inputs.py has."""
    named = re.search(r"^const MODE_NAMES = \{\n(.*?)^\}$", read(ROOT / "web" / "nexfort.js"), re.MULTILINE | re.DOTALL)
    offered = re.search(r"^MODES = \[(.*)\]\nLOW_PRECISION = (.*)$", read(ROOT / "nodes" / "compile_inputs.py"), re.M)
    assert named and offered
    modes = re.findall(r'"([^"]+)"', f"{offered[1]}, {offered[2]}")
    assert re.findall(r"^  '?([\w:-]+)'?: '", named[1], re.MULTILINE) == modes


def test_what_is_not_there_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`python -m nexfort_engine cache prune --max-size 2GiB`\npython -m benchmarks.gone --x 'a b' # y\n")
    assert commands(page) == [
        ("nexfort_engine", ["cache", "prune", "--max-size", "2GiB"]),
        ("benchmarks.gone", ["--x", "a b"]),
    ]
    assert importlib.util.find_spec("benchmarks.gone") is None
