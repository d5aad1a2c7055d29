# SPDX-License-Identifier: Apache-2.0
"""Convolutions of images that are upsampled to the double take those before; others stay torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probe import Probe, block_of, error
from torch.nn import functional

from nexfort_engine.passes import upsample_conv
from nexfort_engine.passes.upsample import inner_channels, upsamplings
from nexfort_engine.passes.upsample_conv import upsampled_convolutions


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
