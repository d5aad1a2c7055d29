# SPDX-License-Identifier: Apache-2.0
"""GELU by a sigmoid, by its tail and in the product before it is as near to the truth as torch's."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from probe import Probe, block_of
from torch.nn import functional

from nexfort_engine.passes.gelu import by_sigmoid, by_tail, gelus
from nexfort_engine.passes.linear_gelu import linear_gelus


@settings(max_examples=80)
@given(
    st.floats(-40, 40),
    st.floats(1e-3, 20),
    st.integers(0, 2**16),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_gelu_by_a_sigmoid_is_as_near_to_the_truth_as_torch_s(
    middle: float, spread: float, seed: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(64, generator=torch.Generator().manual_seed(seed)) * spread + middle).to(dtype)
    truth = functional.gelu(x.double(), approximate="tanh")
    found, theirs = by_sigmoid(x, like=x), functional.gelu(x, approximate="tanh")
    assert found.dtype == dtype
    # the truth, too, loses what is far below zero: (1 + tanh) / 2 in float64
    slack = 1e-15 * x.double().abs().max() + 3e-7 * truth.norm() * (dtype == torch.float32)
    assert (found.double() - truth).norm() <= 1.1 * (theirs.double() - truth).norm() + slack


def test_a_product_computes_gelu_where_it_stays_in_16_bits_on_a_gpu_and_a_product_reads_it() -> None:
    from gpu_blocks import captured

    graph = captured("gelus").graph
    assert linear_gelus(graph) == 1 and linear_gelus(graph) == 0
    graph.graph.lint()
    left = [node for node in graph.graph.nodes if node.target is torch.ops.aten.gelu.default]
    assert len(left) == 1 and next(iter(left[0].users)).target is torch.ops.aten.mul.Tensor
    on_cpu = block_of(lambda b, h: b.linear(functional.gelu(b.linear(h), approximate="tanh")))
    assert linear_gelus(Probe(on_cpu, torch.randn(2, 5, 8)).captured.graph) == 0


def test_only_the_tanh_form_is_rewritten_in_32_bits() -> None:
    block = block_of(lambda b, h: functional.gelu(h, approximate="tanh") + functional.gelu(h))
    probe = Probe(block, torch.randn(2, 9, 8))
    wanted = probe.captured.graph(torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1)))
    assert gelus(probe.captured.graph) == 1 and gelus(probe.captured.graph) == 0
    probe.captured.graph.recompile()
    found = probe.captured.graph(torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1)))
    assert torch.allclose(found[0], wanted[0], atol=1e-6)


@settings(max_examples=80)
@given(
    st.floats(-40, 40),
    st.floats(1e-3, 20),
    st.integers(0, 2**16),
    st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_gelu_by_its_tail_is_as_near_to_the_truth_as_torch_s(
    middle: float, spread: float, seed: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(64, generator=torch.Generator().manual_seed(seed)) * spread + middle).to(dtype)
    truth = functional.gelu(x.double())
    found, theirs = by_tail(x, like=x), functional.gelu(x)
    assert found.dtype == dtype
    slack = 1e-7 * x.double().abs().max() + 3e-8 * x.numel() ** 0.5  # the formula's, and half of fp16's least number
    assert (found.double() - truth).norm() <= 1.1 * (theirs.double() - truth).norm() + slack


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gelu_by_its_tail_at_every_number(dtype: torch.dtype) -> None:
    """Infinities and what is no number too."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    truth, found, theirs = functional.gelu(x.double()), by_tail(x, like=x), functional.gelu(x)
    ends = x.isinf()
    assert torch.equal(found.isnan()[~ends], x.isnan()[~ends])
    assert found[ends].double().equal(torch.where(x[ends] > 0, torch.inf, 0.0).double())
    finite = x.isfinite()
    theirs_apart, apart = ((one.double() - truth)[finite].abs() for one in (theirs, found))
    assert (apart <= theirs_apart + torch.finfo(dtype).eps * truth[finite].abs() + 5e-7).all()


def test_both_forms_are_rewritten_in_16_bits() -> None:
    block = block_of(lambda b, h: functional.gelu(h, approximate="tanh") + functional.gelu(h).float())
    graph = Probe(block, torch.randn(2, 9, 8).bfloat16()).captured.graph
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = graph(x)
    assert gelus(graph) == 2 and gelus(graph) == 0
    graph.recompile()
    assert torch.allclose(graph(x)[0], wanted[0], atol=2e-2)
