# SPDX-License-Identifier: Apache-2.0
"""Rows of parametrised tests, of which `make test` runs a few and `make test-large` all. No test lives here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def few(every: Iterable[Any] | Mapping[str, Any], kept: int | Collection[Any]) -> list[Any]:
    """Values as pytest parameters; those that are not kept are marked as large.

    every: values, tuples of values, or a mapping from a test's id to either.
    kept: the values or ids that are kept, or how many, which then lie evenly over all of them.
    """
    rows = list(every.items()) if isinstance(every, Mapping) else [(None, value) for value in every]
    if isinstance(kept, int):
        stays = {round(number * (len(rows) - 1) / max(kept - 1, 1)) for number in range(kept)}
    else:
        stays = {at for at, (name, value) in enumerate(rows) if (value if name is None else name) in kept}
        assert len(stays) == len(kept), f"{kept} are not all among the rows"
    return [
        pytest.param(*_values(value), id=name, marks=() if at in stays else pytest.mark.large)
        for at, (name, value) in enumerate(rows)
    ]


def _values(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)
