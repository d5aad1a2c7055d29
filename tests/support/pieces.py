# SPDX-License-Identifier: Apache-2.0
"""Graphs in pieces, for the tests of what cuts them."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from nexfort_engine.lowering.loaded_code import FoldedCode
from nexfort_engine.lowering.subgraph_dedup import Folded

SIDE = 5  # of the matrices that graphs made by chance are of


def as_code(folded: Folded) -> FoldedCode:
    """The pieces as they are, called as those of an artefact."""
    return FoldedCode(list(folded.pieces), json.loads(json.dumps(folded.as_json())))


def with_numbers(graph: Graph) -> tuple[GraphModule, list[Any]]:
    """A graph of matrices with what its inputs are, and numbers for them."""
    generator = torch.Generator().manual_seed(0)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    numbers = [torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64) / SIDE for _ in places]
    with torch._subclasses.FakeTensorMode(shape_env=ShapeEnv()) as mode:  # without one torch 2.15 stores nothing
        for node, value in zip(places, numbers, strict=True):
            node.meta["val"] = mode.from_tensor(value)
    return GraphModule(nn.Module(), graph), numbers
