# SPDX-License-Identifier: Apache-2.0
"""Loading ahead: a first step finds its artefacts loaded, and what is not loaded by then it loads itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nexfort_engine import api
from nexfort_engine import compile as nexfort_compile
from nexfort_engine.capture.types import LOCK
from nexfort_engine.compilation import load_ahead, lookup
from nexfort_engine.lowering import inductor

WAITS = 60.0


class Twice(torch.nn.Module):
    """Two blocks, for each an artefact of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        self.two = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.nn.Module]:
    """A network whose artefacts are in the store of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXFORT_CACHE_DIR", str(tmp_path_factory.mktemp("ahead") / "store"))
        patch.setenv("NEXFORT_WORKERS", "0")
        network = Twice().eval().requires_grad_(False)
        first = nexfort_compile(network)
        _agrees(first)
        assert first.report.as_dict()["artefacts_compiled"] > 0
        yield network
        api._stores.clear()


@pytest.fixture
def again(stored: torch.nn.Module) -> Callable[[], Any]:
    """What compiles it as a new process does."""

    def anew() -> Any:
        lookup._loaded.clear()
        api._stores.clear()
        return nexfort_compile(stored)

    return anew


def _agrees(compiled: Any) -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(compiled(x), compiled.uncompiled()(x), atol=1e-5)


def _ended() -> None:
    for work in list(load_ahead._running):
        assert work.ended.wait(WAITS)


def _count(compiled: Any) -> int:
    return sum(map(len, compiled._nexfort_engine.state.known.artefacts.values()))


def _refuses(*_: Any) -> Any:
    raise AssertionError("a step loads what was loaded ahead")


def test_a_first_step_finds_its_artefacts_loaded(again: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = again()
    _ended()
    assert _count(compiled) > 0
    monkeypatch.setattr(inductor, "load", _refuses)
    _agrees(compiled)
    report = compiled.report.as_dict()
    assert report["artefacts_loaded"] == _count(compiled) and not report["artefacts_compiled"] and not report["eager"]
    store = compiled._nexfort_engine.state.store
    assert {row["id"] for row in store.rows()} <= store._used, "they count as used, and stay in the cache"


def test_a_step_that_comes_meanwhile_waits_for_one_and_loads_the_others(
    again: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, own, threads = threading.Event(), threading.Event(), inductor.load, list[str]()

    def slow(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        begun.set()
        assert go.wait(WAITS)
        return own(*args)

    monkeypatch.setattr(inductor, "load", slow)
    compiled = again()
    assert begun.wait(WAITS)
    timer = threading.Timer(0.3, go.set)
    timer.start()
    _agrees(compiled)
    timer.join()
    report = compiled.report.as_dict()
    assert report["artefacts_loaded"] == len(threads) > 0 and not report["artefacts_compiled"] and not report["eager"]
    assert threads.count("nexfort-ahead") == 1


def test_waiting_for_it_can_be_cancelled(again: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, own = threading.Event(), threading.Event(), inductor.load

    def slow(*args: Any) -> Any:
        begun.set()
        assert go.wait(WAITS)
        return own(*args)

    def cancel() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inductor, "load", slow)
    compiled = again()
    assert begun.wait(WAITS)
    with pytest.raises(KeyboardInterrupt):
        load_ahead.finish(cancel)
    go.set()
    _ended()
    _agrees(compiled)


def test_what_does_not_load_is_left_to_the_step(again: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("no such operator")

    with monkeypatch.context() as patch:
        patch.setattr(inductor, "load", fails)
        compiled = again()
        _ended()
    assert _count(compiled) == 0
    _agrees(compiled)
    report = compiled.report.as_dict()
    assert report["artefacts_loaded"] > 0 and not report["artefacts_compiled"] and not report["notes"]


def test_nothing_is_loaded_beside_who_makes_artefacts(again: Callable[[], Any]) -> None:
    with LOCK:
        compiled = again()
        _ended()
        assert _count(compiled) == 0
    _agrees(compiled)
    assert compiled.report.as_dict()["artefacts_loaded"] > 0


def test_without_a_thread_the_step_loads(again: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        compiled = again()
    assert all(work.ended.is_set() for work in load_ahead._running)
    _agrees(compiled)
    assert compiled.report.as_dict()["artefacts_loaded"] > 0
