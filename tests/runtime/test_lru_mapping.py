# SPDX-License-Identifier: Apache-2.0
"""What is remembered of the sizes of calls is bounded, and what is in use stays remembered."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from net_pairs import Net, Pair
from subjects import graphs_as_they_are

from nexfort_engine.compilation import lookup, requests
from nexfort_engine.dispatch import region as dispatch
from nexfort_engine.runtime.lru_mapping import Recent

MOST = 16  # sizes, in the place of hundreds


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A network that remembers few sizes, after its first call."""
    monkeypatch.setattr(dispatch, "MOST_SIZES", MOST)
    monkeypatch.setattr(lookup, "MOST_NOTED", 4 * MOST)
    monkeypatch.setattr(requests, "MOST_CALLS", 4 * MOST)
    with graphs_as_they_are():
        made = Pair(Net(), tmp_path)
        called(made, 3)
        yield made


def called(pair: Pair, *lengths: int) -> None:
    with torch.no_grad():
        for length in lengths:
            pair.compiled(torch.ones(2, length, 8))


# ---- the mapping -------------------------------------------------------------------------------------------


def test_it_is_a_dict_as_long_as_little_is_in_it() -> None:
    held: Recent[str, int] = Recent(8)
    assert held.setdefault("a", 1) == 1 == held.setdefault("a", 2) == held["a"] == held.get("a")
    held["b"] = 5
    assert "b" in held and "c" not in held and held.get("c") is None and held.get("c", 7) == 7 and held.held() == 2
    with pytest.raises(KeyError):
        held["c"]
    held.clear()
    assert "a" not in held and held.held() == 0


def test_it_never_holds_more_and_always_the_latest_half() -> None:
    held: Recent[int, int] = Recent(MOST)
    draw, asked = random.Random(0), []
    for _ in range(5000):
        key = draw.randrange(3 * MOST)
        found = held.get(key)
        assert found in (None, key)
        if found is None:
            held[key] = key
        asked.append(key)
        assert held.held() <= MOST
        latest = list(dict.fromkeys(reversed(asked[-200:])))[: MOST // 2]
        assert all(dict.__contains__(held, one) or one in held for one in latest)
    assert held.held() > MOST // 2


# ---- what is known of a network's calls --------------------------------------------------------------------


def test_sizes_that_are_known_do_not_become_more_and_more(pair: Pair) -> None:
    def known() -> int:
        return sum(region.known.held() for region in pair.engine.regions)

    called(pair, *range(4, 10))
    assert known() == 7 * len(pair.engine.regions), "each size counts"
    called(pair, *range(10, 300))
    assert all(region.known.held() <= MOST for region in pair.engine.regions)
    builder = pair.engine.builder
    assert builder.finder._noted.held() <= 4 * MOST and builder.requests._primaries.held() <= 4 * MOST
    assert not pair.report.as_dict()["eager"], "all ran compiled"


def test_further_sizes_leave_no_object_behind(pair: Pair) -> None:
    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    objects()  # what the first call left
    before = objects()
    called(pair, *range(4, 4 + MOST // 4))
    grown = objects() - before
    assert grown > MOST // 4, "what is known of a size are objects"
    called(pair, *range(100, 200))
    before = objects()
    called(pair, *range(200, 500))
    assert objects() - before < 4 * grown


def test_a_size_in_use_stays_known(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    obtain = pair.engine.builder.obtain
    monkeypatch.setattr(pair.engine.builder, "obtain", lambda *args: (asked.append(args[1]), obtain(*args))[1])
    called(pair, 50)
    assert len(asked) == len(pair.engine.regions)
    asked.clear()
    for length in range(100, 150):
        called(pair, length, 50)
    assert len(asked) == 50 * len(pair.engine.regions), "only the others were looked for"


def test_a_size_that_was_forgotten_runs_compiled_again(pair: Pair) -> None:
    called(pair, *range(4, 100))
    gained = pair.agrees(torch.ones(2, 3, 8))
    assert gained["artefacts_compiled"] == 0 and not gained["eager"]
