# SPDX-License-Identifier: Apache-2.0
"""What holds for the project as a whole: a light import, the direction of imports, headers, no code from text."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "nexfort_engine"

# The engine's rooms from the bottom up; DESIGN.md explains them. A room imports from rooms below it and from itself.
ROOMS: dict[str, tuple[str, ...]] = {
    "plain": (
        *("config", "grammar", "report", "flags", "progress", "locate", "session", "signature", "readset", "guards"),
        *("conditions", "driver", "graphmemory", "graphnodes", "held", "budget", "pace", "heap", "recent", "modes"),
        *("shortage", "processes", "compilers", "keeper"),
    ),
    "cache": ("cache",),
    "block": (
        *("bytecode", "digests", "dependences"),
        "modulestate",
        "strengths",
        "substitutes",
        "sites",
        "shadow",
        "parts",
        "aliases",
        "prepared",
        "loans",
        "offload",
        "residence",
        "glue",
        "regions",
        "cpu_probe",
    ),
    "quant": ("quant",),
    "capture": (
        *("capture", "tracing", "placeholders", "images", "assumptions", "operands", "effects", "sources"),
        "subclasses",
        "reached",
    ),
    "lower": (
        "lower",
        "attention",
        "passes",
        "kernels",
        "choices",
        "pairs",
        "repeats",
        "prompted",
        "parting",
        "folding",
        "worker",
        "orphaned",
        "lines",
        "forked_kernels",
        "shared_kernels",
        "timing",
        "torchs_pool",
        "importing",
        "pool",
        "artefact",
        "selfcheck",
        "support",
    ),
    "making": ("lowering",),
    "dispatch": (
        "dispatch",
        "keeping",
        "remedies",
        "faults",
        "build",
        "finding",
        "background",
        "planning",
        "cudagraph",
        "stepgraph",
        "asides",
        "stepcall",
        "constants",
        "rehearsal",
        "verify",
        "worth",
        "promise",
    ),
    "engine": ("engine", "standins"),
    "entry": ("compiled", "backend"),
    "hosts": ("hosts",),
    "command": (
        *("doctor", "headless", "headless_run", "warm_workflow", "warm", "terminal", "cli_cache", "cli_plan", "cli"),
        *("clear_cache", "__main__"),
    ),
}
# (file, file of a room above that it imports): all are there for types. This list only shrinks.
STILL_UPWARD = {
    *(("background", "engine"), ("build", "engine"), ("cudagraph", "engine"), ("dispatch", "engine")),
    *(("faults", "engine"), ("finding", "engine"), ("keeping", "engine"), ("planning", "engine")),
    *(("promise", "engine"), ("remedies", "engine"), ("session", "engine"), ("verify", "engine"), ("worth", "engine")),
}
RANK = {name: rank for rank, names in enumerate(ROOMS.values()) for name in names}
HOST_PACKAGES = {
    *("comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "execution", "server", "app"),
    "diffusers",
}
MOST_SECONDS = 0.2  # of the import, torch apart
COMPILERS = {"triton", "torch._inductor", "torch._dynamo"}


def sources(*folders: Path) -> list[Path]:
    """The project's Python files in `folders`, or in all of the project; without hidden folders and build results."""
    found: list[Path] = []
    for folder in folders or (ROOT,):
        for place, inner, files in os.walk(folder):
            inner[:] = [name for name in inner if not name.startswith(".") and name not in ("build", "demo-output")]
            found += [Path(place, file) for file in files if file.endswith(".py")]
    return sorted(found)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(full module name, line) of every import in a file, also inside functions and of types alone."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            # `from torch import _inductor` and `from . import lower` name modules after the word import
            yield from ((f"{whole}.{alias.name}", node.lineno) for alias in node.names)


def is_in(module: str, packages: set[str]) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in packages)


# ---- imports -----------------------------------------------------------------------------------------------


def test_every_engine_file_has_a_room() -> None:
    names = {path.relative_to(ENGINE).parts[0].removesuffix(".py") for path in sources(ENGINE)} - {"__init__"}
    assert names == set(RANK), "name the room of a new file in ROOMS and in DESIGN.md"


def upward(path: Path) -> dict[tuple[str, str], int]:
    """(file of the engine, file or package of a room above that it imports) -> line."""
    own = path.relative_to(ENGINE).parts[0].removesuffix(".py")
    if own == "__init__":  # the public names, loaded on first use
        return {}
    others = ((module.split(".")[1], line) for module, line in imports(path) if module.startswith("nexfort_engine."))
    return {(own, other): line for other, line in others if RANK.get(other, -1) > RANK[own]}


@pytest.mark.parametrize("path", sources(ENGINE), ids=name_of)
def test_imports_run_downwards(path: Path) -> None:
    new = {f"line {line}: {names[1]}" for names, line in upward(path).items() if names not in STILL_UPWARD}
    assert not new, f"{name_of(path)} imports from a room above"


def test_the_list_of_imports_that_run_upwards_only_shrinks() -> None:
    gone = STILL_UPWARD - {names for path in sources(ENGINE) for names in upward(path)}
    assert not gone, "no longer imported: take them off STILL_UPWARD"


@pytest.mark.parametrize("path", sources(ENGINE), ids=name_of)
def test_only_hosts_know_a_host(path: Path) -> None:
    if path.relative_to(ENGINE).parts[0] == "hosts":
        return
    known = [f"{name_of(path)}:{line}: {module}" for module, line in imports(path) if is_in(module, HOST_PACKAGES)]
    assert not known


@pytest.mark.parametrize("path", sources(ROOT / "nodes"), ids=name_of)
def test_nodes_never_import_a_compiler(path: Path) -> None:
    found = [f"{name_of(path)}:{line}: {module}" for module, line in imports(path) if is_in(module, COMPILERS)]
    assert not found


def test_the_engine_never_imports_the_nodes() -> None:
    found = [name_of(path) for path in sources(ENGINE) for module, _ in imports(path) if is_in(module, {"nodes"})]
    assert not found


LIGHT = """
import json, os, sys, time
import torch
before, env, path = set(sys.modules), dict(os.environ), list(sys.path)
began = time.perf_counter()
import nexfort_engine
seconds = time.perf_counter() - began
names = [getattr(nexfort_engine, name) for name in nexfort_engine.__all__]
print(json.dumps({
    "seconds": seconds,
    "modules": sorted(set(sys.modules) - before),
    "env": env == dict(os.environ),
    "path": path == sys.path,
    "device": torch.cuda.is_initialized(),
}))
"""


@pytest.fixture(scope="module")
def light() -> dict[str, object]:
    """What importing the engine and touching every public name did to a fresh process.

    The first of three that was fast enough, or the fastest: each has to load torch.
    """
    runs: list[dict[str, object]] = []
    while len(runs) < 3 and not any(run["seconds"] < MOST_SECONDS for run in runs):  # type: ignore[operator]
        done = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return min(runs, key=lambda run: run["seconds"])


def test_the_import_takes_no_time(light: dict[str, object]) -> None:
    assert light["seconds"] < MOST_SECONDS  # type: ignore[operator]


def test_the_import_brings_nothing_heavy_and_changes_nothing(light: dict[str, object]) -> None:
    heavy = {*COMPILERS, *HOST_PACKAGES, "transformers", "numpy.testing", "PIL"}
    assert not [module for module in light["modules"] if is_in(module, heavy)]  # type: ignore[attr-defined]
    assert light["env"] and light["path"]
    assert light["device"] is False


def test_the_plugin_is_silent_without_comfyui(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT.parent)!r}); sys.modules.pop('comfy_api', None)\n"
    code += f"import importlib; m = importlib.import_module({ROOT.name!r}); print(hasattr(m, 'comfy_entrypoint'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False", "")


# ---- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_each_file_says_its_licence_and_its_purpose(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(ast.parse(text)), "the docstring says what the file is for"


@pytest.mark.parametrize("path", sources(ENGINE, ROOT / "nodes", ROOT / "demo", ROOT / "tools"), ids=name_of)
def test_no_code_is_made_from_text(path: Path) -> None:
    calls = [
        f"{node.func.id} in line {node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")
    ]
    assert not calls


@pytest.mark.parametrize("path", sources(ENGINE, ROOT / "nodes", ROOT / "demo", ROOT / "tools"), ids=name_of)
def test_no_failure_is_swallowed_whole(path: Path) -> None:
    bare = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare, "name what is caught"


def test_the_readme_answers_on_its_first_screen() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:60])
    for needed in ("NEXFORT_DISABLE=1", "ypass", "custom_nodes", "git clone", "| GPU"):
        assert needed in first_screen, needed


def test_the_design_names_every_room() -> None:
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    missing = [name for names in ROOMS.values() for name in names if name != "__main__" and name not in text]
    assert not missing


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_kernels_are_compiled_by_the_compiler_that_was_chosen() -> None:
    """Inductor asks once; were it loaded before conftest.py has chosen, all tests would take half as long again."""
    from torch._inductor import config

    assert config.cpp.cxx[1] == os.environ["CXX"]
