# SPDX-License-Identifier: Apache-2.0
"""Casts that several libraries' kernels read parts of: in memory once, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probe import Probe, block_of

from nexfort_engine.passes.hoist_casts import casts_once

T = torch.Tensor
HALF = torch.bfloat16
attend = torch.nn.functional.scaled_dot_product_attention


def heads(x: T) -> T:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def of_parts(self: Any, x: T) -> T:
    q, k, v = x.to(HALF).chunk(3, -1)
    return attend(heads(q), heads(k), heads(v)).to(x.dtype)


def of_a_sum(self: Any, x: T) -> T:
    q, k, v = (x.to(HALF) + self.table[0, :1].to(HALF)).split(8, -1)
    return attend(heads(q), heads(k), heads(v)).to(x.dtype)


def one_is_normed(self: Any, x: T) -> T:
    q, k, v = x.to(HALF).chunk(3, -1)
    return attend(heads(q) * 2, heads(k), heads(v)).to(x.dtype)


def whole(self: Any, x: T) -> T:
    y = heads(x[..., :8].to(HALF))
    return attend(y, y, y).to(x.dtype)


def given_too(self: Any, x: T) -> Any:
    y = x.to(HALF)
    q, k, v = y.chunk(3, -1)
    return attend(heads(q), heads(k), heads(v)), y


def written_in_between(self: Any, x: T) -> T:
    y = x * 2
    view, cast = y[..., :8], y.to(x.dtype)  # which is the same tensor
    view.mul_(3)
    q, k, v = cast.chunk(3, -1)
    return attend(heads(q), heads(k), heads(v))


def in_place(self: Any, x: T) -> T:
    y = x * 2
    view = y[..., :8]
    q, k, v = y.add_(1).chunk(3, -1)
    view.mul_(3)
    return attend(heads(q), heads(k), heads(v))


def no_cast(self: Any, x: T) -> T:
    q, k, v = x.chunk(3, -1)
    return attend(heads(q), heads(k), heads(v))


@pytest.mark.parametrize(
    ("function", "found"),
    [
        *((of_parts, 1), (of_a_sum, 1), (one_is_normed, 0), (whole, 0)),
        *((given_too, 0), (no_cast, 0), (written_in_between, 0), (in_place, 0)),
    ],
)
def test_what_several_read_parts_of_is_in_memory_once(function: Any, found: int) -> None:
    probe = Probe(block_of(function), torch.randn(2, 5, 24))
    graph = probe.captured.graph
    assert casts_once(graph) == found
    graph.recompile()
    copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert len(copies) == found and all(node.meta["val"].is_contiguous() for node in copies if "val" in node.meta)
    for sizes in ((2, 5, 24), (3, 7, 24)):
        probe.agrees(torch.randn(*sizes))
