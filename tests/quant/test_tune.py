# SPDX-License-Identifier: Apache-2.0
"""Measurements of a card: what is left, in which order, until when, and what becomes of those that fail."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from nexfort_engine.kernels.scaled_linear import choice
from nexfort_engine.quant import tune
from nexfort_engine.quant.card_figures import RATES, CardFigures

FOUND = choice.Measured(choice.FORMS[0], 50.0, 100.0)


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measurements that need no card."""
    monkeypatch.setattr(tune, "rate", lambda name: float(len(name)))
    monkeypatch.setattr(tune, "measured", lambda layer: FOUND)
    monkeypatch.setattr(tune, "ahead", lambda layers, seconds: list(layers))
    yield


def all_of(figures: CardFigures) -> list[tune.Measurement]:
    return tune.missing(figures, fp8=True, int8=True, layers=True)


def test_all_is_measured_once_rates_first() -> None:
    begun, kept = tune.begun("a card"), list[CardFigures]()
    left = all_of(begun)
    taken = list(tune.run(begun, left, 60, kept.append))
    assert [one.what for one in taken] == left and not any(one.problem for one in taken)
    assert kept == [one.figures for one in taken]
    assert [one.layer is None for one in left] == [True] * len(RATES) + [False] * (len(left) - len(RATES))
    layers = {layer.key for each in tune.MODELS.values() for layer in each}
    assert set(kept[-1].rates) == set(RATES) and set(kept[-1].layers) == layers
    assert not all_of(kept[-1]) and (kept[-1].torch, kept[-1].int8_pays) == (str(torch.__version__), True)


def test_what_a_card_cannot_do_is_not_measured() -> None:
    found = tune.missing(tune.begun("a card"), fp8=False, int8=False, layers=False)
    assert [one.text for one in found] == ["rate of memory", "rate of half"]


@pytest.mark.parametrize("steps", [0, 1, 3, 7])
def test_the_time_that_is_given_is_kept_and_the_rest_follows(steps: int) -> None:
    """A clock that moves on by a second each time it is read."""
    kept = [tune.begun("a card")]
    seconds = itertools.count()
    while left := all_of(kept[-1]):
        before = len(kept)
        list(tune.run(kept[-1], left, steps + 0.5, kept.append, lambda: float(next(seconds))))
        assert len(kept) - before <= steps
        if not steps:
            return
        assert len(kept) > before or steps < 3
        if len(kept) == before:
            return
    assert len(kept[-1].layers) == len({layer.key for each in tune.MODELS.values() for layer in each})


def test_what_fails_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(layer: tune.Layer) -> choice.Measured:
        if layer.up:
            raise torch.OutOfMemoryError("CUDA out of memory.\nof 8 GiB")
        return FOUND

    monkeypatch.setattr(tune, "measured", fails)
    begun = tune.begun("a card")
    taken = list(tune.run(begun, all_of(begun), 60, lambda _: None))
    (failed,) = [one for one in taken if one.problem]
    assert failed.problem == "CUDA out of memory." and failed.what.layer is not None and failed.what.layer.up
    assert [one.layer for one in all_of(taken[-1].figures)] == [failed.what.layer]


def test_layers_whose_kernels_are_not_there_in_time_come_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "ahead", lambda layers, seconds: list(layers)[:2])
    begun = tune.begun("a card")
    taken = list(tune.run(begun, all_of(begun), 60, lambda _: None))
    assert len(taken[-1].figures.layers) == 2 and len(taken) == len(RATES) + 2
