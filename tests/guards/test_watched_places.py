# SPDX-License-Identifier: Apache-2.0
"""Places that artefacts depend on come and go one by one, and are compared as if all had come at once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from nexfort_engine.capture.reached_names import rows_of
from nexfort_engine.capture.source_hashes import walked
from nexfort_engine.guards.name_guards import Dependence, Watched
from nexfort_engine.guards.name_resolver import classes_in

HERE = sys.modules[__name__]


def first(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def second(x: torch.Tensor) -> torch.Tensor:
    return x + 1


OWN = {"first": first, "second": second}


class One(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return first(x)


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return second(x)


class Both(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return second(first(x))


NAMES = {One: {"first"}, Two: {"second"}, Both: {"first", "second"}}


@pytest.fixture(scope="module")
def rows() -> dict[type, Sequence[Any]]:
    """What each class reaches by name, as its capture noted it."""
    found = {}
    for kind in NAMES:
        with walked() as codes:
            kind()(torch.zeros(1))
        found[kind], _ = rows_of(kind(), codes, {})
    return found


steps = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from(list(NAMES))),
        st.tuples(st.just("go"), st.integers(0, 5)),
        st.tuples(st.just("replace"), st.sampled_from(sorted(OWN))),
        st.tuples(st.just("put back"), st.sampled_from(sorted(OWN))),
        st.tuples(st.just("look"), st.none()),
    ),
    max_size=25,
)


@given(steps=steps)
def test_each_holds_as_long_as_its_names_lead_to_what_they_led_to(
    steps: list[tuple[str, Any]], rows: dict[type, Sequence[Any]]
) -> None:
    watched, there = Watched(), list[tuple[type, Dependence]]()
    try:
        for what, given_ in steps:
            if what == "come":
                there.append((given_, Dependence(rows[given_], classes_in(given_()), watched)))
            elif what == "go" and there:
                del there[given_ % len(there)]
                gc.collect(0)
            elif what == "replace":
                setattr(HERE, given_, lambda t: t * 7)
            elif what == "put back":
                setattr(HERE, given_, OWN[given_])
            watched.look()
            for kind, dependence in there:
                as_before = all(getattr(HERE, name) is OWN[name] for name in NAMES[kind])
                assert dependence.holds() is as_before, (kind, what, given_)
    finally:
        for name, own in OWN.items():
            setattr(HERE, name, own)


def test_one_more_has_no_place_compared_anew(rows: dict[type, Sequence[Any]]) -> None:
    watched = Watched()
    some = [Dependence(rows[One], classes_in(One()), watched)]
    watched.look()
    epoch, places = watched.epoch, len(watched)
    some.append(Dependence(rows[Both], classes_in(Both()), watched))
    assert all(one.holds() for one in some) and watched.epoch == epoch
    assert len(watched) > places
    del some[1]
    gc.collect()
    some.append(Dependence(rows[One], classes_in(One()), watched))
    watched.look()
    assert all(one.holds() for one in some) and len(watched) == places, "what nobody depends on is watched no more"
