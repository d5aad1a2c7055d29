# SPDX-License-Identifier: Apache-2.0
"""Memory formats: which are told apart, and in which one images are given to artefacts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nexfort_engine.formats import Formats, format_of

LAST = torch.channels_last


def test_only_memory_formats_that_code_is_made_for_are_told_apart() -> None:
    image, flat = torch.randn(2, 8, 4, 4), torch.randn(2, 3)
    last = image.to(memory_format=LAST)
    assert (format_of(image), format_of(last)) == ("c", "l")
    assert format_of(torch.randn(2, 8, 3, 4, 4).to(memory_format=torch.channels_last_3d)) == "l"
    assert format_of(image.permute(0, 2, 3, 1)) == format_of(flat.t()) == "c"
    assert format_of(torch.randn(2, 1, 4, 4).to(memory_format=LAST)) == "c", "it is both"
    plain = Formats(nn.Linear(3, 3), lambda _: True)
    assert plain.laid(last) is last and plain.laid(image) is image
    assert plain.laid(flat.t()).is_contiguous() and torch.equal(plain.laid(flat.t()), flat.t())


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 4, 3), nn.ConvTranspose2d(8, 4, 3), nn.GroupNorm(2, 8)])
def test_images_are_always_given_with_channels_innermost(layer: nn.Module) -> None:
    """In whichever order eager code left them, and where a size of 1 lets both orders be."""
    formats = Formats(nn.Sequential(layer), lambda where: where == "cpu")
    image = torch.randn(2, 8, 4, 4)
    for given in (image, image.to(memory_format=LAST), image[:, :, :1, :1], image.transpose(2, 3)):
        laid = formats.laid(given)
        assert formats.of(given) == "l" and laid.is_contiguous(memory_format=LAST) and torch.equal(laid, given)
    last = image.to(memory_format=LAST)
    assert formats.laid(last) is last
    for other in (torch.randn(2, 4, 8, 8), torch.randn(2, 8, 4), torch.randn(2, 8, 4, 4, 4), image.to("meta")):
        assert formats.of(other) == "c", "what no layer takes, and where images lie as they are"
