# SPDX-License-Identifier: Apache-2.0
"""The clock of benchmarks.dispatch_cost counts what is slow where it is slow, and leaves the engine as it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backbones import Tiny, make
from subjects import ask_instead

import nexfort_engine
from benchmarks import dispatch_cost
from benchmarks.dispatch_cost import Clock

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
SLOW = 0.02  # seconds; what is not slowed takes a hundredth of it
STEPS = 3


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Tiny, Any]]:
    """A network of five blocks of one kind, and its compiled self after a first call."""
    tiny = make("torch_dit", depth=5)
    compiled = nexfort_engine.compile(tiny.module)
    run(tiny, compiled)
    assert not compiled.report.as_dict()["eager"]
    yield tiny, compiled


def run(tiny: Tiny, module: Any, steps: int = 1) -> torch.Tensor:
    args, kwargs = tiny.make_inputs()
    with torch.inference_mode():
        return [module(*args, **kwargs) for _ in range(steps)][-1]


def timed(network: tuple[Tiny, Any], still: bool = False) -> dict[str, float]:
    """The figures of the blocks of five, in microseconds."""
    tiny, compiled = network
    engine = compiled._nexfort_engine
    clock = Clock(engine, still=still)
    with clock.on():
        run(tiny, compiled, STEPS)
    assert len(clock.steps) == STEPS and set(clock.calls) == {region.kind for region in engine.regions}
    assert len(clock.calls["_DiTBlock"]) == 5 * STEPS
    found = dispatch_cost.rows(clock, clock, len(engine.regions))
    assert [row["calls"] for row in found if row["kind"] == "all regions"] == [sum(map(len, clock.calls.values()))]
    return next(row for row in found if row["kind"] == "_DiTBlock")


def slowed(call: Any) -> Any:
    def slow(*args: Any) -> Any:
        time.sleep(SLOW)
        return call(*args)

    return slow


def test_time_is_counted_where_it_is_spent(network: tuple[Tiny, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = network[1]._nexfort_engine
    with monkeypatch.context() as patch:
        ask_instead(patch, engine, cancel=slowed(lambda: None))
        found = timed(network)
        assert found["outside_us"] >= SLOW * 1e6 > 2 * found["wrapper_us"] and found["wrapper_us"] > 0
    with monkeypatch.context() as patch:
        for graph in dispatch_cost._compiled_graphs():
            patch.setattr(graph, "current_callable", slowed(graph.current_callable))
        found = timed(network)
        assert found["code_us"] >= SLOW * 1e6 > 2 * (found["outside_us"] + found["wrapper_us"])
        assert found["outside_us"] > 0
    with monkeypatch.context() as patch:
        for binding in {id(b): b for region in engine.regions for b in region.bindings}.values():
            patch.setattr(binding, "code", slowed(binding.code))
        found = timed(network)
        assert found["wrapper_us"] >= SLOW * 1e6 > 2 * found["outside_us"]


def test_code_that_stands_still_is_called_once_for_a_kind_of_inputs(
    network: tuple[Tiny, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for graph in dispatch_cost._compiled_graphs():
        call = graph.current_callable
        noted = lambda inputs, call=call, graph=graph: called.append(id(graph)) or call(inputs)  # noqa: E731
        monkeypatch.setattr(graph, "current_callable", noted)
    timed(network, still=True)
    assert called and len(set(called)) == len(called)


def test_nothing_of_the_clock_stays(network: tuple[Tiny, Any]) -> None:
    tiny, compiled = network
    graphs = dispatch_cost._compiled_graphs()
    before = [graph.current_callable for graph in graphs]
    timed(network, still=True)
    assert [graph.current_callable for graph in graphs] == before
    theirs, ours = run(tiny, tiny.module), run(tiny, compiled)
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    clock = Clock(compiled._nexfort_engine)
    run(tiny, compiled)
    assert not clock.calls and not clock.steps
