# SPDX-License-Identifier: Apache-2.0
"""Rewritten graphs compute what they computed, as near to the truth as before, and can be stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from probe import Probe, block_of
from torch.nn import functional

from nexfort_engine.graph import const_subgraph
from nexfort_engine.lowering import inductor as lower
from nexfort_engine.lowering import loaded_code
from nexfort_engine.modules import channels_last as images
from nexfort_engine.passes import materialize_broadcast, upsample_conv
from nexfort_engine.passes.channels_last_weights import inner_weights
from nexfort_engine.passes.gelu import by_sigmoid, by_tail, gelus
from nexfort_engine.passes.group_norm import by_channels, group_norms
from nexfort_engine.passes.linear_gelu import linear_gelus
from nexfort_engine.passes.materialize_broadcast import broadcasts
from nexfort_engine.passes.registry import split
from nexfort_engine.passes.upsample import inner_channels, upsamplings
from nexfort_engine.passes.upsample_conv import upsampled_convolutions

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm().clamp_min(1e-12))


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
    lower.lower_graph(graph, probe.captured.constants, tmp_path / "payload", {"nexfort.group_norm": True})
    code = lower.load(tmp_path / "payload", {}, [], 2)
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


# ---- upsampling ------------------------------------------------------------------------------------------------------


class Larger(torch.nn.Module):
    """Upsampling by a factor, to twice the size, and to a size that the call names; in one, two or three dimensions."""

    def forward(self, x: torch.Tensor, line: torch.Tensor, film: torch.Tensor, height: int, width: int) -> list[Any]:
        resized = functional.interpolate
        return [
            resized(x, scale_factor=2.0, mode="nearest"),
            resized(x, scale_factor=(4.0, 1.0), mode="nearest"),
            resized(x, size=(x.shape[2] * 2, x.shape[3] * 2), mode="nearest"),
            resized(x, size=(height, width), mode="nearest"),
            resized(x, scale_factor=3.0, mode="nearest"),
            resized(line, scale_factor=8.0, mode="nearest"),
            resized(film, scale_factor=(1.0, 2.0, 2.0), mode="nearest"),
        ]


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_upsampling_gives_the_same_bits_at_every_size(tmp_path: Path, format: torch.memory_format) -> None:
    def inputs(height: int, width: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(2, 4, height, width).contiguous(memory_format=format)
        return x, torch.randn(2, 3, height), torch.randn(1, 2, 3, height, width)

    block = Larger()
    probe = Probe(block, *inputs(6, 5), 11, 10)
    graph = probe.captured.graph
    assert upsamplings(graph) == 6, "all but the one by a factor that float32 has no exact inverse of"
    lower.lower_graph(graph, probe.captured.constants, tmp_path / "payload", {})
    code = lower.load(tmp_path / "payload", {}, [], 0)
    for height, width, to in ((6, 5, (11, 10)), (7, 9, (13, 18)), (33, 2, (100, 3)), (64, 64, (127, 128))):
        given = inputs(height, width)
        wanted = block(*given, *to)
        found = code([*given, *to])
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


class Enlarged(torch.nn.Module):
    """Upsampled for a convolution, for something else too, and not before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 6, 3, padding=1)

    def forward(self, x: torch.Tensor, height: int, width: int) -> list[Any]:
        alone = functional.interpolate(x, size=(height, width), mode="nearest")
        shared = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        return [self.conv(alone), self.conv(shared), shared.sin()]


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_channels_come_innermost_before_what_only_a_convolution_reads(
    tmp_path: Path, format: torch.memory_format
) -> None:
    block = Enlarged().eval().requires_grad_(False)
    x = torch.randn(2, 4, 6, 5).contiguous(memory_format=format)
    probe = Probe(block, x, 11, 10)
    graph = probe.captured.graph
    assert inner_channels(graph) == (format == torch.contiguous_format) and inner_channels(graph) == 0
    assert upsamplings(graph) == 2
    lower.lower_graph(graph, probe.captured.constants, tmp_path / "payload", {})
    code = lower.load(tmp_path / "payload", {}, [], 2)
    for height, width, to in ((6, 5, (11, 10)), (7, 9, (14, 18))):
        y = torch.randn(2, 4, height, width).contiguous(memory_format=format)
        for one, other in zip(code([block.conv.weight, block.conv.bias, y, *to]), block(y, *to), strict=True):
            assert error(one, other.double()) < 1e-6 and one.stride() == other.stride()


class Doubled(torch.nn.Module):
    """Convolutions of upsampled images: of the double, of a size that the call names, and of what others read too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(64, 128, 3, padding=1)
        self.plain = torch.nn.Conv2d(64, 128, 3, padding="same", bias=False)
        self.strided = torch.nn.Conv2d(64, 128, 3, stride=2, padding=1)
        self.grouped = torch.nn.Conv2d(64, 128, 3, padding=1, groups=2)
        self.narrow = torch.nn.Conv2d(64, 24, 3, padding=1)

    def forward(self, x: torch.Tensor, height: int, width: int) -> list[Any]:
        double = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        asked = functional.interpolate(x, size=(height, width), mode="nearest")
        others = [functional.interpolate(x, scale_factor=2.0, mode="nearest") for _ in range(4)]
        found = [self.conv(double), self.plain(asked), self.strided(others[0]), self.grouped(others[1])]
        return [*found, self.narrow(others[2]), self.conv(others[3]), others[3].sin()]


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upsampled images are convolved on any device and in any dtype."""
    monkeypatch.setattr(upsample_conv, "_DEVICE", "cpu")
    monkeypatch.setattr(upsample_conv, "DTYPES", (torch.float32,))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_of_doubled_images_take_those_before_at_every_size(
    format: torch.memory_format,
) -> None:
    """In graphs where images are laid out, alone: the same numbers by plain torch, which runs here."""
    torch.manual_seed(0)
    block = Doubled().eval().requires_grad_(False)

    def image(height: int, width: int) -> torch.Tensor:
        return torch.randn(2, 64, height, width).contiguous(memory_format=format)

    probe = Probe(block, image(6, 5), 12, 10)
    graph = probe.captured.graph
    inner_channels(graph)  # lays images out before those that only convolutions read
    assert upsampled_convolutions(graph) == 2 and upsampled_convolutions(graph) == 0
    graph.recompile()
    for height, width, to in ((6, 5, (12, 10)), (7, 9, (14, 18)), (4, 4, (7, 8)), (3, 8, (11, 5)), (1, 1, (2, 2))):
        given = image(height, width)
        found = graph(*probe.weights, given, *to)
        for one, other in zip(found, block(given, *to), strict=True):
            assert one.shape == other.shape and error(one, other.double()) < 1e-6


@pytest.mark.usefixtures("anywhere")
def test_an_image_that_is_written_to_before_it_is_convolved_is_upsampled_where_it_was() -> None:
    conv = torch.nn.Conv2d(64, 128, 3, padding=1)

    def changed(block: Any, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        double = functional.interpolate(y, scale_factor=2.0, mode="nearest")
        y.mul_(2)
        return block.conv(double)

    x = torch.randn(2, 64, 6, 5).contiguous(memory_format=torch.channels_last)
    graph = Probe(block_of(changed, conv=conv), x).captured.graph
    assert upsampled_convolutions(graph) == 0


@pytest.mark.usefixtures("anywhere")
def test_factors_by_which_a_size_becomes_the_double_and_a_bit_leave_torchs() -> None:
    """Which takes the places from the factor: 2.01 times 40 are 80 pixels, and the last is not that before."""
    conv = torch.nn.Conv2d(64, 128, 3, padding=1)
    function = lambda b, x: b.conv(functional.interpolate(x, scale_factor=2.01, mode="nearest"))  # noqa: E731
    graph = Probe(block_of(function, conv=conv), torch.randn(1, 64, 40, 40), dynamic=False).captured.graph
    inner_channels(graph)
    assert upsampled_convolutions(graph) == 0 and upsamplings(graph) == 0


@pytest.mark.usefixtures("anywhere")
def test_the_sizes_of_a_call_that_is_no_double_leave_torchs() -> None:
    block = Doubled().eval().requires_grad_(False)
    graph = Probe(block, torch.randn(2, 64, 6, 5), 13, 10).captured.graph
    inner_channels(graph)
    assert upsampled_convolutions(graph) == 1, "that by a factor"


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


@pytest.mark.parametrize("kind", GATES)
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
    lower.lower(probe.captured, tmp_path / "payload", {})
    code = lower.load(tmp_path / "payload", {}, [], len(weights))
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


# ---- GELU --------------------------------------------------------------------------------------------------


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


def test_weights_of_convolutions_are_laid_out_by_a_kernel_in_each_call_or_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each; not 1x1, of single channels, in one dimension, small, laid out already, or computed by the block."""
    monkeypatch.setattr(const_subgraph, "LEAST", 500)
    monkeypatch.setattr(images, "_LEAST", 500)
    block = Convolved().eval().requires_grad_(False)
    for copies in (False, True):
        captured = Probe(block, torch.randn(2, 8, 10, 12), images=True).captured
        assert inner_weights(captured.graph) == 4, "wide, same, tall and back"
        taken = const_subgraph.take_out(captured.graph, captured.lasting, copies=copies)
        assert taken is not None and taken.gives == (5 if copies else 1), "one is computed"
    options = {"nexfort.prepare": True, "nexfort.prepare_copies": True}  # the kernel is for a GPU alone
    probe = Probe(block, torch.randn(2, 8, 10, 12), images=True)
    lower.lower(probe.captured, tmp_path / "payload", options)
    code = lower.load(tmp_path / "payload", options, [], len(probe.weights))
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
