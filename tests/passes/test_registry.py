# SPDX-License-Identifier: Apache-2.0
"""Rewritten graphs compute what they computed, as near to the truth as before, and can be stored."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from large_rows import few
from probe import Probe, block_of, error
from torch.nn import functional

from nexfort_engine.graph import const_subgraph
from nexfort_engine.lowering import inductor, loaded_code
from nexfort_engine.modules import channels_last
from nexfort_engine.passes import materialize_broadcast
from nexfort_engine.passes.channels_last_weights import inner_weights
from nexfort_engine.passes.group_norm import by_channels, group_norms
from nexfort_engine.passes.materialize_broadcast import broadcasts
from nexfort_engine.passes.registry import split

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=60)
@given(SIZES, st.sampled_from([3, 4, 5]), st.booleans(), st.booleans(), st.integers(0, 2**16), st.floats(-30, 30))
def test_it_is_as_near_to_the_truth_as_torch_is(
    sizes: tuple[int, ...], dims: int, weighted: bool, biased: bool, seed: int, offset: float
) -> None:
    """Means far from zero too, where a sum of squares would lose the variance."""
    batch, groups, each, height, width = sizes
    channels = groups * each
    generator = torch.Generator().manual_seed(seed)
    shape = (*(batch, channels, height, width, 2)[: dims - 1], 3)
    x = torch.randn(shape, generator=generator) + offset
    weight = torch.randn(channels, generator=generator) if weighted else None
    bias = torch.randn(channels, generator=generator) if biased else None
    wide = [None if t is None else t.double() for t in (weight, bias)]
    truth = torch.nn.functional.group_norm(x.double(), groups, *wide, 1e-3)
    theirs = error(torch.nn.functional.group_norm(x, groups, weight, bias, 1e-3), truth)
    ours = by_channels(x, weight, bias, like=x, groups=groups, eps=1e-3)
    assert ours.dtype == x.dtype and ours.shape == x.shape
    assert error(ours, truth) <= 1.1 * theirs + 2e-6 * (1 + abs(offset))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_it_keeps_the_dtype_and_computes_in_no_less_than_fp32(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(0)) * 3 + 5).to(dtype)
    truth = torch.nn.functional.group_norm(x.double(), 4)
    found = by_channels(x, None, None, like=x, groups=4, eps=1e-5)
    assert found.dtype == dtype
    assert error(found, truth) <= 1.1 * error(torch.nn.functional.group_norm(x, 4), truth) + 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mean", [0.0, 5.0, 100.0])
@pytest.mark.parametrize("away", [0.0, 10.0, 100.0])
@pytest.mark.parametrize("sides", [(32, 32), (256, 256), (5, 7), (1, 300), (300, 1)])
def test_numbers_of_16_bits_that_lie_far_away_lose_nothing(
    dtype: torch.dtype, mean: float, away: float, sides: tuple[int, int]
) -> None:
    """All of them, or one alone, which is among those whose mean they are summed less."""
    x = torch.randn(1, 8, *sides, generator=torch.Generator().manual_seed(0)) + mean
    x[:, :, 0, 0] += away
    x = x.to(dtype)
    truth = torch.nn.functional.group_norm(x.double(), 4)
    for layout in (torch.contiguous_format, torch.channels_last):
        found = by_channels(x.to(memory_format=layout), None, None, like=x, groups=4, eps=1e-5)
        assert error(found, truth) <= 1.1 * error(torch.nn.functional.group_norm(x, 4), truth)


class Normed(torch.nn.Module):
    """Two group norms, one of them where nothing lies behind the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.flat = torch.nn.GroupNorm(4, 16), torch.nn.GroupNorm(2, 16, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.flat(x.mean((2, 3)))[:, :, None, None]


def test_those_with_dimensions_behind_are_rewritten_and_the_graph_can_be_stored(tmp_path: Path) -> None:
    block = Normed().eval().requires_grad_(False)
    x = torch.randn(2, 16, 6, 10)
    probe = Probe(block, x)
    graph = probe.captured.graph
    assert group_norms(graph) == 1
    left = [node for node in graph.graph.nodes if node.target is torch.ops.aten.group_norm.default]
    assert len(left) == 1 and all(node.op != "call_method" for node in graph.graph.nodes)
    inductor.lower_graph(graph, probe.captured.constants, tmp_path / "payload", {"nexfort.group_norm": True})
    code = inductor.load(tmp_path / "payload", {}, [], 2)
    for size in ((2, 16, 6, 10), (1, 16, 3, 5), (3, 16, 9, 4)):
        y = torch.randn(size)
        (found,) = code([block.norm.weight, block.norm.bias, y])
        assert error(found, block(y).double()) < 1e-5, size


def test_one_without_weights_whose_channels_are_free_stays() -> None:
    block = block_of(lambda b, h: torch.nn.functional.group_norm(h, 2) * b.table.sum())
    probe = Probe(block, torch.randn(2, 6, 5, 7))
    assert group_norms(probe.captured.graph) == 0
    probe.agrees(torch.randn(2, 8, 5, 7))


def test_own_switches_are_told_apart() -> None:
    own, inductors = split({"nexfort.group_norm": True, "max_autotune": False})
    assert own == {"group_norm": True} and inductors == {"max_autotune": False}


# ---- gates -------------------------------------------------------------------------------------------------


GATES = {
    "a gate": (lambda b, h, g: h + torch.tanh(g).unsqueeze(1) * h, 1),
    "two of one tensor": (lambda b, h, g: torch.sigmoid(g)[:, None] * h + g.exp()[:, None, :], 2),
    "once more in between": (lambda b, h, g: h * (1 + functional.silu(g).view(-1, 1, 8)), 1),
    "one of the other": (lambda b, h, g: h * torch.sigmoid(torch.tanh(g).exp() + 1).unsqueeze(1), 1),
    "a result too": (lambda b, h, g: (h * (gate := torch.tanh(g)).unsqueeze(1), gate), 1),
    "each row its own": (lambda b, h, g: torch.tanh(h) * g.unsqueeze(1), 0),
    "behind a product": (lambda b, h, g: h + b.linear(functional.silu(g)).unsqueeze(1), 0),
    "an operand": (lambda b, h, g: h @ torch.tanh(g).unsqueeze(2).expand(-1, -1, 600), 0),
    "little to compute": (lambda b, h, g: h * (1 + g).unsqueeze(1), 0),
    "few rows": (lambda b, h, g: h[:, :40] * torch.tanh(g).unsqueeze(1), 0),
    "one number": (lambda b, h, g: h * torch.tanh(g.sum()), 0),
    "in another order": (lambda b, h, g: h * torch.tanh(g.view(-1, 2, 4).mT).mT.view(-1, 1, 8), 0),
}


@pytest.mark.parametrize("kind", few(list(GATES), 5))
def test_what_many_rows_are_multiplied_with_is_computed_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bits at every size, as an artefact too; where it is not computed for many rows it stays."""
    monkeypatch.setattr(materialize_broadcast, "_MANY", 1)
    function, count = GATES[kind]
    probe = Probe(block_of(function), torch.randn(2, 200, 8), torch.randn(2, 8))
    graph, weights = probe.captured.graph, probe.weights
    assert broadcasts(graph) == count and broadcasts(graph) == 0
    graph.graph.lint()
    graph.recompile()
    inductor.lower(probe.captured, tmp_path / "payload", {})
    code = inductor.load(tmp_path / "payload", {}, [], len(weights))
    for batch, rows in ((2, 200), (3, 70), (1, 999)):
        inputs = torch.randn(batch, rows, 8), torch.randn(batch, 8)
        wanted = probe.block(*inputs)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for found, made, right in zip(graph(*weights, *inputs), code([*weights, *inputs]), wanted, strict=True):
            assert torch.equal(found, right) and found.stride() == made.stride() == right.stride()
            assert torch.allclose(made, right, atol=1e-6)


def test_a_launch_for_a_small_tensor_s_rows_is_not_made() -> None:
    block = block_of(GATES["a gate"][0])
    rows = materialize_broadcast._MANY // 16
    assert broadcasts(Probe(block, torch.randn(2, rows - 1, 8), torch.randn(2, 8)).captured.graph) == 0
    assert broadcasts(Probe(block, torch.randn(2, rows, 8), torch.randn(2, 8)).captured.graph) == 1


# ---- weights of convolutions -----------------------------------------------------------------------------------------


class Convolved(torch.nn.Module):
    """Convolutions whose weights are of every kind, one of them used twice; results are looked at and returned."""

    def __init__(self) -> None:
        super().__init__()
        two = torch.nn.Conv2d
        self.wide, self.thin, self.small = two(8, 16, 3, padding=1), two(16, 16, 1), two(16, 2, 3)
        self.tall, self.each, self.line = two(16, 16, (3, 1)), two(16, 16, 3, groups=16), torch.nn.Conv1d(16, 16, 3)
        self.inner = two(16, 16, 3, padding="same").to(memory_format=torch.channels_last)
        self.same, self.back = two(16, 16, 3, padding="same"), torch.nn.ConvTranspose2d(16, 8, 3)
        self.other = torch.nn.Parameter(torch.randn(16, 8, 3, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.inner(self.same(self.same(self.thin(self.wide(x)))))
        more = functional.conv2d(h, self.other.to(torch.float64).to(torch.float32).mT, padding=1, groups=2)
        return (
            h,
            h.view(h.shape[0], 16, -1).sum(2),
            self.back(h),
            self.tall(h),
            self.each(h),
            self.line(h.flatten(2)),
            more,
        )


@pytest.mark.large  # tests/kernels/test_channels_last_weight.py has its numbers
def test_weights_of_convolutions_are_laid_out_by_a_kernel_in_each_call_or_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each; not 1x1, of single channels, in one dimension, small, laid out already, or computed by the block."""
    monkeypatch.setattr(const_subgraph, "LEAST", 500)
    monkeypatch.setattr(channels_last, "_LEAST", 500)
    block = Convolved().eval().requires_grad_(False)
    for copies in (False, True):
        captured = Probe(block, torch.randn(2, 8, 10, 12), images=True).captured
        assert inner_weights(captured.graph) == 4, "wide, same, tall and back"
        taken = const_subgraph.take_out(captured.graph, captured.lasting, copies=copies)
        assert taken is not None and taken.gives == (5 if copies else 1), "one is computed"
    options = {"nexfort.prepare": True, "nexfort.prepare_copies": True}  # the kernel is for a GPU alone
    probe = Probe(block, torch.randn(2, 8, 10, 12), images=True)
    inductor.lower(probe.captured, tmp_path / "payload", options)
    code = inductor.load(tmp_path / "payload", options, [], len(probe.weights))
    assert isinstance(code, loaded_code.PreparingCode)
    weights = probe.weights
    laid = code.prepare(weights)
    assert sorted(tuple(t.shape) for t in laid) == sorted([*[(16, 8, 3, 3)] * 3, (16, 16, 3, 3), (16, 16, 3, 1)])
    assert sum(t.is_contiguous(memory_format=torch.channels_last) for t in laid) == 4
    for sizes in ((2, 8, 10, 12), (1, 8, 7, 5), (3, 8, 16, 16)):
        x = torch.randn(sizes)
        for result, wanted in zip(code.run([*weights, x], laid), block(x), strict=True):
            assert error(result, wanted.double()) < 1e-5
            assert wanted.dim() != 4 or result.is_contiguous(memory_format=torch.channels_last)
