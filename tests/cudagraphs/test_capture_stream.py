# SPDX-License-Identifier: Apache-2.0
"""Steps that cannot be captured on torch's stream: on the CPU, with graphs and streams that are pretended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_graph import Graph, _Memory, pretend
from test_invariant_cache import Steps, joined
from torch import nn

import nexfort_engine
from nexfort_engine.cache.store import Store
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.cudagraphs import step_graphs

pytestmark = pytest.mark.usefixtures("artefact_cache")


class Streams:
    """Which stream code runs on, whether that is captured, and what a library keeps for each stream."""

    def __init__(self) -> None:
        self.now, self.capturing = "default", False
        self.kept: dict[str, torch.Tensor] = {}
        self.made = 0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Twice x, by way of memory that is kept for the stream, and made anew where more of it is needed."""
        held = self.kept.get(self.now)
        if held is None or held.numel() < x.numel():
            if self.capturing:
                raise RuntimeError("no memory can be allocated in a capture")
            if held is not None:
                held.fill_(float("nan"))  # whoever still reads it is wrong
            held = self.kept[self.now] = torch.zeros(x.numel())
        part = held[: x.numel()].view(x.shape)
        part.copy_(x)
        return part * 2

    def stream(self, _device: torch.device) -> Any:
        self.made += 1
        return Stream(self, f"own {self.made}")


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self.stream = streams, name

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with _set(self._streams, now=self.stream):
            yield


@contextlib.contextmanager
def _set(streams: Streams, **values: Any) -> Iterator[None]:
    before = {name: getattr(streams, name) for name in values}
    vars(streams).update(values)
    try:
        yield
    finally:
        vars(streams).update(before)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Network(nn.Module):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Plain() for _ in range(2))
        self.__dict__["scaled"] = streams.scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.scaled(x)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    pretend(monkeypatch)
    streams = Streams()

    @contextlib.contextmanager
    def captured(self: Any, graph: Graph, stream: Any = None) -> Iterator[None]:
        with _set(streams, now=stream or "torch's", capturing=True):
            yield

    monkeypatch.setattr(_Memory, "captured", captured)
    monkeypatch.setattr(step_graphs, "capture_stream", streams.stream)
    return streams


def test_a_step_runs_on_a_stream_of_its_own_before_it_is_captured_there(streams: Streams) -> None:
    torch.manual_seed(0)
    network = Network(streams).eval().requires_grad_(False)
    compiled = nexfort_engine.compile(network)
    graphs = compiled._nexfort_engine.graphs
    captures: list[int] = []
    with torch.inference_mode():
        for tokens in (6, 12, 6, 24, 12, 6):
            for seed in range(5):
                x = torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(seed))
                wanted = network(x).clone()
                assert torch.allclose(compiled(x), wanted, atol=1e-6), (tokens, seed)
            captures.append(len(Graph.made))
            assert [step for step in graphs._steps.values() if step.graph is not None]
    assert streams.made == 1 and streams.kept.keys() == {"default", "own 1"}
    # a failed capture and one on the own stream; one a new size; again where a new size ran on the stream since
    assert captures == [2, 3, 4, 5, 6, 7]
    assert not [note for note in compiled.report.as_dict()["notes"] if "no CUDA graph" in note]


def test_what_is_made_of_a_prompt_is_made_for_the_graph_that_is_captured_there(
    streams: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(prompt: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        streams.scaled(x)
        return joined(prompt, x)

    lowering = CompileConfig.lowering_options
    monkeypatch.setattr(  # as on a GPU
        CompileConfig,
        "lowering_options",
        lambda self, device: {**lowering(self, device), "nexfort.prompt_once": self.prompt_once},
    )
    step = Steps(Store(tmp_path), own)
    for prompt, tokens in ((1, 6), (2, 6), (1, 12), (2, 6)):
        for _ in range(5):
            step(prompt, tokens=tokens)
        assert step.kept() and min(step.kept()) > 0, (prompt, tokens)
    assert streams.made == 1 and "no CUDA graph" not in step.notes()


def test_what_fails_there_as_well_is_told_once(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(streams).eval().requires_grad_(False)

    def waits(x: torch.Tensor) -> torch.Tensor:
        if streams.capturing:
            raise RuntimeError("it waits for the GPU")
        return x * 2

    network.__dict__["scaled"] = waits
    compiled = nexfort_engine.compile(network)
    with torch.inference_mode():
        for seed in range(6):
            x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(seed))
            assert torch.allclose(compiled(x), network(x), atol=1e-6)
    notes = [note for note in compiled.report.as_dict()["notes"] if "no CUDA graph" in note]
    assert notes == ["no CUDA graph: capturing it failed: RuntimeError: it waits for the GPU"]
    assert len(Graph.made) == 2 and streams.made == 1
