# SPDX-License-Identifier: Apache-2.0
"""What the contracts are asked of: a tiny backbone, eager and compiled side by side, and ways to start it cold.

No test lives here. `subject(name)` is made once a session and shares the session's artefact cache; `cold(name)` has a
cache of its own and runs captured graphs as they are, so that everything but Inductor is true and a cold start costs
seconds where it would cost a minute.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from backbones import BACKBONES, FOUR, Backbone, Tiny, make, tensors_of
from torch import nn

from nexfort_engine import compile as nexfort_compile
from nexfort_engine.api import wrap_methods
from nexfort_engine.cache.store import Store
from nexfort_engine.capture.types import Captured
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.dispatch import forward_shim
from nexfort_engine.engine import Engine
from nexfort_engine.lowering import inductor
from nexfort_engine.reporting.report import Report
from nexfort_engine.runtime import artifact
from nexfort_engine.runtime.engine_state import HostHooks

T = TypeVar("T")

TOLERANCE = 1e-4  # the distance rule in fp32 on a CPU, as a relative norm
SECONDS_BETWEEN_LOOKS = 0.02  # or looking takes as long as what is looked at
MOVES = 100 * TOLERANCE  # what a contract varies must move the eager result by this much at least
Tensors = list[torch.Tensor]


def names(*, where: Callable[[Backbone], bool] = lambda kind: True, few: Collection[str] = FOUR) -> list[Any]:
    """The backbones as pytest parameters: ComfyUI's carry the marker, and `make test` runs only the few."""
    return [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.comfy] if kind.host == "comfy" else []),
                *([] if name in few else [pytest.mark.large]),
            ],
        )
        for name, kind in BACKBONES.items()
        if where(kind)
    ]


def installed(request: pytest.FixtureRequest) -> list[str]:
    """The backbones that can be made here."""
    hosts = {"torch"}
    if importlib.util.find_spec("diffusers") is not None:
        hosts.add("diffusers")
    try:
        request.getfixturevalue("comfyui")
        hosts.add("comfy")
    except pytest.skip.Exception:
        pass
    return [name for name, kind in BACKBONES.items() if kind.host in hosts]


every = pytest.mark.parametrize("name", names())


def distance(found: Tensors, wanted: Tensors) -> float:
    """||found - wanted|| / ||wanted|| over all tensors of a result. Infinite where shapes or dtypes differ."""
    if [(t.shape, t.dtype) for t in found] != [(t.shape, t.dtype) for t in wanted]:
        return float("inf")
    difference = sum(float((f.double() - w.double()).square().sum()) for f, w in zip(found, wanted, strict=True))
    result = (difference / sum(float(w.double().square().sum()) for w in wanted)) ** 0.5
    return result if result == result else float("inf")


def equal_bits(found: Tensors, wanted: Tensors) -> bool:
    """Whether two results are the same to the last bit."""
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


class Subject:
    """A backbone and its compiled self. Keywords of `run` and `eager` are those of `Tiny.make_inputs`."""

    def __init__(self, tiny: Tiny, compiled: Any = None) -> None:
        self.tiny, self.module = tiny, tiny.module
        self.keys_before = list(self.module.state_dict())
        self.eager_before = self.eager()
        self.compiled = compiled if compiled is not None else nexfort_compile(self.module)

    @property
    def report(self) -> Report:
        """What the engine says it did."""
        return self.compiled.report

    @property
    def engine(self) -> Engine:
        """The engine behind the compiled module."""
        return self.compiled._nexfort_engine

    def eager(self, **call: Any) -> Tensors:
        """What the plain module gives."""
        return self._call(self.module, call)

    def run(self, **call: Any) -> Tensors:
        """What the compiled module gives."""
        return self._call(self.compiled, call)

    def _call(self, module: nn.Module, call: dict[str, Any]) -> Tensors:
        args, kwargs = self.tiny.make_inputs(**call)
        with torch.inference_mode():
            return tensors_of(module(*args, **kwargs))

    def again(self) -> Subject:
        """The same module with an engine of its own, which finds the artefacts that there are."""
        return Subject(self.tiny)

    def same(self, **call: Any) -> float:
        """The distance of compiled to eager for one call."""
        return distance(self.run(**call), self.eager(**call))


def new_since(subject: Subject, mark: Any) -> dict[str, Any]:
    """What the report gained that a contract may forbid: artefacts, variants, blocks that ran eager."""
    found = subject.report.since(mark)
    return {key: found[key] for key in ("artefacts", "variants", "eager") if found[key]}


def assert_plain(subject: Subject) -> None:
    """The module is what it was before it was compiled, and nothing of the engine is left in it."""
    assert list(subject.module.state_dict()) == subject.keys_before == list(subject.compiled.state_dict())
    assert equal_bits(subject.eager(), subject.eager_before)


def assert_nothing_left(subject: Subject) -> None:
    """No call is under way: no block has a forward of the engine's."""
    assert not forward_shim._installed
    assert not [path for path, sub in subject.module.named_modules() if "forward" in vars(sub)]


@functools.cache
def subject(name: str) -> Subject:
    """The backbone after its first call: batch 2, square, as many prompt tokens as image tokens."""
    made = Subject(make(name))
    made.run()
    return made


# ---- cold starts without Inductor ---------------------------------------------------------------------------

_graphs: dict[str, tuple[torch.fx.GraphModule, list[torch.Tensor]]] = {}


@functools.cache
def _graph_cache() -> str:
    """The graphs last as long as this process, and so does what is stored about them."""
    return tempfile.mkdtemp(prefix="nexfort-graphs-")


def ran(run: Callable[[], T]) -> tuple[int, T]:
    """How many artefacts run meanwhile, and the result."""
    seen, own = [], artifact.Binding.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifact.Binding, "run", lambda self, *rest: (seen.append(self), own(self, *rest))[1])
        found = run()
    return len(seen), found


@contextmanager
def graphs_as_they_are() -> Iterator[None]:
    """Inside the block a captured graph is not lowered: its artefact is the graph. They share a cache."""

    def keep(captured: Captured, payload: Path, _options: Any) -> None:
        payload.mkdir(parents=True, exist_ok=True)
        key = str(len(_graphs))
        _graphs[key] = captured.graph, captured.constants
        (payload / "graph").write_text(key)

    def load(payload: Path, _options: Any, _modules: Any, weights: int = 0) -> Callable[[list[Any]], Any]:
        graph, constants = _graphs[(payload / "graph").read_text()]
        return lambda inputs: graph(*inputs[:weights], *constants, *inputs[weights:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXFORT_CACHE_DIR", _graph_cache())
        patch.setenv("NEXFORT_WORKERS", "0")  # a worker process would lower for real
        patch.setattr(inductor, "lower", keep)
        patch.setattr(inductor, "load", load)
        yield


def graph_subject(name: str) -> Subject:
    """A backbone of its own after its first call, inside `graphs_as_they_are`; what is captured is shared."""
    made = Subject(make(name))
    made.run()
    return made


def cold_subject(tiny: Tiny, **hooks: Any) -> Subject:
    """A backbone whose engine has an empty cache; keywords go to HostHooks."""
    store = Store(tempfile.mkdtemp(prefix="nexfort-cold-"))
    made = Engine(tiny.module, CompileConfig.parse(None), store, hooks=HostHooks(**hooks))
    return Subject(tiny, wrap_methods(tiny.module, made, ("forward",)))


def ask_instead(patch: pytest.MonkeyPatch, engine: Engine, **hooks: Any) -> None:
    """Until the patch is undone, an engine asks these of its host in the place of what it was made with."""
    patch.setattr(engine.state, "hooks", replace(engine.state.hooks, **hooks))


class Beside:
    """Runs a function again and again in this thread while another works; keeps what it gave."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # handed to the thread that waits
            self.error = error

    def while_running(self, look: Callable[[], Any], seconds: float = 300.0) -> list[Any]:
        """What `look` gave or raised, once at least, until the work has ended."""
        found = []
        self.thread.start()
        deadline = time.monotonic() + seconds
        while not found or self.thread.is_alive():
            assert time.monotonic() < deadline, f"the work did not end in {seconds:.0f} s"
            try:
                found.append(look())
            except Exception as error:  # what the test is there to find
                found.append(error)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if self.error is not None:
            raise self.error
        return found
