# SPDX-License-Identifier: Apache-2.0
"""What a layer that carries a hook, or the hook itself, does besides giving a result is seen, or the block runs eager.

Captured graphs run as they are here (subjects.py), which leaves out Inductor and nothing else.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import net_pairs  # noqa: E402
from net_pairs import Net, Pair  # noqa: E402
from torch import nn  # noqa: E402

T = torch.Tensor
unlowered = net_pairs.unlowered  # a fixture
WIDTH = 8


class Block(nn.Module):
    """Two layers, of which the first is hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = 1.0
        self.set_up()

    def set_up(self) -> None:
        """What it has besides."""

    def forward(self, h: T) -> T:
        return h + self.linear(self.norm(h)) * self.gain


class Filling(nn.Module):
    def forward(self, h: T, found: list[T]) -> T:
        found.append(h * 2)
        return h + 1


class GivesToAList(Block):
    def set_up(self) -> None:
        self.norm = Filling()

    def forward(self, h: T) -> T:
        found: list[T] = []
        h = self.norm(h, found)
        return self.linear(h) + sum(found)


class Same(Block):
    def set_up(self) -> None:
        self.norm = nn.Dropout(0.5)

    def forward(self, h: T) -> T:
        h = h * 2
        y = self.norm(h)
        y.mul_(3)
        return self.linear(y + h)


class Leaving(nn.Module):
    def forward(self, h: T) -> T:
        self.last = h * 2
        return h + 1


class ReadsWhatIsLeft(Block):
    def set_up(self) -> None:
        self.norm = Leaving()
        self.norm.last = torch.zeros(1)

    def forward(self, h: T) -> T:
        return self.linear(self.norm(h)) + self.norm.last


def nothing(block: Any) -> None:
    block.norm.register_forward_hook(lambda module, args, result: None)


def sets_the_gain(block: Any) -> None:
    block.norm.register_forward_hook(lambda *_: setattr(block, "gain", 3.0))
    block.register_forward_hook(lambda *_: setattr(block, "gain", 1.0))


def sets_another_layer_s_weight(block: Any) -> None:
    own, other = block.linear.weight, nn.Parameter(block.linear.weight.detach() * 2, requires_grad=False)
    block.norm.register_forward_hook(lambda *_: setattr(block.linear, "weight", other))
    block.register_forward_hook(lambda *_: setattr(block.linear, "weight", own))


CASES = {
    "a list that the layer fills": (GivesToAList, nothing),
    "a layer that gives back what it is given": (Same, nothing),
    "a tensor that the layer leaves on itself": (ReadsWhatIsLeft, nothing),
    "a hook that sets a number of the block": (Block, sets_the_gain),
    "a hook that sets another layer's weight": (Block, sets_another_layer_s_weight),
}


def net_of(kind: type[Block]) -> Net:
    return Net(WIDTH, lambda _: kind())


@pytest.mark.parametrize("case", CASES)
def test_each_step_gives_eager_s_numbers(case: str, tmp_path: Path) -> None:
    kind, hook = CASES[case]
    pair = Pair(net_of(kind), tmp_path)
    eager = copy.deepcopy(pair.net)
    _hook(eager, hook)
    _hook(pair.net, hook)
    for step in range(3):
        h = torch.randn(3 + step, WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(pair.compiled(h), eager(h), rtol=1e-4, atol=1e-5)


def test_a_hook_around_a_plain_layer_leaves_the_block_compiled(tmp_path: Path) -> None:
    pair = Pair(net_of(Block), tmp_path)
    _hook(pair.net, nothing)
    report = pair.agrees(torch.randn(3, WIDTH))
    assert report["artefacts_compiled"] and not pair.reasons()


def test_a_step_with_a_hooked_layer_is_not_run_again_to_verify_it(tmp_path: Path) -> None:
    pair, calls = Pair(net_of(Block), tmp_path), list[int]()
    pair.net.blocks[0].norm.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        pair.compiled(torch.randn(3, WIDTH))
        calls.clear()
        pair.engine.verify_next()
        pair.compiled(torch.randn(3, WIDTH))
    assert len(calls) == 1
    assert any("no step is verified" in note for note in pair.report.as_dict()["notes"])


def _hook(net: Any, hook: Callable[[Any], None]) -> None:
    for block in net.blocks:
        hook(block)


def test_a_forward_that_a_hook_wraps_in_the_middle_of_a_step_stays(tmp_path: Path) -> None:
    """`functools.wraps` copies what the engine wrote on the forward that it put there for the step."""
    pair = Pair(net_of(Block), tmp_path)
    eager = copy.deepcopy(pair.net)

    def wrap_the_second(net: Any) -> None:
        def hook(*_: Any) -> None:
            own = net.blocks[1].forward
            if hasattr(own, "doubled"):
                return

            @functools.wraps(own)
            def doubled(*args: Any, **kwargs: Any) -> Any:
                return own(*args, **kwargs) * 2

            doubled.doubled = True
            net.blocks[1].forward = doubled

        net.blocks[0].register_forward_hook(hook)

    wrap_the_second(eager)
    wrap_the_second(pair.net)
    for _ in range(3):
        h = torch.randn(3, WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(pair.compiled(h), eager(h), rtol=1e-4, atol=1e-5)
    assert hasattr(pair.net.blocks[1].forward, "doubled")
