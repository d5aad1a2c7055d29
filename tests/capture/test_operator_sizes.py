# SPDX-License-Identifier: Apache-2.0
"""Sizes of nothing and of one: what a graph's operators take for granted, and eager does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from probe import Probe, T, block_of, x
from torch.nn import functional as F  # noqa: N812

from nexfort_engine.guards.shape_guards import Conditions


def image(batch: int = 2, height: int = 6, width: int = 6) -> T:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


COMPUTED: dict[str, tuple[Callable[..., Any], Callable[..., T]]] = {
    "attention": (lambda b, h: F.scaled_dot_product_attention(h, h, h), x),
    "a linear layer": (lambda b, h: b.linear(h), x),
    "the greatest": (lambda b, h: h.amax(1), x),
    "where it is": (lambda b, h: h.argmax(1), x),
    "a sum": (lambda b, h: h.sum(1), x),
    "a convolution": (lambda b, h: F.conv2d(h, torch.ones(3, 3, 3, 3), stride=2, padding=1), image),
    "pooling": (lambda b, h: F.avg_pool2d(h, 3, 2, padding=1), image),
    "upsampling": (lambda b, h: F.interpolate(h, scale_factor=2.0, mode="bilinear"), image),
    "a border": (lambda b, h: F.pad(h, (1, 1, 1, 1), mode="replicate"), image),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_size_of_nothing_is_served_only_where_it_was_captured(name: str) -> None:
    function, given = COMPUTED[name]
    probe = Probe(block_of(function), given())
    for sizes in ((0, 6), (2, 0), (0, 0)):
        assert "below 1" in (probe.refuses(given(*sizes)) or ""), sizes
    assert probe.agrees(given(1, 6)) and probe.agrees(given(3, 6))


def test_a_call_of_nothing_may_be_captured_and_is_then_that_call_alone() -> None:
    probe = Probe(block_of(lambda b, h: b.linear(F.scaled_dot_product_attention(h, h, h))), x(2, 0))
    assert probe.agrees(x(3, 0)) and not probe.agrees(x(2, 6)) and not probe.agrees(x(2, 1))
    assert probe.captured.conditions.narrow([(2, 6, 8)]), "it must not keep other calls eager for good"


@pytest.mark.parametrize(
    "cut",
    [lambda h, n: h[:, n:], lambda h, n: h[:, : h.shape[1] - n], lambda h, n: h[:, : (h.shape[1] + 1) // (n * 2)]],
)
@pytest.mark.parametrize(
    "use", [lambda b, h: F.scaled_dot_product_attention(h, h, h), lambda b, h: h.amax(1), lambda b, h: h.softmax(1)]
)
def test_a_part_of_which_nothing_is_left_is_eager_s(cut: Any, use: Any) -> None:
    probe = Probe(block_of(lambda b, h, n: use(b, cut(h, n))), x(2, 8), 2)
    assert probe.agrees(x(3, 9), 2) and probe.agrees(x(2, 12), 2)
    for length, number in ((3, 3), (2, 2), (7, 7)):
        assert probe.refuses(x(2, length), number), (length, number)


def test_a_border_of_nothing_is_none() -> None:
    """Prompts are padded to a multiple so."""
    probe = Probe(block_of(lambda b, h: b.linear(F.pad(h, (0, 0, 0, -h.shape[1] % 4)))), x(2, 6))
    assert probe.agrees(x(2, 8)) and probe.agrees(x(3, 4)) and probe.agrees(x(1, 7))


MISSING: list[Callable[[T], int]] = [
    lambda h: max(0, 2 - h.shape[1]),
    lambda h: 3 - min(h.shape[1], 2),
    lambda h: max(h.shape[1], 2, h.shape[0]) - h.shape[1],
]


@pytest.mark.parametrize("missing", MISSING)
def test_a_size_of_one_that_max_or_min_would_choose_otherwise_for_is_eager_s(missing: Callable[[T], int]) -> None:
    """Torch takes it for 2 at least. Videos are made longer so, and a kernel would leave out the frames."""
    probe = Probe(block_of(lambda b, h: torch.cat([h.new_ones(h.shape[0], missing(h), 8), b.linear(h)], 1)), x(3, 5))
    assert "2" in (probe.refuses(x(3, 1)) or "") and probe.agrees(x(3, 2)) and probe.agrees(x(3, 7))


def test_one_that_they_choose_alike_for_is_served() -> None:
    probe = Probe(block_of(lambda b, h: b.linear(h) * max(h.shape[1], 4) + min(h.shape[1], 1)), x(3, 5))
    assert probe.agrees(x(3, 1)) and probe.agrees(x(1, 9))


def test_a_convolution_that_leaves_nothing_is_eager_s() -> None:
    probe = Probe(block_of(lambda b, h: F.conv2d(h, torch.ones(3, 3, 3, 3), stride=2)), image())
    assert probe.agrees(image(1, 3, 9))
    assert probe.refuses(image(2, 2, 6)) and probe.refuses(image(2, 6, 1))


def test_what_layers_of_torch_s_own_refuse_of_one_number_is_refused() -> None:
    probe = Probe(block_of(lambda b, h: F.instance_norm(h)), image())
    assert probe.agrees(image(1, 2, 1)) and probe.agrees(image(1, 1, 3))
    assert not probe.agrees(image(2, 1, 1)), "there is no variance"
    probe = Probe(block_of(lambda b, h: F.group_norm(h, 3)), image())
    assert probe.agrees(image(1, 2, 1)) and probe.agrees(image(2, 1, 1)) and not probe.agrees(image(1, 1, 1))


@pytest.mark.parametrize(("captured", "given", "narrow"), [(1, 2, True), (0, 2, True), (0, 1, True), (2, 3, False)])
def test_sizes_of_one_and_none_that_were_constants_are_narrow(captured: int, given: int, narrow: bool) -> None:
    assert Conditions([[captured, 8]]).narrow([(given, 8)]) is narrow


def test_lowered_blocks_agree_with_eager_at_every_odd_size_or_raise_what_it_raises(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "odd_sizes.py")]
    environment = {**os.environ, "NEXFORT_CACHE_DIR": str(tmp_path / "cache"), "NEXFORT_WORKERS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert len(counts) == 5
    for name, row in counts.items():
        assert 0 < row["compiled"] < row["calls"], (name, row)
    assert sum(row["errors"] > 0 for row in counts.values()) == 3, "eager raises at some"
