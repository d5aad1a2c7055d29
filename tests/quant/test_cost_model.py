# SPDX-License-Identifier: Apache-2.0
"""The estimates: what was measured is told apart, and larger products never pay less."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from nexfort_engine.quant.cost_model import H200, TILE, casting, narrowing, saves

SIZES = st.integers(1, 2**15)
MEASURED = {  # rows, inner, columns; whether it is worth it
    "Flux's smallest": ((4608, 3072, 3072), True),
    "Flux's largest": ((4608, 3072, 12288), True),
    "SDXL's, of few rows": ((2048, 1280, 10240), True),
    "SDXL's, of many": ((8192, 640, 5120), True),
    "SDXL's projections: 390 and 400 TFLOP/s": ((2048, 1280, 1280), False),
    "SDXL's keys of a prompt": ((154, 2048, 1280), False),
    "PixArt's keys of a prompt": ((240, 1152, 1152), False),
    "a time embedding": ((2, 1280, 1280), False),
    "a modulation": ((1, 3072, 18432), False),
    "a large modulation of several pictures": ((8, 3072, 18432), False),
}


def gain(rows: int, inner: int, columns: int) -> float:
    """Seconds that a layer with a packed weight and an input of its own saves. Negative: it loses."""
    return saves(rows, inner, columns) - narrowing(rows, inner)


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_is_told_apart(name: str) -> None:
    sizes, pays = MEASURED[name]
    assert (gain(*sizes) > 0) is pays


@settings(max_examples=200)
@given(SIZES, SIZES, SIZES, st.integers(0, 2**14))
def test_what_pays_pays_with_more_of_anything(rows: int, inner: int, columns: int, more: int) -> None:
    before = gain(rows, inner, columns)
    assert gain(rows, inner, columns + more) >= before - 1e-15
    if before > 0:
        assert gain(rows + more, inner, columns) >= before * (1 - 1e-9)
        assert gain(rows, inner + more, columns) >= before * (1 - 1e-9)


@settings(max_examples=100)
@given(SIZES, SIZES, SIZES)
def test_it_never_saves_more_than_the_rates_allow(rows: int, inner: int, columns: int) -> None:
    most = 2.0 * rows * inner * columns * (1 / H200.half - 1 / H200.narrow)
    assert saves(rows, inner, columns) <= max(most, rows * inner / H200.memory) * (1 + 1e-9)
    assert narrowing(rows, inner) > 0 < casting(rows, columns)


def test_a_product_that_fills_the_card_by_half_saves_half() -> None:
    card = dataclasses.replace(H200, product=0.0, memory=1e30, processors=64)
    of_one, of_many = saves(8 * TILE, 4096, 8 * TILE, card), saves(8000 * TILE, 4096, 8 * TILE, card) / 1000
    assert of_one == pytest.approx(of_many / 2, rel=1e-2)
