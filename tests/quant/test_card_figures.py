# SPDX-License-Identifier: Apache-2.0
"""Figures of the user's own card: kept and read back, a part of keys, and decisive in the place of what is brought."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import nexfort_engine
from nexfort_engine.cache.sidecar import remember
from nexfort_engine.cache.store import Store
from nexfort_engine.config.compile_config import CompileConfig
from nexfort_engine.engine import Engine
from nexfort_engine.kernels.scaled_linear import choice
from nexfort_engine.passes.low_precision import FP8, gain
from nexfort_engine.quant import card_figures
from nexfort_engine.quant.card_figures import ENOUGH, CardFigures, card_of, file_name, key_part, stored
from nexfort_engine.quant.cost_model import A100, H200

NAME = "Card of a test"
VERSION = str(torch.__version__)
LAYERS = [(3840, 3840), (-10240, 3840), (3072, 12288), (5120, 5120), (9216, 3072)]
positive = st.floats(1e-3, 1e16)


@pytest.fixture(autouse=True)
def _as_brought() -> Iterator[None]:
    """Whatever a test has hold ends with it."""
    yield
    card_figures.use(None)
    card_figures._of_card.cache_clear()


def figures(ratio: float, count: int = ENOUGH, form: choice.Form = choice.FORMS[2]) -> CardFigures:
    """Of a card whose kernels take so much of the host's time."""
    layers = {layer: choice.Measured(form, 100.0 * ratio, 100.0) for layer in LAYERS[:count]}
    return CardFigures(NAME, VERSION, "2026-11-29", {}, layers)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds one card, of which nothing is brought."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: NAME)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    monkeypatch.setattr("nexfort_engine.compilation.lookup._int8_layers_missing", lambda: None)


@settings(max_examples=40)
@given(
    rates=st.dictionaries(st.sampled_from(card_figures.RATES), positive),
    layers=st.dictionaries(
        st.tuples(st.integers(-30000, 30000), st.integers(1, 30000)),
        st.builds(
            choice.Measured, st.sampled_from([*choice.FORMS, *choice.WITH_UP, choice.GROUPED]), positive, positive
        ),
        max_size=6,
    ),
)
def test_what_is_kept_is_read_back(rates: dict[str, float], layers: dict[Any, choice.Measured]) -> None:
    found = CardFigures(NAME, VERSION, "2026-11-29", rates, layers)
    again = CardFigures.from_dict(json.loads(json.dumps(found.as_dict())))
    assert again == found and again.digest() == found.digest()
    assert found.digest() != found.with_rate("half", 12345.0).digest()


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.pop("layers"),
        lambda told: told.update(rates=[1]),
        lambda told: told.update(layers=[[1, 2, {"rows": 8}, 1.0, 1.0]]),
        lambda told: told["layers"][0].__setitem__(3, -1.0),
        lambda told: told["layers"][0].__setitem__(4, float("nan")),
        lambda told: told["layers"][0][2].update(rows=7),
        lambda told: told.update(torch="0.1"),
        lambda told: told.update(name="another card"),
    ],
)
def test_a_file_that_says_something_else_is_as_none(change: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    told = figures(0.5).as_dict()
    remember(tmp_path, file_name(NAME), told)
    assert stored(tmp_path, NAME) == figures(0.5)
    change(told)
    remember(tmp_path, file_name(NAME), told)
    assert stored(tmp_path, NAME) is None


@pytest.mark.parametrize(
    ("ratio", "count", "pays"), [(0.5, ENOUGH, True), (0.99, ENOUGH, False), (2.0, 5, False), (0.5, ENOUGH - 1, None)]
)
@pytest.mark.usefixtures("on_card")
def test_kernels_for_int8_files_are_on_where_they_pay(
    ratio: float, count: int, pays: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card of which nothing is brought, they are off where too little was measured; on one that is brought, on."""
    tmp_path.chmod(0o700)
    remember(tmp_path, file_name(NAME), figures(ratio, count).as_dict())
    assert figures(ratio, count).int8_pays is pays
    for card, brought in (((8, 6), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, card=card: card)
        engine = Engine(torch.nn.Linear(8, 8), CompileConfig(), Store(tmp_path))
        found = engine.builder.finder.options("cuda")
        assert found["nexfort.int8_linear"] is (brought if pays is None else pays)
        assert found["nexfort.card"] == figures(ratio, count).as_dict()


@pytest.mark.usefixtures("on_card")
def test_the_user_s_word_counts_more_than_figures(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    remember(tmp_path, file_name(NAME), figures(2.0).as_dict())
    config = CompileConfig.parse({"options": {"fuse.int8_linear": True}})
    assert Engine(torch.nn.Linear(8, 8), config, Store(tmp_path)).builder.finder.options("cuda")["nexfort.int8_linear"]


@pytest.mark.usefixtures("on_card")
def test_who_measures_anew_compiles_anew(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert key_part(tmp_path, "cuda") == key_part(None, "cuda") == {}
    found = set()
    for ratio in (0.5, 0.6):
        remember(tmp_path, file_name(NAME), figures(ratio).as_dict())
        card_figures._of_card.cache_clear()
        found.add(key_part(tmp_path, "cuda")["figures"])
    assert len(found) == 2 and key_part(tmp_path, "cpu") == {}


def test_a_layer_takes_the_form_that_was_measured() -> None:
    card = (9, 0)
    before = choice.form(card, 3840, 3840, few=False, up=False)
    assert not choice.loses(card, 3840, 3840)
    card_figures.use_told(figures(1.5).as_dict())
    assert choice.loses(card, 3840, 3840) and choice.form(card, 3840, 3840, few=False, up=False) == choice.FORMS[2]
    assert not choice.loses(card, 3072, 3072), "what the user did not measure is as it is brought"
    card_figures.use_told(None)
    assert choice.form(card, 3840, 3840, few=False, up=False) == before != choice.FORMS[2]


def test_matmuls_are_estimated_with_the_card_s_own_rates() -> None:
    assert card_of(FP8) is H200 and card_of(torch.int8) is A100
    assert gain(4096, 4096, 4096) > 0
    slow = CardFigures(NAME, VERSION, "2026-11-29", {"half": 100e12, "fp8": 90e12, "memory": 1e12})
    card_figures.use(slow)
    assert (card_of(FP8).half, card_of(FP8).narrow, card_of(FP8).memory) == (100e12, 90e12, 1e12)
    assert gain(4096, 4096, 4096) < 0
    assert card_of(torch.int8) is A100, "the rate of int8 was not measured"


def test_a_worker_lowers_with_the_figures_of_its_engine(tmp_path: Path) -> None:
    """They come among the settings, as a process that has no cache gets them."""
    from nexfort_engine.lowering import inductor

    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    told = figures(0.5).as_dict()
    with pytest.raises(Exception):  # noqa: B017  nothing can be lowered of it
        inductor.lower_graph(graph, [], tmp_path / "payload", {"nexfort.card": told})
    assert card_figures._current == figures(0.5)
    assert nexfort_engine.__version__
