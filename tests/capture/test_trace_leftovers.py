# SPDX-License-Identifier: Apache-2.0
"""Tensors without data in what functions reach: found wherever they lie, and taken out of the innermost thing."""

from __future__ import annotations

import collections
import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nexfort_engine.capture.trace_leftovers import holds_fake, remove_fakes

HELD: Any = None


class _Slotted:
    __slots__ = ("other", "table")


class _Object:
    """With something of its class's, and of its own."""

    table = None

    def __init__(self, value: Any) -> None:
        self.table, self.rest = value, 3


def _slotted(value: Any) -> _Slotted:
    found = _Slotted()
    found.table = value
    return found


def _reaches() -> Any:
    return HELD


def _names(code: types.CodeType) -> tuple[str, ...]:
    return code.co_names


WAYS: dict[str, Any] = {
    "a list": lambda fake: [1, fake, 2],
    "a dict in a dict": lambda fake: {"a": {"b": fake, "c": 1}},
    "a deque": lambda fake: collections.deque([1, fake]),
    "a tuple in a list": lambda fake: [(1, fake)],
    "a user's dict": lambda fake: collections.UserDict(a=fake),
    "an attribute": _Object,
    "a namespace": lambda fake: types.SimpleNamespace(inner=_Object(fake)),
    "a slot": _slotted,
    "itself": lambda fake: fake,
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_found_and_taken_out(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    held = WAYS[way](fake)
    monkeypatch.setitem(globals(), "HELD", held)
    assert holds_fake(held)
    assert [one is fake for one in remove_fakes([_reaches], _names)] == [True]
    assert not holds_fake(HELD) and not remove_fakes([_reaches], _names)


def test_what_has_data_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"a": torch.ones(2), "b": [_Object(torch.zeros(1)), 2]}
    monkeypatch.setitem(globals(), "HELD", held)
    assert not holds_fake(held) and remove_fakes([_reaches], _names) == []
    assert HELD is held and list(held) == ["a", "b"] and held["b"][0].table is not None
