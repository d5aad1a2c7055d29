# SPDX-License-Identifier: Apache-2.0
"""Containers that other threads change while the engine writes down what is in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from nexfort_engine.guards.module_guards import describe
from nexfort_engine.guards.value_digests import digest


class _Adds(str):
    """A word that puts another one into a container when it is written down, as another thread might just then."""

    __slots__ = ()

    add: ClassVar[Callable[[], Any]]

    def __str__(self) -> str:
        type(self).add()
        return "word"


@pytest.mark.parametrize("look", [digest, describe])
@pytest.mark.parametrize("kind", [dict, set, list])
def test_a_container_that_grows_meanwhile_is_written_as_it_was(
    monkeypatch: pytest.MonkeyPatch, kind: type, look: Callable[[Any], Any]
) -> None:
    first, then = _Adds("first"), _Adds("then")
    held: Any = {first: 1, then: 2} if kind is dict else kind([first, then])
    put = {dict: lambda: held.update({f"new{len(held)}": 3}), set: lambda: held.add(f"new{len(held)}")}
    monkeypatch.setattr(_Adds, "add", put.get(kind, lambda: held.append("new")), raising=False)
    look(held)
    assert len(held) > 2, "it has grown"
