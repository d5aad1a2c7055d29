# SPDX-License-Identifier: Apache-2.0
"""Code that writes where an image lies with channels outermost is noticed, whichever way it comes to look at it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nexfort_engine.modules import channels_last
from nexfort_engine.modules.layout_checks import LooksNoticed


def image() -> torch.Tensor:
    """One that lies with channels innermost."""
    return torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.contiguous().add_(1),
        lambda x: x.flatten(1).add_(1),
        lambda x: x.mT.contiguous().add_(1),
        lambda x: x.mT.reshape(1, -1).add_(1),
        lambda x: torch.add(x, 1, out=x.contiguous()),
    ],
)
def test_a_write_to_a_look_is_an_error(
    write: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_last, "MEASURED", ("cpu",))
    given = image()
    with pytest.raises(RuntimeError, match="takes for contiguous"), LooksNoticed():
        write(given)


def test_what_writes_to_the_image_or_reads_a_look_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "MEASURED", ("cpu",))
    with LooksNoticed() as looks:
        x = image()
        assert x.shape[1] == 3 and x.mT.shape == (2, 3, 5, 4)
        x.add_(1)
        (x.contiguous() + 1).mul_(2)
    assert looks.any
