# SPDX-License-Identifier: Apache-2.0
"""What a trace knows of sizes is kept simple with less work, and is the same as torch's own way gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from probe import Probe, block_of
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from nexfort_engine.capture import exporter

T = torch.Tensor


def split_again(self: Any, x: T) -> T:
    """Rows that are split by numbers which divide what is left each time."""
    for parts in (2, 3, 4):
        x = x.reshape(-1, parts, x.shape[1] * x.shape[0] // parts, x.shape[2]).sum(1)
        x = x.reshape(1, -1, 8) if x.shape[0] == 1 else x.reshape(x.shape[0], -1, 8)
    return self.linear(x)


def heads_of_tables(self: Any, x: T) -> T:
    """As modulation in a block of LTX-2: a table for each row, reshaped to as many parts as it has."""
    batch, rows, width = x.shape
    for parts in (1, 2, 4):
        table = x.reshape(batch, rows, parts, -1)
        heads = table.reshape(batch, rows * parts, -1, 2).transpose(1, 2)
        x = x + heads.transpose(1, 2).reshape(batch, rows, width)
    return self.linear(x)


def frames(self: Any, x: T) -> T:
    """Sizes whose quotients are equal to others' and take their place."""
    height = x.shape[1] // 2 * 2 // 2
    pairs = x[:, : height * 2].reshape(x.shape[0], height, 2, 8)
    return self.linear(pairs.reshape(x.shape[0] * 2, -1, 8) + pairs.flatten(0, 1)[: x.shape[0] * 2, :1])


CALLS: dict[Callable[..., T], tuple[T, list[T]]] = {
    split_again: (torch.randn(2, 24, 8), [torch.randn(2, 48, 8), torch.randn(4, 24, 8)]),
    heads_of_tables: (torch.randn(2, 6, 8), [torch.randn(3, 5, 8), torch.randn(2, 40, 8)]),
    frames: (torch.randn(2, 6, 8), [torch.randn(4, 12, 8), torch.randn(3, 14, 8)]),
}


@pytest.mark.parametrize("form", CALLS, ids=lambda form: form.__name__)
def test_conditions_are_those_of_torchs_own_way(form: Callable[..., T], monkeypatch: pytest.MonkeyPatch) -> None:
    simplified: list[int] = []
    simplify = ShapeEnv.simplify

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        simplified[-1] += 1
        return simplify(self, *args, **kwargs)

    counted.cache_clear = simplify.cache_clear  # type: ignore[attr-defined]
    monkeypatch.setattr(ShapeEnv, "simplify", counted)
    first, others = CALLS[form]
    found = []
    for way in (exporter.few_simplified, nullcontext):
        with monkeypatch.context() as patch:
            patch.setattr(exporter, "few_simplified", way)
            simplified.append(0)
            probe = Probe(block_of(form), first)
        served = [probe.agrees(other) for other in others]
        found.append((probe.captured.conditions.as_json(), str(probe.captured.graph.graph), served))
    assert found[0] == found[1]
    assert simplified[0] <= simplified[1], "more work than torch's own way"


QUESTIONS: list[Callable[..., Any]] = [
    *(lambda a, b, n=n: a % n == 0 for n in (2, 4, 6)),
    *(lambda a, b, n=n: b % n == 0 for n in (2, 3)),
    *(lambda a, b, n=n: a // n > b for n in (2, 4, 6)),
    *(lambda a, b, n=n: a // n * n == a for n in (2, 4)),
    *(lambda a, b, n=n: a * b // n < 400 for n in (2, 4, 8)),
    lambda a, b: a // 2 // (b // 2) > 1,
    lambda a, b: a * 3 // 4 > b // 2,
    lambda a, b: (a * b) % 8 == 0,
    lambda a, b: a == b * 6,
    lambda a, b: torch.sym_max(1, a // 4) < 50,
    lambda a, b: a >= 8,
]


def asked(way: Callable[[], Any], questions: list[int], sizes: tuple[int, int]) -> Any:
    """What an environment answers in turn, and what it takes for granted and knows then."""
    with way():
        env = ShapeEnv()
        numbers = []
        for name, size in zip("ab", sizes, strict=True):
            source = ConstantSource(name)
            symbol = env.create_symbol(size, source, DimDynamic.DYNAMIC)
            numbers.append(env.create_symintnode(symbol, hint=size, source=source))
        answers = [bool(QUESTIONS[one](*numbers)) for one in questions]
        env._maybe_evaluate_static(numbers[0].node.expr > 0)  # for what it learned by the last answer
        return answers, [str(guard.expr) for guard in env.guards], env.axioms


@example([6, 1, 6], (24, 4))
@example([17, 18, 15], (16, 4))
@settings(max_examples=80)
@given(
    st.lists(st.integers(0, len(QUESTIONS) - 1), min_size=2, max_size=9),
    st.tuples(st.sampled_from([12, 16, 24, 30]), st.sampled_from([2, 4, 6])),
)
def test_as_much_is_known_and_taken_for_granted(questions: list[int], sizes: tuple[int, int]) -> None:
    assert asked(exporter.few_simplified, questions, sizes) == asked(nullcontext, questions, sizes)


def test_the_method_is_torchs_own_afterwards() -> None:
    before = ShapeEnv._maybe_evaluate_static
    with exporter.few_simplified():
        assert ShapeEnv._maybe_evaluate_static is not before
        assert ShapeEnv._maybe_evaluate_static.cache_clear is before.cache_clear
    assert ShapeEnv._maybe_evaluate_static is before
