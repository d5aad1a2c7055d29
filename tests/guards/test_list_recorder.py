# SPDX-License-Identifier: Apache-2.0
"""Lists that a block is given and changes: what an artefact of it may serve, and what the caller finds in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probe import Probe, T, block_of, x

from nexfort_engine.guards.option_recorder import Refused

Lists = tuple[list[Any], list[Any]]


def walk(cache: list[Any], places: list[int], h: T, steps: list[tuple[Any, ...]]) -> T:
    """A block's code as data: steps that read a list of entries, put things into it and count places."""
    given_h = h
    for step in steps:
        kind, *more = step
        try:
            if kind == "read":
                h = _shown(h, cache[_key(more[0], places)])
            elif kind == "write":
                cache[_key(more[0], places)] = _value(more[1], cache, h, given_h)
            elif kind == "count":
                places[0] += more[0]
            elif kind == "length":
                h = h * len(cache)
            elif kind == "any":
                h = h + 1 if cache else h - 1
            elif kind == "all":
                for entry in cache:
                    h = _shown(h, entry)
            elif kind == "append":
                cache.append(_value(more[0], cache, h, given_h))
            elif kind == "pop":
                h = _shown(h, cache.pop(*more))
            elif kind == "delete":
                del cache[more[0]]
            elif kind == "insert":
                cache.insert(more[0], h)
            elif kind == "clear":
                cache.clear()
            elif kind == "slice":
                cache[more[0] : more[1]] = [h, None]
            elif kind == "seek" and None in cache:
                h = h * 3
        except IndexError:
            h = h - 7
    return h


def _key(key: Any, places: list[int]) -> Any:
    return places[0] + key[1] if isinstance(key, tuple) else key


def _shown(h: T, entry: Any) -> T:
    if entry is None:
        return h + 1
    if isinstance(entry, torch.Tensor):
        return h + entry.mean(1, keepdim=True)
    if entry == "Rep":
        return h * 2
    if isinstance(entry, list):
        return _shown(h, entry[0]) if entry else h * 5
    return h + entry  # a number


def _value(what: str, cache: list[Any], h: T, given_h: T) -> Any:
    if what == "entry":
        return cache[0]
    return {
        "none": None,
        "text": "Rep",
        "made": h,
        "view": h[:, -2:],
        "given": given_h,
        "new": [h, None],
        "same": cache,
    }[what]


KEYS = st.one_of(st.integers(-3, 3), st.tuples(st.just("at"), st.integers(-1, 2)))
VALUES = st.sampled_from(["none", "text", "made", "view", "given", "new", "entry"])
STEPS = st.one_of(
    st.tuples(st.just("read"), KEYS),
    st.tuples(st.just("write"), KEYS, VALUES),
    st.tuples(st.just("count"), st.integers(1, 2)),
    st.tuples(st.just("append"), VALUES),
    st.tuples(st.just("pop"), st.sampled_from([0, 0, -1, 1])),
    st.tuples(st.just("delete"), st.sampled_from([0, -1, 1])),
    st.tuples(st.just("insert"), st.integers(0, 2)),
    st.tuples(st.just("slice"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.sampled_from(["length", "any", "all", "clear", "seek"])),
)
ENTRIES = st.lists(st.sampled_from([None, "Rep", "tensor", "tensor", "short", "list"]), min_size=0, max_size=5)


def entries(kinds: list[Any]) -> list[Any]:
    made = {"tensor": lambda: x(seed=5), "short": lambda: x(length=3, seed=6), "list": lambda: [x(seed=7)]}
    return [made[kind]() if kind in made else kind for kind in kinds]


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(STEPS, min_size=1, max_size=6),
    first=ENTRIES,
    place=st.integers(0, 3),
    others=st.lists(st.tuples(ENTRIES, st.integers(0, 3)), min_size=3, max_size=6),
)
def test_a_graph_serves_the_forms_of_a_list_that_it_leaves_as_the_block_does(
    steps: list[Any], first: list[Any], place: int, others: list[tuple[list[Any], int]]
) -> None:
    block = block_of(lambda b, h, cache, places: b.linear(walk(cache, places, h, steps)))
    try:
        probe = Probe(block, x(), entries(first), [place], lists=True)
    except Refused:
        return  # such a block runs eager, which is right as well
    for kinds, at in [*others, (first, place), (first, place + 1), ([*first, None], place), (first[1:], place)]:
        probe.agrees(x(3, 7, seed=2), entries(kinds), [at])


def causal(b: Any, h: T, cache: list[Any], places: list[int]) -> T:
    """As convolutions of a video's autoencoder do: the last frames of the chunk before go first."""
    at = places[0]
    before, cache[at] = cache[at], None
    kept = h[:, -2:]
    h = b.linear(h if before is None or before == "Rep" else torch.cat([before, h], 1))
    cache[at] = kept
    places[0] += 1
    return h


def test_one_graph_serves_each_place_in_the_list_and_any_other_entries() -> None:
    probe = Probe(block_of(causal), x(), [None, x(seed=2), None], [1], lists=True)
    for cache, place in [
        ([x(seed=3), None], 0),
        ([None] * 9 + [x(3, 2, seed=4)], 9),
        (["Rep", x(), [x()], object], 1),
    ]:
        assert probe.agrees(x(x_batch(cache[place])), cache, [place])
    assert not probe.agrees(x(), [None, x()], [0]) and not probe.agrees(x(), ["Rep", x()], [0])
    assert probe.captured.options and not probe.captured.ints


def x_batch(entry: Any) -> int:
    return entry.shape[0] if isinstance(entry, torch.Tensor) else 2


def test_sizes_of_entries_are_conditions_and_entries_beside_them_are_none() -> None:
    probe = Probe(block_of(causal), x(), [x(seed=2), x(5, 5)], [0], lists=True)
    assert probe.agrees(x(4, 3), [x(4, 2), x(7, 1)], [0])
    assert probe.refuses(x(4, 3), [x(3, 2)], [0]), "the batches differ"


def is_number(value: Any) -> bool:
    """As libraries find out how to treat what they are given."""
    return type(value) is int


@pytest.mark.parametrize(
    "code",
    [
        lambda b, h, cache, places: h * places[0],
        lambda b, h, cache, places: h + 1 if places[0] > 1 else h - 1,
        lambda b, h, cache, places: h[:, places[0]],
        lambda b, h, cache, places: h + {2: 1.0, 3: 2.0}.get(places[0], 0.0),
        lambda b, h, cache, places: h * 2 if is_number(places[0]) else h,
    ],
    ids=["a factor", "a branch", "an index", "a key", "its type"],
)
def test_a_number_that_is_used_as_it_is_counts_with_its_value(code: Callable[..., T]) -> None:
    def block(b: Any, h: T, cache: list[Any], places: list[int]) -> T:
        cache.append(None)
        return b.linear(code(b, h, cache, places))

    probe = Probe(block_of(block), x(), [], [2], lists=True)
    assert probe.agrees(x(3), [None], [2])
    assert not probe.agrees(x(3), [None], [3])


def test_what_torch_reads_past_a_list_s_methods_is_seen() -> None:
    def joins(b: Any, h: T, cache: list[Any]) -> T:
        found = b.linear(torch.cat(cache, 1))
        cache[0] = h
        return found

    probe = Probe(block_of(joins), x(), [x(), x(seed=2)], lists=True)
    assert probe.agrees(x(3), [x(3), x(3, 4)])
    assert not probe.agrees(x(3), [x(3), x(3), x(3)]), "the list is longer"


def test_mappings_in_lists_and_lists_in_mappings_are_changed_too() -> None:
    def keeps(b: Any, h: T, cache: dict[str, Any], more: list[Any]) -> T:
        if "k" in cache:
            h = h + cache.pop("k")
        cache["k"] = b.linear(h)
        cache["seen"].append(h)
        more[0]["count"] += 1
        more[0].setdefault("first", cache["k"])
        return cache["k"]

    probe = Probe(block_of(keeps), x(), {"k": x(), "seen": []}, [{"count": 4}], lists=True)
    assert probe.agrees(x(3, 4), {"k": x(3, 4), "seen": [None, 1]}, [{"count": 17, "other": 3}])
    assert not probe.agrees(x(3, 4), {"seen": []}, [{"count": 1}])
    assert not probe.agrees(x(3, 4), {"k": x(3, 4), "seen": ()}, [{"count": 17}])
    assert not probe.agrees(x(3, 4), {"k": x(3, 4), "seen": []}, [{"count": 17, "first": 3}])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (lambda b, h, cache: cache.sort(), "another order"),
        (lambda b, h, cache: cache.append({h}), "puts a set"),
        (lambda b, h, cache: cache.append(object()), "puts a object"),
        (lambda b, h, cache: cache[1].add(h), "an entry of a list that it is given"),
        (lambda b, h, cache: cache.append(h.shape[1] * 2 + 1), "puts a SymInt"),
        (lambda b, h, cache: cache.append(copy.deepcopy(cache)), "copies of all"),
        (lambda b, h, cache: cache[0].add_(1), "writes to a tensor"),
    ],
)
def test_what_cannot_be_done_again_is_refused(changes: Any, reason: str) -> None:
    def block(b: Any, h: T, cache: list[Any]) -> T:
        changes(b, h, cache)
        return b.linear(h)

    with pytest.raises(Refused, match=reason):
        Probe(block_of(block), x(), [x(), set()], lists=True)
