# SPDX-License-Identifier: Apache-2.0
"""What Inductor leaves of a lowered graph: all that another process needs to run it."""

from __future__ import annotations

from pathlib import Path

import torch
from pieces import with_numbers
from torch.fx import Graph

from nexfort_engine.lowering import inductor

aten = torch.ops.aten


def graph(*more: torch._ops.OpOverload) -> Graph:
    """The sine of a matrix times itself, and more made of that."""
    made = Graph()
    given = made.placeholder("given")
    found = made.call_function(aten.sin.default, (made.call_function(aten.mm.default, (given, given)),))
    for operator in more:
        found = made.call_function(operator, (made.call_function(aten.mm.default, (found, given)),))
    made.output((found,))
    return made


def test_each_artefact_has_the_libraries_of_its_kernels(tmp_path: Path) -> None:
    """Also those that another graph of the same process has: whoever loads it must not need a compiler."""
    payloads = [tmp_path / "one", tmp_path / "other"]
    for payload, made in zip(payloads, (graph(), graph(aten.cos.default)), strict=True):
        payload.mkdir()
        inductor.lower_graph(with_numbers(made)[0], [], payload, {})
    sources = [{file.stem for file in payload.rglob("*.main.cpp")} for payload in payloads]
    assert set.intersection(*sources), "they share a kernel"
    assert [{file.stem for file in payload.rglob("*.main.so")} for payload in payloads] == sources
