# SPDX-License-Identifier: Apache-2.0
"""Metadata that is kept from the trace: it is what Inductor's own run of the graph would give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_blocks
import pytest
import torch
from large_rows import few

from nexfort_engine.lowering import inductor, traced_metadata, worker
from nexfort_engine.system import process_settings

ALL = [
    *(*gpu_blocks.BLOCKS, *gpu_blocks.INNERMOST, *gpu_blocks.FROZEN, *gpu_blocks.UPSAMPLED),
    *(*gpu_blocks.CONVOLVED, *gpu_blocks.TURNED, *gpu_blocks.JOINED, *gpu_blocks.PROMPTED, *gpu_blocks.GATED),
    *(*gpu_blocks.PAYING, *gpu_blocks.COMPUTED, *gpu_blocks.STACKS),
]


class Seen(BaseException):  # which Inductor leaves as it is
    """Nothing more is needed of a lowering."""


def told(value: Any) -> Any:
    """Metadata as text, sizes by their expressions."""
    if isinstance(value, (list, tuple)):
        return [told(one) for one in value]
    if isinstance(value, torch.Tensor):
        numbers = (*value.shape, *value.stride(), value.storage_offset())
        return str(numbers), str(value.dtype), str(value.device)
    return str(value)


def shared(graph: torch.fx.GraphModule) -> list[list[str]]:
    """The nodes whose tensors are in one memory."""
    found: dict[int, list[str]] = {}
    for node in graph.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            found.setdefault(value.untyped_storage()._cdata, []).append(node.name)
    return sorted(found.values())


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Lowering stops after both ways of one graph were compared. A row for each: nodes computed, and all."""
    from torch._inductor import compile_fx

    whole, rows, runs = compile_fx.fake_tensor_prop, list[tuple[int, int]](), list[Any]()
    begin = traced_metadata._Propagation.__init__

    def noted(self: Any, *given: Any) -> None:
        begin(self, *given)
        runs.append(self)

    monkeypatch.setattr(traced_metadata._Propagation, "__init__", noted)

    record = compile_fx._recursive_record_original_output_strides

    def stop(graph: torch.fx.GraphModule) -> None:
        if not runs:  # torch 2.15 records strides before its joint passes too
            return record(graph)
        nodes = [node for node in graph.graph.nodes if node.op != "output"]
        found, memory = [told(node.meta.get("val")) for node in nodes], shared(graph)
        inputs = [node.meta["val"] for node in nodes if node.op == "placeholder"]
        whole(graph, inputs)
        assert found == [told(node.meta.get("val")) for node in nodes]
        assert memory == shared(graph)
        rows.append((runs[-1].computed, sum(node.op == "call_function" for node in nodes)))
        raise Seen

    monkeypatch.setattr(compile_fx, "_recursive_record_original_output_strides", stop)
    return rows


def lowered(captured: Any, folder: Path, options: dict[str, object]) -> None:
    with process_settings.without_device(), pytest.raises(Seen):
        graph, constants, lasting = worker.unpack(worker.pack(captured))  # as it comes to a worker
        inductor.lower_graph(graph, constants, folder, options, lasting)


@pytest.mark.parametrize("kind", few(ALL, ["residual", "wide", "turned_rows"]))
def test_it_is_what_a_run_of_the_whole_graph_gives(kind: str, compared: list[tuple[int, int]], tmp_path: Path) -> None:
    options = {**gpu_blocks.OPTIONS, "nexfort.fold": False}
    (tmp_path / "payload").mkdir()
    lowered(gpu_blocks.captured(kind), tmp_path / "payload", options)
    ((computed, nodes),) = compared
    assert computed <= nodes // 4, (computed, nodes)
