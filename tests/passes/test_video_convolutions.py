# SPDX-License-Identifier: Apache-2.0
"""Convolutions of videos with channels innermost: as near to the truth, laid out as before, and in few kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from gpu_video_blocks import VIDEOS
from hypothesis import given, settings
from lowering_ahead import code_of, lowered_ahead
from probe import Probe, check_near
from torch import nn
from torch.nn import functional

from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.kernels.conv3d.op import convolve, operator
from nexfort_engine.lowering import inductor
from nexfort_engine.passes.video_convolutions import convolved, video_convolutions

T = torch.Tensor
HALF = torch.bfloat16


class Block(nn.Module):
    """Convolutions that are laid out, and what reads their results in other ways."""

    def __init__(self, dtype: torch.dtype = HALF) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv3d(16, 24, 3, padding=(0, 1, 1), stride=(1, 2, 1))
        self.plain = nn.Conv3d(24, 16, (3, 1, 1), bias=False)
        self.point = nn.Conv3d(16, 16, 1)
        self.few = nn.Conv3d(16, 3, 3, padding=1)
        self.groups = nn.Conv3d(16, 16, 3, groups=2, padding=1)
        self.to(dtype).eval().requires_grad_(False)

    def forward(self, x: T) -> tuple[T, ...]:
        h = self.plain(functional.silu(self.first(x)))
        batch, channels, frames = h.shape[:3]
        rows = h.view(batch, channels * frames, -1)  # as it lies in memory
        return h, rows.mean(2), self.few(h) + self.groups(h)[:, :3], self.point(h), h[:, :, -2:]


def clip(frames: int = 9, height: int = 8, width: int = 5, seed: int = 0, dtype: torch.dtype = HALF) -> T:
    return torch.randn(1, 16, frames, height, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_results_are_as_near_and_lie_as_before(tmp_path: Path) -> None:
    block, exact = Block(), Block(torch.float64)
    probe = Probe(block, clip())
    graph, weights = probe.captured.graph, probe.weights
    assert video_convolutions(graph) == 3 and video_convolutions(graph) == 0
    graph.graph.lint()
    graph.recompile()
    inductor.lower(probe.captured, tmp_path / "payload", {})
    lowered = inductor.load(tmp_path / "payload", {}, [], len(weights))
    exact.load_state_dict({name: value.double() for name, value in block.state_dict().items()})
    for seed, sizes in enumerate([(9, 8, 5), (8, 9, 4), (12, 6, 12)]):
        x = clip(*sizes, seed)
        assert probe.refuses(x) is None
        truth, theirs = exact(x.double()), block(x)
        check_near([graph(*weights, x), lowered([*weights, x])], theirs, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_numbers_stay_with_torch(dtype: torch.dtype) -> None:
    probe = Probe(Block(dtype), clip(dtype=dtype))
    assert video_convolutions(probe.captured.graph) == 0


@pytest.mark.parametrize("turned", ["video", "weight", "both"])
def test_a_result_that_lies_with_channels_innermost_still_does(turned: str) -> None:
    inner, block, x = torch.channels_last_3d, Block(), clip()
    block = block.to(memory_format=inner) if turned != "video" else block
    x = x.contiguous(memory_format=inner) if turned != "weight" else x
    probe = Probe(block.first, x)
    assert video_convolutions(probe.captured.graph) == 1
    probe.captured.graph.recompile()
    (found,) = probe.captured.graph(*probe.weights, x)
    wanted = block.first(x)
    assert found.stride() == wanted.stride()
    assert torch.allclose(found.float(), wanted.float(), atol=1e-2)


class Stepping(nn.Module):
    """Its steps depend on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, 3, 3, 3).to(HALF), requires_grad=False)

    def forward(self, x: T) -> T:
        return functional.conv3d(x, self.weight, stride=(1, x.shape[3] - 4, 1))


def test_steps_by_sizes_stay() -> None:
    probe = Probe(Stepping(), clip())
    assert video_convolutions(probe.captured.graph) == 0


@settings(max_examples=30)
@given(
    st.tuples(st.integers(1, 2), st.integers(3, 6), st.integers(3, 7), st.integers(3, 7)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 2)),
    st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 2)),
    st.integers(0, 2**16),
)
def test_the_operator_is_torchs(sizes: Any, kernel: Any, stride: Any, padding: Any, seed: int) -> None:
    """Its fake has the sizes and strides of what it gives."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sizes[0], 3, *sizes[1:], generator=generator)
    weight = torch.randn(5, 3, *kernel, generator=generator)
    wanted = functional.conv3d(x, weight, None, stride, padding)
    operator()
    for inner in (False, True):
        seen = convolved(x, weight, stride, padding, [1, 1, 1], inner=inner)
        assert torch.allclose(seen, wanted, atol=1e-5)
        assert seen.is_contiguous(memory_format=torch.channels_last_3d if inner else torch.contiguous_format)
    turned = [part.permute(0, 2, 3, 4, 1).contiguous() for part in (x, weight)]
    found = convolve(*turned, stride, padding, [1, 1, 1])
    faked = torch.ops.nexfort.conv3d.default(*(part.to("meta") for part in turned), stride, padding, [1, 1, 1])
    assert faked.shape == found.shape and faked.stride() == found.stride()


def test_the_kernel_before_lays_the_input_out(tmp_path: Path) -> None:
    """A block of an autoencoder is two convolutions, two norms, what a norm's result is kept of, and a sum."""
    pytest.importorskip("triton", reason="kernels for a GPU are compiled with Triton")
    if torch.version.cuda is None or torch.cuda.is_available():
        pytest.skip("needs a torch built for CUDA and no GPU: what touches one must fail")
    options = CompileConfig.parse(None).lowering_options("cuda")
    for entry in lowered_ahead(tmp_path, [*VIDEOS], options).values():
        call = code_of(entry).partition("def call(")[2].partition("runner = ")[0]
        assert call.count("torch.ops.nexfort.conv3d.default(") == 2 and "extern_kernels.convolution" not in call
        weights = (" 2592, 96,", " 864, 288,")  # of convolutions, laid out
        large = [line for line in call.splitlines() if ".run(" in line and not any(map(line.__contains__, weights))]
        # two sums, two that are kept, two that are convolved, and one behind; torch 2.15 copies what it joins first
        assert len(large) <= (7 if torch.__version__ < "2.12" else 8)
