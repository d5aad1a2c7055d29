# SPDX-License-Identifier: Apache-2.0
"""Whole numbers of a call: a row's index may be any, a size is more than 0, and slices may end where a tensor ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from large_rows import few
from probe import Probe, T, block_of, x
from torch.nn import functional


def test_a_row_s_number_may_be_any_whichever_was_captured() -> None:
    for captured in (0, 1, 3):
        probe = Probe(block_of(lambda b, h, row: h * b.linear(h[row])), x(5), captured)
        for row in (0, 1, 2, 4):
            assert probe.agrees(x(5, seed=row), row), (captured, row)
        assert probe.agrees(x(7, 9), 6)
        assert not probe.agrees(x(5), 5), "there is no such row"


def test_two_rows_and_a_size_are_told_apart() -> None:
    block = block_of(lambda b, h, a, width, c: (h[a] * h[c]).reshape(-1, width, 4) + b.linear.weight.sum())
    probe = Probe(block, x(3, 6), 1, 2, 0)
    assert probe.agrees(x(3, 6), 0, 2, 2) and probe.agrees(x(4, 10), 3, 2, 1)
    widths = [str(size) for size in probe.captured.conditions.ints]
    least = {name: bounds[0] for name, bounds in probe.captured.conditions.ranges.items()}
    assert least[widths[1]] == 1 and [least[widths[i]] for i in (0, 2)] == [0, 0]


def test_a_number_that_sizes_are_made_of_is_fixed_at_1_alone() -> None:
    """Where a size may be 0 or 1, kernels find their places by `max(1, size)`."""
    block = block_of(lambda b, h, count: b.linear(h).reshape(-1, count, 8))
    assert Probe(block, x(2, 6), 1).captured.conditions.ints == [1]
    assert Probe(block, x(2, 6), 3).agrees(x(2, 8), 2)


def test_what_code_asks_of_a_number_is_a_condition() -> None:
    probe = Probe(block_of(lambda b, h, flag: b.linear(h) if flag == 0 else h * flag), x(), 0)
    assert probe.agrees(x(3), 0) and not probe.agrees(x(3), 1)
    probe = Probe(block_of(lambda b, h, flag: b.linear(h) if flag == 0 else h * flag), x(), 1)
    assert probe.agrees(x(3), 5) and not probe.agrees(x(3), 0)


def test_code_that_wants_an_int_gets_one() -> None:
    def forward(b: Any, h: T, row: int, table: int) -> T:
        assert type(row) is int
        return h[row] + table

    probe = Probe(block_of(forward), x(5), 1, 4)
    assert probe.agrees(x(5), 1, 4) and not probe.agrees(x(5), 2, 4)


def test_a_number_is_an_int_to_code_that_asks() -> None:
    """What code finds out at another number, the captured one does not show."""
    block = block_of(lambda b, h, row: b.linear(h) * (3.0 if isinstance(row, int) and row < 1 else 1.0))
    probe = Probe(block, x(5), 3)
    assert probe.agrees(x(5), 7) and not probe.agrees(x(5), 0)
    assert not isinstance(torch.SymInt.__dict__.get("__class__"), property), "torch's class is as it was"


def test_a_number_whose_text_is_taken_is_fixed() -> None:
    for text in (str, repr, "{}".format, lambda row: f"{row}"):
        block = block_of(lambda b, h, row: b.linear(h) * {"0": 3.0, "1": 5.0}.get(text(row + 0), 1.0))  # noqa: B023
        probe = Probe(block, x(5), 3)
        assert probe.agrees(x(7), 3) and not probe.agrees(x(5), 1)


def segments(ends: tuple[tuple[int, int, T | None], ...]) -> Any:
    """Attention by segments: each looks at all keys up to its own end."""

    def attend(q: T, k: T, v: T) -> T:
        parts = []
        for start, end, mask in ends:
            parts.append(functional.scaled_dot_product_attention(q[:, start:end], k[:, :end], v[:, :end], mask))
        return torch.cat(parts, 1)

    return attend


@pytest.mark.parametrize("whole", few([False, True], [True]))
def test_segments_that_end_where_the_tensor_ends_stay_free(whole: bool) -> None:
    """The block is called with a closure, as Qwen-Image-2.1 calls its own."""

    def forward(b: Any, h: T, attend: Any) -> T:
        return b.linear(h) + attend(h, h, b.linear(h))

    def call(text: int, image: int, seed: int = 1) -> tuple[T, Any]:
        mask = torch.ones(text, text, dtype=torch.bool).tril()
        ends = (text, text + image) if whole else (text, text + image - 1)
        rest = () if whole else ((text + image - 1, text + image, None),)
        return x(2, text + image, seed=seed), segments(((0, text, mask), (text, ends[1], None), *rest))

    probe = Probe(block_of(forward), *call(5, 12))
    for text, image in ((5, 20), (9, 12), (3, 7)):
        assert probe.agrees(*call(text, image, seed=text)), (text, image)
    assert not probe.agrees(x(2, 17), segments(((0, 17, None),))), "another number of segments"
