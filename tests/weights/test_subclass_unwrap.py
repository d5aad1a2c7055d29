# SPDX-License-Identifier: Apache-2.0
"""Weights that are not plain tensors: taken apart, put together, and passed to artefacts as data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scaled import Layer, Opaque, Scaled, weight
from subjects import graphs_as_they_are
from torch import nn

from nexfort_engine import compile as nexfort_compile
from nexfort_engine.guards.option_recorder import Refused
from nexfort_engine.weights.subclass_unwrap import Parts, is_plain, places


def test_weights_come_apart_in_order_and_together_again() -> None:
    plain, scaled = torch.ones(3), Scaled.of(weight())
    parts = Parts.of([plain, scaled, plain])
    assert parts is not None and Parts.of([plain, nn.Parameter(plain)]) is None
    taken = parts.take([plain, scaled, plain])
    assert taken is not None and [id(t) for t in taken] == [id(plain), id(scaled.whole), id(scaled.scale), id(plain)]
    made = parts.together(taken)
    assert type(made[1]) is Scaled and made[1].whole is scaled.whole and made[1].scale is scaled.scale
    assert all(map(is_plain, taken)) and not is_plain(scaled)


def test_parts_within_parts() -> None:
    inner = Scaled.of(weight())
    outer = Scaled(inner, torch.tensor(3.0))
    parts = Parts([outer])
    taken = parts.take([outer])
    assert taken is not None and len(taken) == 3
    again = parts.together(taken)[0]
    assert type(again) is Scaled and type(again.whole) is Scaled and torch.equal(again.whole.plain(), inner.plain())


def test_what_is_said_about_a_weight_is_part_of_its_text_and_of_where_it_lies() -> None:
    one, other = Scaled.of(weight()), Scaled.of(weight())
    other.whole, other.scale = one.whole, one.scale
    assert Parts([one]).text == Parts([other]).text and places([one]) == places([other])
    other.unit = 2
    assert Parts([one]).take([other]) is None and Parts([one]).take([weight()]) is None
    assert Parts([one]).text != Parts([other]).text and places([one]) != places([other])
    other.unit, other.scale = 1, one.scale.clone()
    assert places([one]) != places([other]), "the scale lies elsewhere"


def test_a_weight_that_does_not_say_what_it_is_made_of_is_refused() -> None:
    with pytest.raises(Refused, match="Opaque, which does not say what it is made of"):
        Parts([Opaque.of(weight())])


def compiled(module: nn.Module) -> nn.Module:
    return nexfort_compile(module.eval())


def same(fast: nn.Module, module: nn.Module, rows: int = 5) -> torch.Tensor:
    """Assert that both give the same, and give it."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode():
        wanted = module(x)
        assert torch.allclose(fast(x), wanted, atol=1e-5)
    return wanted


def test_a_block_with_such_weights_is_compiled_and_they_stay_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "store"))
    module = nn.Sequential(Layer(Scaled.of(weight())), nn.ReLU(), Layer(Scaled.of(weight(2))))
    with graphs_as_they_are():
        fast = compiled(module)
        first = same(fast, module)
        found = fast.report.as_dict()
        assert found["artefacts_compiled"] and not found["eager"], found
        mark = fast.report.mark()
        same(fast, module, rows=9)
        module[0].weight = nn.Parameter(Scaled.of(weight(3)), requires_grad=False)
        exchanged = same(fast, module)
        module[0].weight.scale.mul_(-2.0)
        scaled = same(fast, module)
        assert not torch.allclose(first, exchanged, atol=0.1) and not torch.allclose(exchanged, scaled, atol=0.1)
        new = fast.report.since(mark)
        assert not new["artefacts"] and not new["eager"], new
        module[0].weight.unit = 3  # in its place: the same tensors, said to be something else
        assert not torch.allclose(same(fast, module), scaled, atol=0.1)
        assert fast.report.since(mark)["artefacts"], "another unit is another artefact"


def test_a_block_with_an_opaque_weight_runs_eager_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_CACHE_DIR", str(tmp_path / "store"))
    module = nn.Sequential(Layer(Opaque.of(weight())), nn.ReLU(), nn.Linear(8, 8))
    with graphs_as_they_are():
        fast = compiled(module)
        same(fast, module)
        reasons = [row["reason"] for row in fast.report.as_dict()["eager"]]
    assert reasons and all("does not say what it is made of" in reason for reason in reasons), reasons
