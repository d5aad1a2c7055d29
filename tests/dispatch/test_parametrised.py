# SPDX-License-Identifier: Apache-2.0
"""Blocks whose weights torch computes by other modules (`torch.nn.utils.parametrize`): compiled, and changes seen."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from net_pairs import Net, Pair, unlowered, x  # noqa: F401  # a fixture
from torch import nn
from torch.nn.utils import parametrizations, parametrize

T = torch.Tensor


class Normed(nn.Module):
    """A block with a layer whose weight is a direction and a length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, h: T) -> T:
        return h + self.linear(h)


class Symmetric(nn.Module):
    def forward(self, weight: T) -> T:
        return weight.triu() + weight.triu(1).mT


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, weight: T) -> T:
        return weight * self.by


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    made = Pair(Net(part=Normed), tmp_path)
    new = made.agrees(x())
    assert new["artefacts_compiled"] == 2 and not new["eager"], "the blocks share one"
    return made


def test_other_sizes_and_another_process_need_nothing_new(pair: Pair, tmp_path: Path) -> None:
    assert not pair.agrees(x(3, 9))["artefacts"]
    new = Pair(Net(part=Normed), tmp_path).agrees(x())
    assert new["artefacts"] and not new["artefacts_compiled"] and not new["eager"]


def _longer(net: Net) -> None:
    net.blocks[0].linear.parametrizations.weight.original0.mul_(2)


def _turned(net: Net) -> None:
    net.blocks[1].linear.weight = torch.randn(8, 8)  # torch makes the originals of it


def _removed(net: Net) -> None:
    parametrize.remove_parametrizations(net.blocks[0].linear, "weight")
    net.requires_grad_(False)


def _one_more(net: Net) -> None:
    parametrize.register_parametrization(net.blocks[0].linear, "weight", Symmetric())


def _of_the_bias(net: Net) -> None:
    parametrize.register_parametrization(net.blocks[1].linear, "bias", Scaled(3.0))
    net.requires_grad_(False)


@pytest.mark.parametrize("change", [_longer, _turned, _removed, _one_more, _of_the_bias])
def test_a_change_is_seen(pair: Pair, change: Callable[[Net], None]) -> None:
    with torch.no_grad():
        before = pair.net(x())
        change(pair.net)  # type: ignore[arg-type]
        assert not torch.allclose(pair.net(x()), before, atol=1e-3) or change is _removed
    assert not pair.agrees(x())["eager"]
    assert not pair.agrees(x())["artefacts"]


def test_an_attribute_of_a_parametrisation_is_a_guard(tmp_path: Path) -> None:
    net = Net(part=Normed)
    for number, block in enumerate(net.blocks):
        parametrize.register_parametrization(block.linear, "bias", Scaled(2.0 + number))
    pair = Pair(net, tmp_path)
    assert not pair.agrees(x())["eager"]
    net.blocks[0].linear.parametrizations.bias[0].by = 5.0
    assert not pair.agrees(x())["eager"]


def test_inside_cached_blocks_run_as_they_are_and_leave_nothing_there(pair: Pair) -> None:
    for _ in range(2):
        with parametrize.cached():
            pair.agrees(x())
            with torch.no_grad():
                _longer(pair.net)  # type: ignore[arg-type]
            pair.agrees(x())  # eager goes on with what it kept
            assert "cached()" in pair.reasons()
        assert not pair.agrees(x())["eager"]


def test_nothing_keeps_a_network_alive_whose_classes_hold_its_layers(tmp_path: Path) -> None:
    pair = Pair(Net(part=Normed), tmp_path)
    pair.agrees(x())
    weights = [weakref.ref(weight) for weight in pair.net.parameters()]
    del pair
    gc.collect()
    assert not [weight for weight in weights if weight() is not None]
