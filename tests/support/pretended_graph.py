# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on a machine without a GPU: a replay runs the captured call again, on the very tensors of the capture.

So what the engine feeds, compares and forgets can be tested anywhere: what is not fed stays as it was when the graph
was made, as on a GPU. What only a GPU does (streams, pools of memory, what refuses a capture) is in
test_step_graphs_on_gpu.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nexfort_engine import engine
from nexfort_engine.cudagraphs import few_steps, graph_capture, step_graphs
from nexfort_engine.cudagraphs.invariant_cache import StepInvariants
from nexfort_engine.runtime.forward_context import current


def nothing() -> None:
    """What a graph does into which nothing was captured."""


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    made: list[Graph] = []  # noqa: RUF012  # of this test

    def __init__(self) -> None:
        self.again: Callable[[], Any] = nothing
        Graph.made.append(self)

    def replay(self) -> None:
        self.again()


class _Memory:
    @contextlib.contextmanager
    def captured(self, graph: Graph, stream: Any = None) -> Iterator[None]:
        yield

    def give_back(self) -> None: ...


class _Instead:
    """A module of torch with some names that are others."""

    def __init__(self, module: Any, **others: Any) -> None:
        self.__dict__.update(others, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, engines on the CPU make graphs of their steps, those of short pictures too."""
    Graph.made = []
    patch.setattr(few_steps, "MANY", 0)
    cuda = _Instead(torch.cuda, CUDAGraph=Graph, is_available=lambda: True, is_current_stream_capturing=lambda: False)
    for module in (step_graphs, graph_capture, engine):
        patch.setattr(module, "torch", _Instead(torch, cuda=cuda))
    for module in (step_graphs, graph_capture):
        patch.setattr(module, "fragile", lambda: False)
    patch.setattr(step_graphs, "GraphMemory", _Memory)
    patch.setattr(step_graphs, "DEVICE", "cpu")
    capture, capture_calls = step_graphs.StepGraphs._capture, step_graphs.captured

    def captured(self: Any, key: Any, step: Any, call: Any, plain: Callable[..., Any], session: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            graph = Graph.made[-1]
            given = _containers(args), _containers(kwargs)

            def again() -> None:  # with the containers as they were, and the same tensors
                now = current.get() or session
                with step.invariants or contextlib.nullcontext(), now.observed(None, step.invariants):
                    result = plain(*_containers(given[0]), **_containers(given[1]))
                    step_graphs.write_result(result, step.outputs, step.output)

            graph.again = again
            return plain(*args, **kwargs)

        return capture(self, key, step, call, noted, session)

    program = StepInvariants.program

    def launched(self: Any) -> Callable[[], None]:
        """While it is captured nothing is launched."""
        compute, times = program(self), itertools.count()
        return lambda: compute() if next(times) else None

    def captured_calls(memory: Any, run: Callable[[], Any], **given: Any) -> Any:
        graph, result = capture_calls(memory, run, **given)
        if graph.again is nothing:
            graph.again = run
        return graph, result

    patch.setattr(step_graphs.StepGraphs, "_capture", captured)
    patch.setattr(step_graphs, "captured", captured_calls)
    patch.setattr(StepInvariants, "program", launched)


def _containers(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_containers, value))
    return {key: _containers(inner) for key, inner in value.items()} if isinstance(value, dict) else value
