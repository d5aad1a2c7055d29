# SPDX-License-Identifier: Apache-2.0
"""Nearest-neighbour upsampling gives what it gave, at every size, and can be stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from large_rows import few
from probe import Probe, error
from torch.nn import functional

from nexfort_engine.lowering import inductor
from nexfort_engine.passes.upsample import inner_channels, upsamplings


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
            resized(x, scale_factor=2.0, mode="nearest-exact"),
            resized(film, size=(film.shape[2], height, width), mode="nearest-exact"),
            resized(line, scale_factor=4.0, mode="nearest-exact"),
        ]


@pytest.mark.parametrize("format", few([torch.contiguous_format, torch.channels_last], [torch.channels_last]))
def test_upsampling_gives_the_same_bits_at_every_size(tmp_path: Path, format: torch.memory_format) -> None:
    def inputs(height: int, width: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(2, 4, height, width).contiguous(memory_format=format)
        return x, torch.randn(2, 3, height), torch.randn(1, 2, 3, height, width)

    block = Larger()
    probe = Probe(block, *inputs(6, 5), 11, 10)
    graph = probe.captured.graph
    assert upsamplings(graph) == 8, (
        "all but by a factor that float32 has no exact inverse of, and exact ones to any size"
    )
    inductor.lower_graph(graph, probe.captured.constants, tmp_path / "payload", {})
    code = inductor.load(tmp_path / "payload", {}, [], 0)
    for height, width, to in ((6, 5, (11, 10)), (7, 9, (13, 18)), (33, 2, (100, 3)), (64, 64, (127, 128))):
        given = inputs(height, width)
        wanted = block(*given, *to)
        found = code([*given, *to])
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


class WrittenTo(torch.nn.Module):
    """What is upsampled is written to, and read as it was; by a factor of 1 there is nothing to repeat."""

    def forward(self, x: torch.Tensor) -> list[Any]:
        made = []
        for mode in ("nearest", "nearest-exact"):
            same = functional.interpolate(x, scale_factor=1.0, mode=mode)
            line = functional.interpolate(x[..., :1], scale_factor=(1.0, 4.0), mode=mode)
            same.add_(1)
            line[..., :2].mul_(2)
            made += [same + x, line]
        return made


def test_what_is_upsampled_has_memory_of_its_own() -> None:
    probe = Probe(WrittenTo(), torch.randn(2, 4, 6, 5))
    graph = probe.captured.graph
    assert upsamplings(graph) == 4
    graph.recompile()
    assert probe.agrees(torch.randn(2, 4, 6, 5)) and probe.agrees(torch.randn(3, 4, 9, 7))


class Enlarged(torch.nn.Module):
    """Upsampled for a convolution, for something else too, and not before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 6, 3, padding=1)

    def forward(self, x: torch.Tensor, height: int, width: int) -> list[Any]:
        alone = functional.interpolate(x, size=(height, width), mode="nearest")
        shared = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        return [self.conv(alone), self.conv(shared), shared.sin()]


@pytest.mark.parametrize("format", few([torch.contiguous_format, torch.channels_last], [torch.channels_last]))
def test_channels_come_innermost_before_what_only_a_convolution_reads(
    tmp_path: Path, format: torch.memory_format
) -> None:
    block = Enlarged().eval().requires_grad_(False)
    x = torch.randn(2, 4, 6, 5).contiguous(memory_format=format)
    probe = Probe(block, x, 11, 10)
    graph = probe.captured.graph
    assert inner_channels(graph) == (format == torch.contiguous_format) and inner_channels(graph) == 0
    assert upsamplings(graph) == 2
    inductor.lower_graph(graph, probe.captured.constants, tmp_path / "payload", {})
    code = inductor.load(tmp_path / "payload", {}, [], 2)
    for height, width, to in ((6, 5, (11, 10)), (7, 9, (14, 18))):
        y = torch.randn(2, 4, height, width).contiguous(memory_format=format)
        for one, other in zip(code([block.conv.weight, block.conv.bias, y, *to]), block(y, *to), strict=True):
            assert error(one, other.double()) < 1e-6 and one.stride() == other.stride()
