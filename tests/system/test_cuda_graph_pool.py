# SPDX-License-Identifier: Apache-2.0
"""The pool that graphs of one engine share: for as long as one of them is there."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from nexfort_engine.system import cuda_graph_pool
from nexfort_engine.system.cuda_graph_pool import GraphMemory


class Graph:
    """In the place of torch.cuda.CUDAGraph."""


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pools that were captured into, in order, on a machine that need not have a GPU."""
    used: list[Any] = []

    class Recording(contextlib.nullcontext[None]):
        capture_stream = "its stream"

        def __init__(self, _graph: Any, pool: Any, **_: Any) -> None:
            super().__init__()
            used.append(pool)

    replaced = {"graph_pool_handle": object, "graph": Recording, "current_device": lambda: 0}
    replaced |= {"stream": contextlib.nullcontext, "current_blas_handle": lambda: 0}
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", _refuses, raising=False)
    return used


def _refuses(_device: int, _pool: Any) -> None:
    raise RuntimeError("endAllocatePool: not currently recording to mempool_id")


def test_a_pool_goes_with_the_last_of_its_graphs(pools: list[Any]) -> None:
    """torch refuses a capture into one that none uses any more while somebody still has a tensor of it."""
    memory, graphs = GraphMemory(), [Graph(), Graph()]
    for one in graphs:
        with memory.captured(one):
            pass
    assert pools[0] is pools[1]
    del graphs[0]
    with memory.captured(third := Graph()):
        pass
    assert pools[2] is pools[0], "another graph uses it"
    del graphs[0], third, one
    with memory.captured(Graph()):
        pass
    assert pools[3] is not pools[0]
    memory.give_back()
    with memory.captured(Graph()):
        pass
    assert pools[4] is not pools[3]


def test_a_graph_whose_capture_failed_uses_no_pool(pools: list[Any]) -> None:
    memory, failed = GraphMemory(), Graph()
    with pytest.raises(ValueError), memory.captured(failed):
        raise ValueError
    with memory.captured(Graph()):
        pass
    assert pools[1] is not pools[0]


def test_no_capture_follows_a_failed_one_into_its_pool(pools: list[Any]) -> None:
    memory, kept = GraphMemory(), Graph()
    with memory.captured(kept):
        pass
    with pytest.raises(ValueError), memory.captured(Graph()):
        raise ValueError
    graphs = [Graph(), Graph()]
    for one in graphs:
        with memory.captured(one):
            pass
    assert pools[1] is pools[0] is not pools[2] and pools[3] is pools[2]
    assert memory._older == [pools[0]]


def test_the_allocator_is_told_of_the_end_of_a_capture_that_torch_did_not_tell_it_of(
    pools: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def ended(*given: Any) -> None:
        if told:
            _refuses(*given)
        told.append(("end", *given))

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: told.append(("release", *given)), raising=False)
    memory, kept = GraphMemory(), Graph()
    with memory.captured(kept):
        pass
    with pytest.raises(ValueError), memory.captured(Graph()):
        raise ValueError
    assert told == [("end", 0, pools[0]), ("release", 0, pools[0])]


def test_memory_that_is_collected_while_its_lock_is_held_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected in whichever line makes an object, those under the lock among them."""
    given: list[int] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(cuda_graph_pool, "_trim", given.append)
    memory = GraphMemory()
    memory._device = 0

    def collected() -> None:
        with cuda_graph_pool._lock:
            memory.__del__()

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and given == [0]
