# SPDX-License-Identifier: Apache-2.0
"""What a plan says is what a first step needs, and all of it is made in one batch.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_gpu import norms_as_on_a_gpu
from subjects import graphs_as_they_are
from torch import nn

from nexfort_engine.api import wrap_methods
from nexfort_engine.cache.store import Store
from nexfort_engine.compilation import builder as build
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.engine import Engine

pytestmark = pytest.mark.usefixtures("threads")


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with graphs_as_they_are():
        yield


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The regions of which artefacts are made, by batches, in the order of their captures."""
    found: list[list[str]] = []
    lower_all, capture = build.lower_all, build.Builder._capture

    def lowered(*args: Any) -> None:
        found.append([])
        lower_all(*args)

    def captured(builder: build.Builder, wanted: Any) -> Any:
        found[-1].append(wanted.region.path)
        return capture(builder, wanted)

    monkeypatch.setattr(build, "lower_all", lowered)
    monkeypatch.setattr(build.Builder, "_capture", captured)
    return found


def compiled(net: nn.Module, folder: Path) -> Any:
    net = net.eval().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return wrap_methods(net, Engine(net, CompileConfig.parse(None), Store(folder)), ("forward",))


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), factor

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.linear(h) / self.factor


class Row(nn.Module):
    def __init__(self, factors: tuple[float, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(factor) for factor in factors])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h


def test_blocks_alike_but_for_an_attribute_are_made_in_one_batch(tmp_path: Path, batches: list[list[str]]) -> None:
    """That an artefact does not serve the next block is known as soon as it is captured."""
    net = Row((1.0, 1, 1.0, 2.0, 1))
    ours, x = compiled(net, tmp_path), torch.randn(2, 8)
    with torch.no_grad():
        assert torch.equal(ours(x), net(x))
    assert batches == [["blocks.0", "blocks.1", "blocks.3"]]
    report = ours.report.as_dict()
    assert report["artefacts_compiled"] == 3 and not report["eager"] and not report["variants"]


class Images(nn.Module):
    """A norm without weights, which is in no region, between two that are; and an end like a UNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.SiLU()) for _ in range(2)])
        self.plain = nn.GroupNorm(2, 4, affine=False)
        self.conv, self.norm, self.out = nn.Conv2d(4, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(nn.functional.silu(self.norm(self.conv(self.plain(x)))))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_plan_sees_images_laid_out_as_artefacts_leave_them(
    tmp_path: Path, batches: list[list[str]], monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    norms_as_on_a_gpu(monkeypatch)
    net = Images()
    ours, x = compiled(net, tmp_path), torch.randn(batch, 4, 8, 6).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert torch.allclose(ours(x), net(x), atol=1e-5)
        assert batches == [["blocks.0", "conv", "norm", "out"]], "a region was called in another way than planned"
        ours.verify_next()
        ours(x)
    assert len(ours.report.as_dict()["verifications"]) == 1
    assert len(batches) == 1, "a region was verified that no step calls so"
