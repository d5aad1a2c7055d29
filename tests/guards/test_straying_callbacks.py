# SPDX-License-Identifier: Apache-2.0
"""Substitutes that do what no artefact can follow: their blocks run eager while they are there, and say why.

What a function may do is in test_callbacks.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import called_attention
import pytest
import torch
from called_attention import NAME, TOLERANCE, Block, Net, Pair, Way, turned
from torch import nn

import nexfort_engine

pytestmark = pytest.mark.usefixtures("threads", "artefact_cache")
T = torch.Tensor
pair = called_attention.pair  # a fixture


def test_one_that_strays_is_not_tried_again_after_another(pair: Pair) -> None:
    calls = []

    def wide(own: Way, query: T, *args: Any, **kwargs: Any) -> T:
        calls.append(1)
        return own(query, *args, **kwargs)[:1]

    for _ in range(3):
        pair.call(wide, length=7)
        assert not pair.agrees(turned, length=7)["eager"]
    assert len(calls) == 3 * 2 + 2, "twice where it was found out"


def test_one_that_changes_what_the_block_uses_afterwards_stays_eager_while_it_is_there(pair: Pair) -> None:
    def writes(own: Way, query: T, *args: Any, **kwargs: Any) -> T:
        return own(query.mul_(-2.0), *args, **kwargs)

    pair.stays_eager(writes, "changes a tensor that the block may use afterwards")


def test_one_that_gives_back_another_shape_stays_eager_while_it_is_there(pair: Pair) -> None:
    def wide(own: Way, query: T, *args: Any, **kwargs: Any) -> T:
        return own(query, *args, **kwargs)[:1]

    pair.stays_eager(wide, "gives back torch.float32 [1, 6, 16] on cpu, and not torch.float32 [2, 6, 16] on cpu")


def test_one_that_gives_back_no_tensor_stays_eager_while_it_is_there(pair: Pair) -> None:
    class Odd(torch.Tensor):
        pass

    pair.stays_eager(lambda own, *a, **k: own(*a, **k).flip(1).as_subclass(Odd), "gives back a")


def test_a_block_that_changes_its_input_gets_it_back_before_it_runs_eager() -> None:
    class InPlace(Block):
        def forward(self, x: T, prompt: T, options: dict[str, Any]) -> T:
            x.mul_(1.5)
            return super().forward(x, prompt, options)

    net = Net()
    net.blocks = nn.ModuleList([InPlace() for _ in range(2)])
    net.eval().requires_grad_(False)
    compiled = nexfort_engine.compile(net)
    x, prompt = torch.randn(2, 6, 16), torch.randn(2, 4, 16)

    def wide(own: Way, *args: Any, **kwargs: Any) -> T:
        return own(*args, **kwargs)[:1]

    with torch.inference_mode():
        for way in (turned, wide, turned):
            wanted, found = (module(x.clone(), prompt, {"attend": way}) for module in (net, compiled))
            torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert any("gives back" in row["reason"] for row in compiled.report.as_dict()["eager"])


@pytest.mark.parametrize("hold", [lambda t: t, lambda t: t.detach(), lambda t: t[:, 1:]], ids=["it", "alias", "view"])
def test_one_that_keeps_what_it_is_given_stays_eager_while_it_is_there(pair: Pair, hold: Callable[[T], T]) -> None:
    kept: list[T] = []

    def keeps(own: Way, query: T, key: T, *args: Any, **kwargs: Any) -> T:
        kept.append(hold(key))
        return own(query, key, *args, **kwargs).flip(1)

    pair.stays_eager(keeps, "keeps a tensor that it is given")


def test_one_that_keeps_its_result_is_not_written_over(pair: Pair) -> None:
    kept: list[T] = []

    def remembers(own: Way, *args: Any, **kwargs: Any) -> T:
        kept.append(own(*args, **kwargs).flip(1))
        return kept[-1]

    pair.call(remembers, pair.net)
    wanted = [t.clone() for t in kept]
    kept.clear()
    new = pair.agrees(remembers)
    assert not new["artefacts"] and not new["eager"], new
    for found, value in zip(kept[-2:], wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=TOLERANCE, atol=TOLERANCE)


def test_one_whose_result_lies_anywhere(pair: Pair) -> None:
    def apart(own: Way, *args: Any, **kwargs: Any) -> T:
        found = own(*args, **kwargs)
        return torch.cat([found.new_zeros(1), found.flip(1).flatten()])[1:].view(found.shape)

    new = pair.agrees(apart)
    assert not new["artefacts"] and not new["eager"], new


def test_one_that_gives_back_what_it_is_given(pair: Pair) -> None:
    new = pair.agrees(lambda own, query, *args, **kwargs: query)
    assert not new["artefacts"] and not new["eager"], new


def test_one_that_raises_raises_and_leaves_the_block_compiled(pair: Pair) -> None:
    class Broken(Exception):
        pass

    def broken(own: Way, *args: Any, **kwargs: Any) -> T:
        raise Broken("no attention")

    with pytest.raises(Broken, match="no attention") as caught:
        pair.call(broken)
    if sys.version_info >= (3, 11):
        assert f"by {NAME}" in caught.value.__notes__[0]
    assert not pair.agrees(turned)["eager"]


def test_one_that_is_called_without_a_function_of_the_block_s_own_stays_eager() -> None:
    class Patched(Block):
        def forward(self, x: T, prompt: T, options: dict[str, Any]) -> T:
            return x + self.out(options["attend"](self.query(x)))

    net = Net()
    net.blocks = nn.ModuleList([Patched() for _ in range(2)])
    net.eval().requires_grad_(False)
    compiled = nexfort_engine.compile(net)
    x, prompt, options = torch.randn(2, 6, 16), torch.randn(2, 4, 16), {"attend": lambda query: query[:, :1]}
    with torch.inference_mode():
        assert torch.equal(compiled(x, prompt, dict(options)), net(x, prompt, dict(options)))
    assert all(NAME in row["reason"] and "cannot hold" in row["reason"] for row in compiled.report.as_dict()["eager"])
