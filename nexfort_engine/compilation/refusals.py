# SPDX-License-Identifier: Apache-2.0
"""Refusals: calls that cannot be compiled, why, and for how long that holds.

A refusal holds while mappings answer the guards that it came with and names lead to what they led to. Many alike stand
for a class: its other blocks are not tried.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Protocol

from torch import nn

from ..capture.side_effects import CHANGES_GIVEN
from ..capture.types import Example
from ..guards.call_spec import Flat, changeable
from ..guards.name_guards import Dependence, Epoch
from ..guards.option_guards import checker
from ..runtime.shared_state import ForGood, Known, Refusal

log = logging.getLogger("nexfort")

# Blocks of one class that are tried although others of it were refused for one and the same reason, and none was not. A
# video's autoencoder hands blocks that change a list another one each time. Each try is a capture.
_MOST_ALIKE = 3
_MOST = 64  # remembered of one structure and call
_MOST_GIVEN_UP = 32  # times that names may change once there are all variants


class Block(Protocol):
    """The region of a call."""

    path: str
    module: nn.Module

    @property
    def kind(self) -> str:
        """The name of its class."""


class Call(Protocol):
    """What a region is called with. primary: the key under which artefacts for it are kept."""

    @property
    def region(self) -> Block:
        """What is called."""

    primary: str
    flat: Flat
    example: Example


class Refusals:
    """What networks of one kind cannot have compiled."""

    def __init__(self, known: Known) -> None:
        self._fresh: list[tuple[Call, Refusal]] = []
        self._known = known
        self._given_up: Counter[str] = Counter()  # how often names changed once there were all variants

    def of(self, wanted: Call) -> Refusal | None:
        """The refusal of a call, None where it may be compiled."""
        for check, reason in self._known.refusals.get(wanted.primary, ()):
            if check(wanted.flat.mappings):
                return check, reason
        return self._often(wanted)

    def _often(self, wanted: Call) -> Refusal | None:
        """As others of its class were, one after another."""
        code = code_of(wanted)
        none_is_compiled = code not in self._known.compiled
        for (of, _), (count, (check, reason)) in list(self._known.often.items()):
            alike = any(changeable(wanted.example.spec)) if reason == CHANGES_GIVEN else none_is_compiled
            if of == code and alike and count >= _MOST_ALIKE and check(wanted.flat.mappings):
                return check, reason
        return None

    def add(
        self, wanted: Call, guards: list[list[Any]] | None, reason: str, names: Dependence | Epoch | None = None
    ) -> None:
        """Run such calls eager while mappings answer these guards, and names lead to what they led to."""
        reads = checker(guards or [])

        def holds(mappings: list[Any]) -> bool:
            return reads(mappings) and (names is None or names.holds())

        refusal = holds, ForGood.of(reason, guards)
        known = self._known.refusals.setdefault(wanted.primary, [])
        if len(known) >= _MOST:
            del known[0]
        known.append(refusal)
        self._fresh.append((wanted, refusal))
        place = (code_of(wanted), reason)
        self._known.often[place] = (self._known.often.get(place, (0, refusal))[0] + 1, refusal)
        log.info("Nexfort: %s (%s) runs eager: %s", wanted.region.path, wanted.region.kind, reason)

    def add_while_names_stay(self, wanted: Call, reason: str, alike: str) -> None:
        """Run such calls eager until a name leads elsewhere, which may be back; where names keep changing, for good.

        What there is serves other calls. alike: what is in the reasons of others, which this one replaces.
        """
        self._given_up[wanted.primary] += 1
        names = Epoch(self._known.watched) if self._given_up[wanted.primary] <= _MOST_GIVEN_UP else None
        known = self._known.refusals.setdefault(wanted.primary, [])
        known[:] = [one for one in known[-_MOST:] if alike not in one[1]]
        known.append(((lambda _: names is None or names.holds()), reason))
        log.info("Nexfort: %s (%s) runs eager: %s", wanted.region.path, wanted.region.kind, reason)

    def taken(self) -> list[tuple[Call, Refusal]]:
        """Those that were added since this was asked last."""
        found, self._fresh = self._fresh, []
        return found

    def take_back(self, refused: list[tuple[Call, Refusal]]) -> None:
        """Forget refusals: eager refuses the call, too, that they came of."""
        for wanted, refusal in refused:
            if refusal in self._known.refusals[wanted.primary]:
                self._known.refusals[wanted.primary].remove(refusal)
            place = (code_of(wanted), str(refusal[1]))
            count, of_first = self._known.often[place]
            self._known.often[place] = count - 1, of_first


def code_of(wanted: Call) -> str:
    """The name of the class whose code a call runs."""
    kind = type(wanted.region.module)
    return f"{kind.__module__}.{kind.__qualname__}"
