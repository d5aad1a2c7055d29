# SPDX-License-Identifier: Apache-2.0
"""Shadows: the copy that is traced computes what the block computes, and the block never notices."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from nexfort_engine.capture.shadow_module import Shadow
from nexfort_engine.modules.tree import WeightSlots, mark_shim, structure


class Leaf(nn.Module):
    """Reads an attribute and a weight, and keeps a tensor on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.eps, self.layer = nn.Linear(4, 4), 1e-5, 3
        self.register_buffer("table", torch.ones(4))
        self.loose = torch.full((4,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cached = x
        return self.linear(x) * self.table * self.loose + self.eps

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))


class Tree(nn.Module):
    """Reaches its submodules in every way that plain code has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Leaf(), Leaf()
        self.shared = self.one
        self.in_a_list: Any = [self.two, {"deep": (self.one,)}]
        self.method, self.partial = self.two.twice, functools.partial(self.one.forward)
        self.one.__dict__["parent"] = self
        self.settings = SimpleNamespace(gain=0.5)
        self.itself: Any = []
        self.kept: list[torch.Tensor] = []
        self.itself.append(self.itself)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x)
        x = self.in_a_list[1]["deep"][0](x) + self.in_a_list[0](x) + self.shared(x)
        return self.method(x) + self.partial(x) + self.one.parent.two(x) * self.settings.gain


def tables(module: nn.Module) -> list[Any]:
    return [(type(sub), dict(vars(sub)), dict(sub._parameters), dict(sub._buffers)) for sub in module.modules()]


def test_a_shadow_computes_what_its_module_does_and_leaves_no_trace() -> None:
    tree, x = Tree().requires_grad_(False), torch.randn(2, 4)
    before = tables(tree)
    shadow = Shadow(tree)
    assert torch.equal(shadow.module(x), Shadow(tree).module(x))
    assert isinstance(shadow.module, Tree) and shadow.module is not tree
    assert list(shadow.module.state_dict()) == list(tree.state_dict()) and structure(Shadow(tree).module) == structure(
        tree
    )
    assert "cached" in vars(shadow.module.one) and "cached" not in vars(tree.one)
    shadow.module.one.linear = nn.Identity()
    del shadow.module.two.eps
    assert [row[0] for row in tables(tree)] == [row[0] for row in before]
    for now, then in zip(tables(tree), before, strict=True):
        for table, old in zip(now[1:], then[1:], strict=True):
            assert list(table) == list(old) and all(table[name] is old[name] for name in old)
    assert tree.kept == []
    assert torch.equal(Shadow(tree).module(x), tree(x))


def test_weights_are_exchanged_wherever_the_code_reaches_them() -> None:
    tree, x = Tree().requires_grad_(False), torch.randn(2, 4)
    zeros = [torch.zeros_like(w) for w in WeightSlots(tree).read()]
    eps = tree.one.eps
    found = Shadow(tree, zeros).module(x)
    assert torch.allclose(found, torch.full((2, 4), eps * 2.5)), "a weight of the tree itself was used"
    assert tree(x).abs().sum() > 1


def test_reads_are_kept_apart_by_path_and_nothing_else_is_recorded() -> None:
    pair = nn.Sequential(Leaf(), Leaf()).requires_grad_(False)
    pair[1].eps = 0.5
    shadow = Shadow(pair)
    shadow.module(torch.ones(1, 4))
    assert shadow.reads["0", "eps"] == 1e-5 and shadow.reads["1", "eps"] == 0.5
    assert not {name for _, name in shadow.reads} & {"layer", "linear", "table", "loose", "forward"}


def test_the_engines_stand_in_is_not_taken_over() -> None:
    leaf = Leaf().requires_grad_(False)

    def stand_in(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the block itself was run")

    mark_shim(stand_in, leaf)
    leaf.__dict__["forward"] = stand_in
    assert Shadow(leaf).module(torch.ones(1, 4)).shape == (1, 4)
