# SPDX-License-Identifier: Apache-2.0
"""Images of any size, on any device, are laid out with channels innermost. No test lives here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from subjects import graphs_as_they_are

from nexfort_engine.modules import channels_last

INNERMOST = torch.channels_last


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Captured graphs run as they are."""
    monkeypatch.setattr(channels_last, "_LEAST", 1)
    monkeypatch.setattr(channels_last, "MEASURED", ("cpu", "cuda"))
    with graphs_as_they_are():
        yield
