# SPDX-License-Identifier: Apache-2.0
"""Attention of wide heads by products of some queries at a time: as near to the truth as torch's, at any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from gpu_blocks import captured
from hypothesis import given, settings
from torch.nn import functional

from nexfort_engine.passes.wide_attention import PARTS, in_parts, wide_attentions

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 5 * PARTS), st.integers(1, 40))


def apart(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@settings(max_examples=60)
@given(SIZES, st.sampled_from([torch.float16, torch.bfloat16]), st.sampled_from([None, 0.3]), st.integers(0, 2**16))
def test_it_is_as_near_to_the_truth_as_torch_is(
    sizes: tuple[int, ...], dtype: torch.dtype, scale: float | None, seed: int
) -> None:
    """Fewer queries than parts, too, and values of another width."""
    batch, heads, rows, keys = sizes
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, heads, length, width, generator=generator).to(dtype)
        for length, width in ((rows, 32), (keys, 32), (keys, 24))
    )
    truth = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    found = in_parts(q, k, v, like=q, scale=scale)
    assert found.dtype == dtype and found.shape == truth.shape
    # one rounding of the scores' exponentials and one of the result, which torch's kernel has as well
    eps = torch.finfo(dtype).eps
    theirs = apart(functional.scaled_dot_product_attention(q, k, v, scale=scale), truth)
    assert apart(found, truth) <= 1.1 * theirs + eps / 2


def nodes(kind: str) -> Any:
    graph = captured(kind).graph
    return graph, [n for n in graph.graph.nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default]


def test_heads_that_the_fast_kernels_take_stay() -> None:
    assert wide_attentions(nodes("transformer")[0]) == 0


def test_wide_ones_are_written_anew_once() -> None:
    graph, _ = nodes("looking")
    assert wide_attentions(graph) == 1 and wide_attentions(graph) == 0
    graph.graph.lint()
    assert sum(node.target is torch.ops.aten.bmm.dtype for node in graph.graph.nodes) == PARTS


def _masked(node: Any) -> None:
    node.args = (*node.args, node.args[0])


def _causal(node: Any) -> None:
    node.args = (*node.args[:3], None, 0.0, True)


def _shared(node: Any) -> None:
    node.kwargs = {**node.kwargs, "enable_gqa": True}


def _named(node: Any) -> None:
    node.kwargs = {**node.kwargs, "dropout_p": 0.5}


def _double(node: Any) -> None:
    node.args[0].meta["val"] = node.args[0].meta["val"].float()


def _narrow(node: Any) -> None:
    for part in node.args[:3]:
        part.meta["val"] = part.meta["val"][..., :256]


@pytest.mark.parametrize("change", [_masked, _causal, _shared, _named, _double, _narrow])
def test_what_the_products_would_not_compute_stays(change: Callable[[Any], None]) -> None:
    graph, (node,) = nodes("looking")
    change(node)
    assert wide_attentions(graph) == 0
