# SPDX-License-Identifier: Apache-2.0
"""Convolutions over frames as those of images: as near to the truth, laid out as before, where it is faster alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from probe import Probe, check_near
from torch import nn
from torch.nn import functional

from nexfort_engine.kernels.conv3d.op import operator
from nexfort_engine.lowering import inductor
from nexfort_engine.passes.joined_frames import as_images, joined, joined_frames
from nexfort_engine.passes.video_convolutions import convolved, video_convolutions

T = torch.Tensor
HALF = torch.bfloat16


class Frames(nn.Module):
    """A convolution over frames, and what reads its result in other ways."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.conv = convolution

    def forward(self, x: T) -> tuple[T, ...]:
        h = self.conv(functional.silu(x))
        return h, h[:, :, -1:], h.flatten(2).mean(2)


def frames(*given: Any, dtype: torch.dtype = HALF, **named: Any) -> Frames:
    torch.manual_seed(0)
    return Frames(nn.Conv3d(*given, **named)).to(dtype).eval().requires_grad_(False)


def clip(channels: int = 16, sizes: tuple[int, ...] = (5, 6, 7), seed: int = 0, dtype: torch.dtype = HALF) -> T:
    return torch.randn(2, channels, *sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_results_are_as_near_and_lie_as_before(bias: bool, layout: torch.memory_format, tmp_path: Path) -> None:
    given = {"padding": (0, 1, 1), "stride": (1, 2, 1), "bias": bias}
    block, exact = frames(16, 24, 3, **given), frames(16, 24, 3, dtype=torch.float64, **given)
    exact.load_state_dict({name: value.double() for name, value in block.state_dict().items()})
    probe = Probe(block, clip().contiguous(memory_format=layout))
    graph, weights = probe.captured.graph, probe.weights
    assert joined_frames(graph) == 1 and joined_frames(graph) == 0 and video_convolutions(graph) == 1
    graph.graph.lint()
    graph.recompile()
    inductor.lower(probe.captured, tmp_path / "payload", {})
    lowered = inductor.load(tmp_path / "payload", {}, [], len(weights))
    for seed, sizes in enumerate([(5, 6, 7), (3, 8, 5), (9, 5, 5)]):
        x = clip(sizes=sizes, seed=seed).contiguous(memory_format=layout)
        assert probe.refuses(x) is None
        truth, theirs = exact(x.double()), block(x)
        check_near([graph(*weights, x), lowered([*weights, x])], theirs, truth)


@pytest.mark.parametrize(
    "block",
    [
        frames(64, 16, 3),
        frames(16, 3, 3),
        frames(16, 16, (1, 3, 3)),
        frames(16, 16, (3, 1, 1)),
        frames(16, 16, 3, padding=1),
        frames(16, 16, 3, stride=(2, 1, 1)),
        frames(16, 16, 3, dilation=(2, 1, 1)),
        frames(16, 16, 3, groups=2),
        frames(8, 16, 3),
        frames(16, 16, 3, dtype=torch.float32),
    ],
    ids=["of 64", "to 3", "one frame", "one place", "padded", "every other", "apart", "groups", "few", "in full"],
)
def test_others_are_as_fast_as_they_are(block: Frames) -> None:
    weight = block.conv.weight
    channels = weight.shape[1] * block.conv.groups
    assert joined_frames(Probe(block, clip(channels, dtype=weight.dtype)).captured.graph) == 0


@settings(max_examples=30)
@given(
    st.tuples(st.integers(1, 2), st.integers(3, 6), st.integers(3, 6), st.integers(3, 6)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 2)),
    st.tuples(st.integers(0, 2), st.integers(0, 1)),
    st.integers(0, 2**16),
)
def test_joined_they_give_what_torch_gives(sizes: Any, kernel: Any, stride: Any, padding: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sizes[0], 3, *sizes[1:], generator=generator)
    weight = torch.randn(5, 3, *kernel, generator=generator)
    operator()
    images, places = joined(x, kernel[0]), as_images(weight)
    assert images.is_contiguous(memory_format=torch.channels_last_3d)
    found = convolved(images, places, [1, *stride], [0, *padding], [1, 1, 1])
    assert torch.allclose(found, functional.conv3d(x, weight, None, (1, *stride), (0, *padding)), atol=1e-5)
