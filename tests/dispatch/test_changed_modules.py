# SPDX-License-Identifier: Apache-2.0
"""A module that changes after its first call is honoured: its attributes, weights, submodules and hooks.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from large_rows import few

torch = pytest.importorskip("torch")
import net_pairs  # noqa: E402
from net_pairs import Net, Pair, Part, x  # noqa: E402
from torch import nn  # noqa: E402

T = torch.Tensor
unlowered, pair = net_pairs.unlowered, net_pairs.pair  # fixtures
Change = Callable[["Net"], Any]

CHANGES: dict[str, Change] = {
    "an attribute": lambda n: setattr(n.blocks[0], "gain", 3.0),
    "a block's submodule": lambda n: setattr(n.blocks[0], "norm", nn.Identity()),
    "a submodule of the same structure": lambda n: setattr(n.blocks[0], "norm", nn.LayerNorm(8, eps=2.0)),
    "a wider layer": lambda n: setattr(n, "head", nn.Linear(8, 6)),
    "a forward hook": lambda n: n.blocks[0].register_forward_hook(lambda m, a, out: out * 2),
    "a pre-hook below": lambda n: n.blocks[1].norm.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    "a replaced forward": lambda n: setattr(n.blocks[0], "forward", lambda h, *a, **k: h * 2),
    "a replaced forward below": lambda n: setattr(n.blocks[0].linear, "forward", lambda h: h * 2),
    "a weight": lambda n: setattr(n.blocks[0].linear, "weight", nn.Parameter(torch.eye(8))),
    "a weight that goes": lambda n: setattr(n.head, "bias", None),
    "a weight in another dtype and back": lambda n: (n.head.double(), n.head.float(), n.head.weight.zero_()),
    "a block of the list": lambda n: n.blocks.__setitem__(0, Part(8)),
    "one block more": lambda n: n.blocks.append(Part(8)),
    "training": lambda n: n.train(),
}


@pytest.mark.parametrize("change", few(CHANGES, 8))
def test_a_change_of_the_module_is_honoured(pair: Pair, change: Change) -> None:
    with torch.no_grad():
        before = pair.net(x())
        change(pair.net)
        pair.net.requires_grad_(False)
        now = pair.net(x())
    assert now.shape != before.shape or not torch.allclose(now, before) or pair.net.training
    pair.agrees(x())
    pair.agrees(x(3, 9))


def test_a_weight_at_the_address_of_one_that_is_gone_is_another(tmp_path: Path) -> None:
    """As a LoRA that reshapes a layer and is taken off leaves them: each time the host makes a parameter anew."""
    net = Net()
    net.head = nn.Linear(8, 4, bias=False)
    pair = Pair(net, tmp_path)
    pair.agrees(x())
    address, others = id(net.head.weight), []
    del net.head._parameters["weight"]
    gc.collect()
    while not others or id(others[-1]) != address:
        assert len(others) < 100_000, "no parameter came to lie there, so that this says nothing"
        others.append(nn.Parameter(torch.randn(6, 8), requires_grad=False))
    net.head._parameters["weight"] = others[-1]
    assert [row["region"] for row in pair.agrees(x())["artefacts"]] == ["head"]


def _linear(factor: float) -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.init.constant_(layer.weight, factor)
    return layer.requires_grad_(False)


EXCHANGED: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "with other weights": ("linear", lambda: _linear(0.5)),
    "with another attribute": ("norm", lambda: nn.LayerNorm(8, eps=2.0).requires_grad_(False)),
    "of another structure": ("linear", lambda: nn.Sequential(_linear(0.5))),
}


@pytest.mark.parametrize(("name", "make"), few(EXCHANGED, 1))
def test_a_submodule_that_is_exchanged_and_put_back(pair: Pair, name: str, make: Callable[[], nn.Module]) -> None:
    """As patches of objects do it: every time the weights are those of the one that is there."""
    block, own = pair.net.blocks[0], getattr(pair.net.blocks[0], name)
    before, others, gone = pair.net(x()), make(), []
    for time in range(3):
        setattr(block, name, others)
        assert not torch.allclose(pair.net(x()), before)
        new = pair.agrees(x())
        assert not new["eager"] and (not new["artefacts"] or not time)
        setattr(block, name, own)
        assert not pair.agrees(x())["artefacts"]
        gone.append(weakref.ref(others))
        others = make()
    del others
    gc.collect()
    assert not [one for one in gone if one() is not None], "what was taken out is kept"


@pytest.mark.parametrize(("path", "around"), [("blocks.0", False), ("blocks.0.linear", True)])
def test_a_replaced_forward_is_a_boundary_until_it_is_put_back(pair: Pair, path: str, around: bool) -> None:
    module = pair.net.get_submodule(path)
    original, before = module.forward, pair.net(x())
    module.forward = lambda *a, **k: original(*a, **k) * 2  # type: ignore[method-assign]
    assert not torch.allclose(pair.net(x()), before)
    new = pair.agrees(x())
    assert not new["eager"] and len(new["artefacts"]) == around
    module.forward = original  # type: ignore[method-assign]
    new = pair.agrees(x())
    assert not new["eager"] and not new["artefacts"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.report, "eager", None)  # it keeps a reason once, so that since() would not show it
        pair.agrees(x())


def test_the_original_and_the_compiled_one_are_one_module(pair: Pair) -> None:
    compiled = pair.compiled
    assert isinstance(compiled, Net) and compiled.state_dict().keys() == pair.net.state_dict().keys()
    assert compiled.head is pair.net.head and compiled.uncompiled() is pair.net
    compiled.blocks[0].gain = 2.0
    assert pair.net.blocks[0].gain == 2.0
    compiled.load_state_dict({key: torch.ones_like(value) for key, value in pair.net.state_dict().items()})
    assert float(pair.net.head.weight.sum()) == 32.0
    pair.agrees(x())


def test_copies_are_networks_of_their_own(pair: Pair) -> None:
    for other in (copy.deepcopy(pair.compiled), pickle.loads(pickle.dumps(pair.compiled))):
        assert isinstance(other, Net) and other.uncompiled() is not pair.net
        other.head.weight.data.zero_()
        other.head.bias.data.zero_()
        with torch.no_grad():
            assert not other(x()).any()
        pair.agrees(x())
