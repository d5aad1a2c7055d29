# SPDX-License-Identifier: Apache-2.0
"""Rows of the store as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from nexfort_engine.cache import table


def row(**given: Any) -> dict[str, Any]:
    return {"info": {}, "pinned": False, "base": False, "problem": None, "shapes": [], **given}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "ready"),
        ({"pinned": True}, "pinned"),
        ({"base": True}, "base"),
        ({"pinned": True, "problem": "code.so is missing"}, "code.so is missing"),
    ],
)
def test_the_state_is_the_worst_first(given: dict[str, Any], expected: str) -> None:
    assert table.state(row(**given)) == expected


def test_ids_are_as_short_as_can_be() -> None:
    assert table.short_ids(["a" * 24, "b" * 24]) == {"a" * 24: "a" * 8, "b" * 24: "b" * 8}
    alike = ["a" * 12 + "b" * 12, "a" * 12 + "c" * 12]
    assert [len(one) for one in table.short_ids(alike).values()] == [13, 13]
    assert table.short_ids([]) == {}
    assert table.short_ids(["abc"]) == {"abc": "abc"}


@pytest.mark.parametrize(
    ("shapes", "text"), [([], "-"), (["1x2"], "1x2"), (["1x2", "3x4"], "3x4 (+1)"), (["a"] * 4, "a (+3)")]
)
def test_the_newest_shape_stands_for_all(shapes: list[str], text: str) -> None:
    assert table.shapes(row(shapes=shapes)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "never"),
        (0.0, "1970-01-01 00:00"),
        ("2026-01-02T03:04:05+00:00", "2026-01-02 03:04"),
        ("2026-01-02T03:04:05+02:00", "2026-01-02 01:04"),
        (1e300, "at an unknown time"),
        ("yesterday", "at an unknown time"),
    ],
)
def test_moments(value: str | float | None, text: str) -> None:
    assert table.moment(value) == text


def test_names_come_from_the_info() -> None:
    named = row(info={"region": "blocks.0", "kind": "Block", "family": "Flux"})
    assert (table.region(named), table.family(named)) == ("blocks.0", "Flux")
    assert table.region(row(info={"kind": "Block"})) == "Block"
    assert (table.region(row()), table.family(row())) == ("?", "?")


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb", "a\rb", "a\x00b", "a\u202eb", "a\x9bb", "x" * 5000])
def test_text_of_others_becomes_one_short_harmless_line(text: str) -> None:
    shown = table.plain(text)
    assert shown.isprintable() and len(shown) <= table.LONGEST
    assert table.plain("double_blocks.0 (größer)") == "double_blocks.0 (größer)"
