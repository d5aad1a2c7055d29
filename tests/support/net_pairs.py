# SPDX-License-Identifier: Apache-2.0
"""A network of two equal blocks beside its compiled self, called with the same arguments. No test lives here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
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

T = torch.Tensor


class Part(nn.Module):
    """A block that has a weight and takes anything that `Net` hands on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.gain = 1.0

    def forward(self, h: T, *more: Any, **named: Any) -> T:
        h = h + self.linear(self.norm(h)) * self.gain
        for value in more:
            h = h * value
        options = named.get("options")
        if options is not None and "shift" in options:
            h = h + options["shift"]
        if options is not None and "patch" in options:
            h = options["patch"](h)
        return h


class Net(nn.Module):
    """Two equal blocks and a head; what is called besides the input goes to the blocks."""

    def __init__(self, width: int = 8, part: Callable[[int], nn.Module] = Part) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([part(width) for _ in range(2)])
        self.head = nn.Linear(width, 4)
        self.fails = False

    def forward(self, h: T, *more: Any, **named: Any) -> T:
        for block in self.blocks:
            h = block(h, *more, **named)
        if self.fails:
            raise ValueError("between two regions")
        return self.head(h)


class Pair:
    """A network and its compiled self, with an empty cache."""

    def __init__(self, net: nn.Module, folder: Path, options: Any = None, **of_engine: Any) -> None:
        torch.manual_seed(0)
        for weight in net.parameters():
            weight.data.normal_(0, 0.3)
        self.net = net.eval().requires_grad_(False)
        self.engine = Engine(net, CompileConfig.parse(options), Store(folder), **of_engine)
        self.compiled = wrap_methods(net, self.engine, ("forward",))
        self.report = self.engine.report

    def agrees(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What the report gained by one call, whose result and changed arguments are the network's own."""
        theirs, ours = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
        mark = self.report.mark()
        with torch.no_grad():
            wanted = self.net(*theirs[0], **theirs[1])
            found = self.compiled(*ours[0], **ours[1])
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5), float((found - wanted).abs().max())
        for a, b in zip(ours[0], theirs[0], strict=True):
            assert not isinstance(a, T) or torch.allclose(a, b, atol=1e-5), "an argument was changed otherwise"
        return self.report.since(mark)

    def reasons(self) -> str:
        return "; ".join(row["reason"] for row in self.report.as_dict()["eager"])


@pytest.fixture(autouse=True)
def unlowered() -> Iterator[None]:
    """Captured graphs run as they are."""
    with graphs_as_they_are():
        yield


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A network whose first call has been made."""
    made = Pair(Net(), tmp_path)
    assert made.agrees(x())["artefacts_compiled"] == 2
    return made


def x(batch: int = 2, length: int = 6, seed: int = 1) -> T:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(seed))
