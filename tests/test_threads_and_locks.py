# SPDX-License-Identifier: Apache-2.0
"""docs/design/threads_and_locks.md: it names every thread and lock of the code, and threads take locks in its order."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import recorded_locks
from recorded_locks import ROOT, assigned, made, statements
from test_project import ENGINE, name_of, sources

PAGE = ROOT / "docs" / "design" / "threads_and_locks.md"
EVENTS = ("threading.Event", "queue.Queue", "queue.SimpleQueue", "ContextVar")
THREADS = ("threading.Thread", "threading.Timer", "ThreadPoolExecutor", "begun")
ENDS = (
    "os.fork",
    "subprocess.Popen",
    "atexit.register",
    "weakref.finalize",
    "signal.signal",
    "fcntl.flock",
    "lock.flock",
)
RANKED = re.compile(r"^\| (\d+) \| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)
NAMED = re.compile(r"nexfort(-[a-z]+)+")


@functools.cache
def entries() -> list[str]:
    """The page's rows, bullets and paragraphs."""
    return re.split(r"\n(?=[|\n-])", PAGE.read_text(encoding="utf-8"))


def missing(name: str, path: Path) -> list[str]:
    """What of the code no row, bullet or paragraph names together with its file."""
    found = any(f"`{name}`" in entry and f"`{name_of(path)}`" in entry for entry in entries())
    return [] if found else [f"{name} of {name_of(path)}"]


def calls(path: Path) -> Iterator[tuple[str, ast.Call, str]]:
    """What a file calls, the call, and the outermost function that it stands in: `Class.method` or its own name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: dict[int, str] = {}
    for node, kind, _ in statements(tree):
        if isinstance(node, ast.FunctionDef):
            for call in ast.walk(node):
                inside.setdefault(id(call), f"{kind}.{node.name}" if kind else node.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node, inside.get(id(node), "")


CODE = sources(ENGINE, ROOT / "nodes")


def test_each_lock_and_event_is_on_the_page() -> None:
    ranked = {(file, name) for _, name, file in RANKED.findall(PAGE.read_text(encoding="utf-8"))}
    assert [row for path in CODE for name in made(path).values() if (row := (name_of(path), name)) not in ranked] == []
    assert [line for path in CODE for name, _ in assigned(path, EVENTS) for line in missing(name, path)] == []


def test_each_thread_is_on_the_page() -> None:
    found = {path: threads(path) for path in CODE}
    assert sum(map(bool, found.values())) > 10, "threads are found"
    assert [line for path, names in found.items() for name in names for line in missing(name, path)] == []


def threads(path: Path) -> set[str]:
    """The names of the threads that a file starts; of those that it gives no name, what the file calls them."""
    started = [call for called, call, _ in calls(path) if called in THREADS]
    if not started:
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [text for call in started for text in texts(call)] or texts(tree)
    named = {one for one in names if NAMED.fullmatch(one)} or {name for name, _ in assigned(path, THREADS)}
    return named or {ast.unparse(call.func).rpartition(".")[2] for call in started}


def texts(tree: ast.AST) -> list[str]:
    """The constant texts in a piece of code."""
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [one for one in found if isinstance(one, str)]


def test_each_process_fork_exit_handler_and_file_lock_is_on_the_page() -> None:
    found = {(path, function) for path in CODE for called, _, function in calls(path) if called in ENDS}
    found |= {
        (path, f"{kind}.{node.name}")
        for path in CODE
        for node, kind, _ in statements(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "__del__"
    }
    assert len(found) > 10, "they are found"
    assert [line for path, name in found for line in missing(name, path)] == []


def test_the_page_names_nothing_that_is_gone() -> None:
    known = {(name_of(path), name) for path in CODE for name in made(path).values()}
    assert [row for row in RANKED.findall(PAGE.read_text(encoding="utf-8")) if (row[2], row[1]) not in known] == []
    files = set(re.findall(r"`((?:nexfort_engine|nodes)/[\w/]+\.py)`", PAGE.read_text(encoding="utf-8")))
    assert [file for file in files if not (ROOT / file).exists()] == []


RUN = """
import sys
sys.path.insert(0, {tests!r})
import recorded_locks
recorded_locks.install()
import torch, nexfort_engine
from torch import nn
from nexfort_engine.cache.store import Store

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return x + self.down(self.up(x).sin())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

with torch.no_grad():
    network = Net()
    found = nexfort_engine.compile(network)
    found(torch.randn(1, 8))
    found.verify_next()
    found(torch.randn(1, 8))
    assert found.report.as_dict()["artefacts_compiled"], found.report
    again = nexfort_engine.compile(Net())
    again(torch.randn(3, 8))
    assert again.report.as_dict()["artefacts_loaded"], again.report
    beside = nexfort_engine.compile(Net().double(), options={{"options": {{"compile.background": True}}}})
    beside(torch.randn(2, 8).double())
    assert beside._nexfort_engine.builder.background.join(120)
    beside(torch.randn(2, 8).double())
Store({cache!r}).prune(0)
print(recorded_locks.told())
"""


@pytest.mark.slow
def test_threads_take_locks_in_the_order_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NEXFORT_WORKERS", "0")
    code = RUN.format(tests=str(ROOT / "tests" / "support"), cache=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    ranks = {f"{file} {name}": int(rank) for rank, name, file in RANKED.findall(PAGE.read_text(encoding="utf-8"))}
    export = next(name for name, rank in ranks.items() if rank == 1)
    inductor = next(name for name, rank in ranks.items() if rank == 2)
    assert [export, inductor] in told["edges"], "locks were recorded"
    assert [edge for edge in told["edges"] if ranks[edge[0]] >= ranks[edge[1]]] == []
    # who holds it waits for the other threads
    assert set(told["takers"][export]) <= {"MainThread", "nexfort-background"}
    assert "nexfort-lowering" in told["takers"][inductor]


def test_an_order_that_is_broken_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(recorded_locks, "edges", set())
    monkeypatch.setattr(recorded_locks, "takers", {})
    one, other = (recorded_locks._Recorded(threading.RLock(), name) for name in ("one", "other"))
    with one, one, other:
        assert other.acquire(blocking=False)
        other.release()
    with other, one:
        pass
    assert recorded_locks.edges == {("one", "other"), ("other", "one")}
