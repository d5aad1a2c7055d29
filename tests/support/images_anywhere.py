# SPDX-License-Identifier: Apache-2.0
"""Images of any size, on any device, are laid out with channels innermost. No test lives here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import graphs_as_they_are
from torch import nn

from nexfort_engine.api import wrap_methods
from nexfort_engine.cache.store import Store
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.engine import Engine
from nexfort_engine.modules import channels_last

INNERMOST = torch.channels_last


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Captured graphs run as they are."""
    monkeypatch.setattr(channels_last, "_LEAST", 1)
    monkeypatch.setattr(channels_last, "MEASURED", ("cpu", "cuda"))
    with graphs_as_they_are():
        yield


def compiled(net: nn.Module, folder: Path, options: Any = None) -> tuple[Any, Engine]:
    """A network of random weights, compiled, with the engine."""
    torch.manual_seed(0)
    for weight in net.parameters():
        nn.init.normal_(weight, std=0.3)
    net = net.eval().requires_grad_(False)
    engine = Engine(net, CompileConfig.parse(options), Store(folder))
    return wrap_methods(net, engine, ("forward",)), engine
