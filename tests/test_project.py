# SPDX-License-Identifier: Apache-2.0
"""What holds for the project as a whole: a light import, the direction of imports, headers, no code from text."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "nexfort_engine"
Node = TypeVar("Node", ast.Call, ast.ExceptHandler)

# The engine's packages from the bottom up, and the files that lie beside them; docs/design/overview.md says what
# each is for. One imports from those below it and from itself, for types too.
PACKAGES = (
    *(
        "config",
        "system",
        "modules",
        "graph",
        "reporting",
        "cache",
        "guards",
        "weights",
        "kernels",
        "quant",
        "attention",
    ),
    *("capture", "passes", "lowering", "runtime", "cudagraphs", "dispatch", "compilation"),
    *("engine", "api", "torch_backend", "hosts", "cli"),
)
ENTRIES = ("__main__", "clear_cache")  # they start a command
OLD_NAMES = ("backend", "build", "compiled", "flags", "offload")  # each is another name of a file that moved
RANK = {name: rank for rank, name in enumerate((*PACKAGES, *OLD_NAMES, *ENTRIES))}
MOST_BESIDE_PACKAGES = 12
HOST_PACKAGES = {
    *("comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "execution", "server", "app"),
    "diffusers",
}
MOST_LINES = 450  # of a file
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


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(full module name, line) of every import in a file, also inside functions and of types alone."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            # `from torch import _inductor` and `from . import lower` name modules after the word import
            yield from ((f"{whole}.{alias.name}", node.lineno) for alias in node.names)


def is_in(module: str, packages: set[str]) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in packages)


def test_tests_that_code_names_are_there() -> None:
    named = re.compile(r"\btests/[\w/]+\.py\b")
    places = [path for path in sources() if not path.is_relative_to(ROOT / "tests")]
    found = {(name_of(path), one) for path in places for one in named.findall(path.read_text(encoding="utf-8"))}
    assert len(found) > 3
    assert [(path, one) for path, one in sorted(found) if not (ROOT / one).is_file()] == []


# ---- imports -----------------------------------------------------------------------------------------------


def test_every_engine_file_has_a_package() -> None:
    names = {path.relative_to(ENGINE).parts[0].removesuffix(".py") for path in sources(ENGINE)} - {"__init__"}
    assert names == set(RANK), "name a new package in PACKAGES and in docs/design/overview.md"
    assert len(list(ENGINE.glob("*.py"))) <= MOST_BESIDE_PACKAGES


def edges(path: Path) -> dict[str, int]:
    """File of the engine, as a path, that a file imports -> line."""
    found = {}
    for module, line in imports(path):
        parts = module.split(".")
        if parts[0] != ENGINE.name:
            continue
        for place in (ROOT.joinpath(*parts), ROOT.joinpath(*parts[:-1])):
            file = next((f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()), None)
            if file is not None and place != ENGINE:
                found[file.relative_to(ENGINE).as_posix()] = line
                break
    return found


def upward(path: Path) -> dict[str, int]:
    """File of a package above that a file of the engine imports -> line."""
    own = path.relative_to(ENGINE).as_posix()
    if own == "__init__.py":  # the public names, loaded on first use
        return {}
    return {other: line for other, line in edges(path).items() if rank(other) > rank(own)}


def rank(file: str) -> int:
    return RANK[file.partition("/")[0].removesuffix(".py")]


def test_imports_run_downwards() -> None:
    found = [f"{name_of(path)}:{line}: {other}" for path in sources(ENGINE) for other, line in upward(path).items()]
    assert not found, "imports from a package above"


def in_rings() -> set[str]:
    """Files of the engine that import each other, at once or through others."""
    inner = {path.relative_to(ENGINE).as_posix(): set(edges(path)) for path in sources(ENGINE) if path.parent != ENGINE}
    inner |= {path.name: set(edges(path)) for path in ENGINE.glob("*.py") if path.name != "__init__.py"}

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        due = list(inner[start])
        while due:
            one = due.pop()
            if one not in found and one in inner:
                found.add(one)
                due += inner[one]
        return found

    return {name for name in inner if name in reached(name)}


def test_no_files_import_each_other() -> None:
    assert not in_rings()


def test_names_of_tests_are_unique() -> None:
    """pytest imports a test by the name of its file alone."""
    names = [path.name for path in sources(ROOT / "tests") if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


OLD_IMPORTS = r"""
import importlib, pickle, torch
import nexfort_engine
from nexfort_engine.config import CompileConfig
from nexfort_engine.engine import Engine
from nexfort_engine.flags import replaced
from nexfort_engine.hosts import comfy, comfy_weights
from nexfort_engine import build, capture, compile, compile_pipe, quantize_pipe
from nexfort_engine.hosts.comfy import attach, attach_vae, report_of

assert CompileConfig is nexfort_engine.CompileConfig and comfy.attach is attach
for old, new in (
    ("build", "compilation.builder"), ("flags", "system.process_settings"), ("compiled", "api"),
    ("backend", "torch_backend"), ("offload", "weights.offload"), ("hosts.comfy_weights", "hosts.comfy.weights"),
):
    one, other = (importlib.import_module(f"nexfort_engine.{name}") for name in (old, new))
    assert one is other, old
# what pickles of an earlier version name
assert pickle.loads(b"cnexfort_engine.offload\n_nowhere\n.")() is None
assert pickle.loads(b"cnexfort_engine.hosts.comfy\n_Engines\n.")() == {}
assert callable(pickle.loads(b"cnexfort_engine.compiled\n_rebuild\n."))
"""


def test_names_from_before_the_packages_still_work() -> None:
    done = subprocess.run([sys.executable, "-c", OLD_IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def importing(packages: set[str], *paths: Path) -> list[str]:
    """Where these files import something of these packages."""
    found = [(path, *imported) for path in paths for imported in imports(path)]
    return [f"{name_of(path)}:{line}: {module}" for path, module, line in found if is_in(module, packages)]


def test_only_hosts_know_a_host() -> None:
    others = [path for path in sources(ENGINE) if path.relative_to(ENGINE).parts[0] != "hosts"]
    assert not importing(HOST_PACKAGES, *others)


def test_nodes_never_import_a_compiler() -> None:
    assert not importing(COMPILERS, *sources(ROOT / "nodes"))


def test_the_engine_never_imports_the_nodes() -> None:
    assert not importing({"nodes"}, *sources(ENGINE))


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


def test_each_file_says_its_licence_and_its_purpose() -> None:
    first = "# SPDX-License-Identifier: Apache-2.0\n"
    assert not [name_of(path) for path in sources() if not path.read_text(encoding="utf-8").startswith(first)]
    assert not [name_of(path) for path in sources() if not ast.get_docstring(tree(path))], "what the file is for"


def test_no_file_is_too_long() -> None:
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


def in_code(kind: type[Node]) -> Iterator[tuple[str, Node]]:
    """(place, node) of every node of a kind in what is not a test."""
    for path in sources(ENGINE, ROOT / "nodes", ROOT / "demo", ROOT / "tools"):
        yield from ((f"{name_of(path)}:{one.lineno}", one) for one in ast.walk(tree(path)) if isinstance(one, kind))


def test_no_code_is_made_from_text() -> None:
    calls = [(place, call.func.id) for place, call in in_code(ast.Call) if isinstance(call.func, ast.Name)]
    assert not [call for call in calls if call[1] in ("eval", "exec")]


def test_no_failure_is_swallowed_whole() -> None:
    assert not [place for place, one in in_code(ast.ExceptHandler) if one.type is None], "name what is caught"


def test_the_readme_answers_on_its_first_screen() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for needed in ("NEXFORT_DISABLE=1", "ypass", "custom_nodes", "git clone", "Manager"):
        assert needed in "\n".join(lines[:15]), needed
    for needed in ("| GPU", "Not measured", "| node |", "restart"):
        assert needed in "\n".join(lines[:60]), needed


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_kernels_are_compiled_by_the_compiler_that_was_chosen() -> None:
    """Inductor asks once; were it loaded before conftest.py has chosen, all tests would take half as long again."""
    from torch._inductor import config

    assert config.cpp.cxx[1] == os.environ["CXX"]
