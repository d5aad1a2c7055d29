# SPDX-License-Identifier: Apache-2.0
"""Calls that wait for what another call of their structure gets, and why a call needs an artefact of its own."""

from __future__ import annotations

from typing import Any, Protocol

from ..runtime.artifact import Artefact, GuardFailure
from .lookup import Wanted, guard_failure_of, nearer


class Maker(Protocol):
    """What makes artefacts: how many there are, and whether one more may be."""

    def made(self, primary: str) -> int:
        """How many artefacts of a structure were made here."""

    def has_many(self, wanted: Wanted, coming: int = 0) -> bool:
        """Whether there are as many as there may be, with so many that are under way."""

    def may_make(self, wanted: Wanted, failure: GuardFailure | None) -> bool:
        """Whether to make one where none fits."""


class Others:
    """Calls that wait for what others of their structure get, because it may serve them too."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._waiting: dict[str, list[tuple[Wanted, GuardFailure | None]]] = {}
        self._captured: dict[str, list[Artefact]] = {}
        self._made: dict[str, int] = {}  # how many there were of each structure before

    def add(self, wanted: Wanted, failure: GuardFailure | None) -> None:
        """failure: why artefacts that are there already do not serve it."""
        self._waiting.setdefault(wanted.primary, []).append((wanted, failure))
        self._made.setdefault(wanted.primary, self._maker.made(wanted.primary))

    def after(self, primary: str, manifest: dict[str, Any]) -> list[Wanted]:
        """After a capture of their structure: one call that it does not serve, nor those before; its own is next."""
        captured = self._captured.setdefault(primary, [])
        waiting = self._waiting.get(primary, [])
        if waiting:
            captured.append(Artefact("", primary, manifest))
        while waiting:
            wanted, nearest = waiting.pop(0)
            hidden = wanted.region.weights.hidden()
            failures = [guard_failure_of(artefact, wanted, hidden) for artefact in captured]
            for failure in failures:
                nearest = nearer(nearest, failure) if failure is not None else nearest
            coming = len(captured) - (self._maker.made(primary) - self._made[primary])  # some are there already
            if None in failures or self._maker.has_many(wanted, coming):
                continue
            if self._maker.may_make(wanted, nearest):
                wanted.explain(why_another(wanted, nearest) if wanted.region.bindings else None)
                return [wanted]
        return []


def why_another(wanted: Wanted, failure: GuardFailure | None) -> str | None:
    """Why a region needs a further artefact; None if it has none yet."""
    if failure is not None:
        return failure.reason
    # the artefacts that it runs have another primary key
    return "it is called in another way: other arguments, dtypes or memory formats" if wanted.region.bindings else None
