# SPDX-License-Identifier: Apache-2.0
"""Sizes and numbers: a graph serves the calls that answer as the captured one did; its conditions refuse the others."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from large_rows import few
from probe import Probe, T, block_of, x
from torch.nn import functional as F  # noqa: N812

from nexfort_engine.guards.option_recorder import Refused

# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_one_capture_serves_every_batch_and_length() -> None:
    probe = Probe(block_of(lambda b, h: h + b.linear(F.layer_norm(h, (8,)))), x())
    for batch in (1, 2, 3, 4):
        for length in (2, 5, 6, 64):
            assert probe.agrees(x(batch, length))
    assert probe.refuses(x(width=9)[..., :8].repeat(1, 1, 2))


def test_sizes_that_are_equal_by_chance_stay_apart() -> None:
    def joint(b: Any, image: T, text: T) -> tuple[T, T]:
        h = b.linear(torch.cat([text, image], 1))
        h = F.scaled_dot_product_attention(h, h, h)
        return h[:, text.shape[1] :], h[:, : text.shape[1]]

    probe = Probe(block_of(joint), x(8, 8), x(8, 8, seed=2))  # batch, both lengths and the width: all of them 8
    for batch, image, text in ((2, 16, 5), (1, 5, 16), (3, 7, 7), (8, 2, 3)):
        assert probe.agrees(x(batch, image), x(batch, text))
    assert probe.refuses(x(2, 6), x(3, 6)), "two batches that differ"


def test_a_size_that_follows_from_others_is_checked() -> None:
    def masked(b: Any, image: T, text: T, mask: T) -> T:
        return torch.cat([text, image], 1) * mask.unsqueeze(-1)

    probe = Probe(block_of(masked), x(2, 6), x(2, 5), torch.ones(2, 11))
    assert probe.agrees(x(3, 9), x(3, 4), torch.ones(3, 13))
    assert not probe.agrees(x(3, 9), x(3, 4), torch.ones(3, 12))


def test_a_size_that_two_relations_leave_one_value_for_is_a_number() -> None:
    """No kernel has to divide by it, or find rows at a part of it."""

    def modulated(b: Any, h: T, t: T) -> T:
        shift, scale = (b.table[:2] + t.reshape(t.shape[0], 2, -1)).chunk(2, 1)
        return h * (1 + scale) + shift

    probe = Probe(block_of(modulated), x(2, 6), torch.randn(2, 16))
    assert probe.captured.conditions.shapes[1][1] == 16
    sizes = [s for node in probe.captured.graph.graph.nodes for s in getattr(node.meta.get("val"), "shape", ())]
    assert not [size for size in map(str, sizes) if "//" in size]
    assert probe.agrees(x(3, 9), torch.randn(3, 16))
    assert probe.refuses(x(2, 6), torch.randn(2, 18)) and probe.refuses(x(2, 6), torch.randn(2, 17))


def test_a_size_of_which_a_part_alone_is_known_stays_free() -> None:
    def cut(b: Any, h: T, t: T) -> T:
        return h + b.table[:6] + t.new_zeros(t.shape[1] // 2, 8)

    probe = Probe(block_of(cut), x(2, 6), torch.randn(2, 12))
    assert probe.captured.conditions.shapes[1][1] != 12 and probe.agrees(x(3, 6), torch.randn(3, 13))


def test_a_window_needs_sizes_that_it_divides() -> None:
    def windows(b: Any, h: T) -> T:
        return b.linear(h.unflatten(1, (-1, 4))).flatten(1, 2)

    probe = Probe(block_of(windows), x(2, 8))
    assert probe.agrees(x(2, 12)) and probe.agrees(x(1, 64))
    assert not probe.agrees(x(2, 10))


@pytest.mark.parametrize(
    "branch",
    few(
        [
            lambda b, h: h * 2 if h.shape[1] > 10 else h,
            lambda b, h: h * 2 if h.shape[1] % 4 == 0 else h,
            lambda b, h: h * 2 if h.shape[1] == 6 else h,
            lambda b, h: h * (2 if h.shape[1] / h.shape[0] > 4.5 else 3),
            lambda b, h: h * int(math.sqrt(h.shape[1])),
            lambda b, h: h * round(h.shape[1] / 8),
            lambda b, h: h * max(h.shape[1], 10),
            lambda b, h: h * torch.arange(float(max(h.shape[0], h.shape[1], 4))).sum(),
            lambda b, h: h * min(h.shape[0], h.shape[1], 7),
            lambda b, h: torch.cat([h] * (2 if h.shape[1] < 8 and h.shape[0] > 1 else 1), -1),
        ],
        5,
    ),
)
def test_code_that_branches_on_a_size_is_followed_or_refused(branch: Any) -> None:
    for length in (6, 8, 11, 12):
        probe = Probe(block_of(branch), x(2, length))
        for batch in (1, 2, 3):
            for other in (2, 5, 6, 8, 11, 12, 16, 100):
                probe.agrees(x(batch, other))


@pytest.mark.parametrize(
    "choose",
    [
        lambda h, size: h * max(*size, h.shape[0], 4),
        lambda h, size: h * min(h.shape[0], size[0], size[1]),
        lambda h, size: h * (2 if max(size[0] / h.shape[0], size[1] / h.shape[1]) > 100 else 3),
        lambda h, size: h * (2 if min([f / s for f, s in zip(size, h.shape, strict=False)]) > 100 else 3),
        lambda h, size: h * (2 if max(f / s for f, s in zip(size, h.shape, strict=False)) > 100 else 3),
    ],
)
def test_the_greatest_of_sizes_or_scales_serves_them_all(choose: Any) -> None:
    probe = Probe(block_of(lambda b, h, size: choose(h, size)), x(2, 6), (3, 10))
    for size in ((3, 40), (9, 10), (2, 6), (4, 12)):
        assert probe.agrees(x(2, 6), size), size


@pytest.mark.parametrize(
    "choose",
    [
        lambda h: max(h.shape[1] / h.shape[0], 4.5),
        lambda h: max(h.shape[1] / 2, h.shape[0] + 2, 4),
        lambda h: h.shape[1] // max(h.shape[1] / h.shape[0], 4.5),
        lambda h: int(10 * max([h.shape[1] / h.shape[0], 4.5])),
        lambda h: max(h.shape[0], h.shape[1] / 3),
    ],
)
def test_a_chosen_scale_that_is_computed_with_is_a_condition(choose: Any) -> None:
    """Inductor rounds the greatest of two scales down."""
    probe = Probe(block_of(lambda b, h: h * choose(h)), x(2, 6))
    assert probe.agrees(x(2, 6)) and "max" not in probe.captured.graph.code
    for batch, length in ((2, 8), (2, 40), (7, 6), (1, 6)):
        probe.agrees(x(batch, length))


@pytest.mark.parametrize(
    "cut",
    few(
        [
            lambda b, h, n: h[:, :n],
            lambda b, h, n: h[:, n:],
            lambda b, h, n: h[:, -n:],
            lambda b, h, n: h[:, 1:n],
            lambda b, h, n: torch.cat([h[:, :n] * 2, h[:, n:]], 1),
        ],
        3,
    ),
)
def test_a_slice_that_ends_past_the_end_is_another_one(cut: Any) -> None:
    """It is cut off there; lowered code that was made for one inside would read other memory."""
    probe = Probe(block_of(cut), x(2, 6), 3)
    assert probe.agrees(x(3, 8), 5) and not probe.agrees(x(2, 6), 9)
    probe = Probe(block_of(cut), x(2, 6), 9)
    assert probe.agrees(x(3, 8), 11) and not probe.agrees(x(2, 6), 3)


@pytest.mark.parametrize(
    "pick",
    [
        lambda b, h, n: h[:, n],
        lambda b, h, n: h[:, -n],
        lambda b, h, n: h[:, 5] * n,
        lambda b, h, n: h[:, 0] * n,
        lambda b, h, n: h.topk(n, 1)[0],
        lambda b, h, n: h.sum() + torch.arange(n, h.shape[1] + 2),
    ],
)
def test_what_is_not_there_is_refused_as_in_eager(pick: Any) -> None:
    probe = Probe(block_of(pick), x(2, 8), 3)
    assert probe.agrees(x(3, 9), 5)
    for length in (0, 3, 6, 12):
        for n in (2, 4, 7, 11, -3):
            probe.agrees(x(2, length), n)


def test_how_many_rows_a_tensor_tells_may_vary() -> None:
    """The rows of each expert: nobody can check them before the call, and the graph does so itself, as eager does."""

    def sorted_to_experts(b: Any, h: T, counts: T) -> T:
        numbers = counts.tolist()
        parts = torch.split(h[: sum(numbers)], numbers)
        return torch.cat([part @ b.linear.weight * i for i, part in enumerate(parts)])

    probe = Probe(block_of(sorted_to_experts), torch.randn(12, 8), torch.tensor([3, 4]))
    for rows, counts in ((12, (4, 3)), (12, (0, 12)), (30, (0, 0)), (7, (1, 5))):
        assert probe.agrees(torch.randn(rows, 8), torch.tensor(counts)), counts
    for rows, wrong in ((5, (3, 4)), (9, (-1, 4))):
        with pytest.raises(RuntimeError):
            probe.graph(torch.randn(rows, 8), torch.tensor(wrong))


def test_a_number_whose_kind_is_asked_is_fixed_where_nothing_else_works() -> None:
    probe = Probe(block_of(lambda b, h, n: h * (n if type(n) is int else n.min())), x(), 24)
    assert probe.agrees(x(3, 9), 24) and not probe.agrees(x(), 25)


@pytest.mark.parametrize(
    "asks",
    [
        lambda b, h, n: h * (2.0 if isinstance(n, int) else 3.0) + h[:, :n].sum(),
        lambda b, h, n: h * (n if isinstance(n, int) else 3),
        lambda b, h, n: h * {"5": 2.0}.get(f"{n}", 3.0),
    ],
    ids=["beside a slice", "as a factor", "as text"],
)
def test_code_that_asks_what_a_number_is_gets_the_number(asks: Any) -> None:
    probe = Probe(block_of(asks), x(2, 6), 5)
    for n in (3, 5, 6):
        probe.agrees(x(2, 7), n)


def test_what_another_package_asks_is_a_condition_whatever_it_is_called() -> None:
    """Torchvision's folder begins as torch's does."""
    found: dict[str, Any] = {}
    file = os.path.join(os.path.dirname(torch.__file__) + "vision", "transforms.py")
    code = "def wider(h):\n    return h * 2 if h.shape[1] > h.shape[0] else h * 3\n"
    exec(compile(code, file, "exec"), found)  # noqa: S102  # the one way to give code a file that is not there
    probe = Probe(block_of(lambda b, h: found["wider"](b.linear(h))), x(2, 6))
    assert probe.agrees(x(3, 9)) and not probe.agrees(x(6, 3))


def test_a_number_that_ends_a_slice_may_vary() -> None:
    def modulated(b: Any, h: T, parts: list[tuple[int, int, int]]) -> T:
        h = h.clone()
        for begin, end, row in parts:
            h[:, begin:end] *= b.table[row : row + 1]
        return h

    probe = Probe(block_of(modulated), x(2, 12), [(0, 5, 0), (5, 12, 1)])
    assert probe.agrees(x(3, 20), [(0, 5, 0), (5, 20, 1)]) and probe.agrees(x(2, 20), [(0, 8, 0), (8, 20, 1)])
    assert not probe.agrees(x(2, 12), [(0, 5, 0), (5, 14, 1)]), "a slice that is cut off"


def test_reading_past_the_end_of_a_table_is_refused_as_in_eager() -> None:
    probe = Probe(block_of(lambda b, h: h + b.table[: h.shape[1]]), x(2, 6))
    assert probe.agrees(x(2, 9)) and probe.agrees(x(2, 10))
    assert not probe.agrees(x(2, 11))


def test_a_slice_that_is_longer_than_its_source_is_clamped_as_in_eager() -> None:
    probe = Probe(block_of(lambda b, h, n: b.linear(h[:, :n])), x(2, 6), 4)
    for length, n in ((6, 5), (6, 6), (6, 7), (3, 100), (9, 2)):
        probe.agrees(x(2, length), n)


def test_padding_to_a_multiple_is_followed_or_refused() -> None:
    probe = Probe(block_of(lambda b, h: F.pad(h, (0, 0, 0, -h.shape[1] % 4))), x(2, 8))
    for length in (8, 12, 9, 10, 11, 3):
        probe.agrees(x(2, length))


def test_resizing_by_a_factor_serves_other_sizes() -> None:
    image = torch.randn(2, 8, 6, 6)
    probe = Probe(block_of(lambda b, h: F.interpolate(h, scale_factor=2.0, mode="nearest")), image)
    for batch, height, width in ((1, 6, 6), (2, 5, 9), (3, 16, 4)):
        assert probe.agrees(torch.randn(batch, 8, height, width))


def test_a_number_that_is_a_size_is_more_than_nothing_and_strides_need_not_ask() -> None:
    def larger(b: Any, h: T, height: int, width: int) -> T:
        return F.interpolate(h, size=(height, width)) * b.table.sum()

    def image(height: int, width: int) -> T:
        return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))

    probe = Probe(block_of(larger), image(4, 5), 8, 9)
    (output,) = (node for node in probe.captured.graph.graph.nodes if node.op == "output")
    (result,) = output.all_input_nodes
    assert "ax(" not in str(result.meta["val"].stride())
    assert probe.agrees(image(6, 7), 3, 17) and probe.agrees(image(6, 7), 2, 2)
    for number in (0, -3):
        assert probe.refuses(image(4, 5), number, 9), "torch's own strides are others there"


def test_fixed_sizes_are_fixed() -> None:
    probe = Probe(block_of(lambda b, h: b.linear(h)), x(), dynamic=False)
    assert not probe.agrees(x(3)) and not probe.agrees(x(length=7)) and probe.agrees(x(seed=3))


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_a_number_is_data() -> None:
    probe = Probe(block_of(lambda b, h, n: b.linear(h).repeat(1, n, 1) * n), x(), 3)
    assert probe.agrees(x(), 5) and probe.agrees(x(1, 9), 2)


@pytest.mark.parametrize(
    "branch",
    few(
        [
            lambda b, h, n: h * 2 if n > 10 else h,
            lambda b, h, n: h * 2 if n == 7 else h,
            lambda b, h, n: h * [1, 2, 3, 4][n % 4],
            lambda b, h, n: h.sum(n % 2),
            lambda b, h, n: h.flatten(n % 3),
            lambda b, h, n: h if n else h * 2,
            lambda b, h, n: {7: h, 8: h * 2}.get(n, h * 3),
            lambda b, h, n: h * float(n),
            lambda b, h, n: h * n**0.5,
            lambda b, h, n: h * 2 if isinstance(n, int) else h,
            lambda b, h, n: h * 2 if type(n) is int else h,
            lambda b, h, n: h * (n if n is not None and n in (1, 7) else 3),
        ],
        6,
    ),
)
def test_code_that_branches_on_a_number_is_followed_or_refused(branch: Any) -> None:
    for number in (0, 1, 7, 12):
        try:
            probe = Probe(block_of(branch), x(), number)
        except (Refused, TypeError, RuntimeError):
            continue  # no graph is the other right answer
        for other in (-1, 0, 1, 2, 7, 8, 11, 12, 100):
            probe.agrees(x(), other)


def test_code_that_branches_on_the_size_of_what_it_does_not_use_is_followed_or_refused() -> None:
    probe = Probe(block_of(lambda b, h, mask: h * 2 if mask.shape[1] > 10 else h), x(), torch.ones(2, 12))
    for length in (5, 10, 11, 12, 30):
        probe.agrees(x(), torch.ones(2, length))


def test_a_number_that_nothing_depends_on_may_be_any() -> None:
    probe = Probe(block_of(lambda b, h, size: b.linear(h)), x(), (64, 48))
    assert probe.agrees(x(), (32, 96)) and probe.agrees(x(), (1, 1))
