# SPDX-License-Identifier: Apache-2.0
"""What the engines of one network's copies share: artefacts, refusals, and what was found out about devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..guards.name_guards import Watched
from .artifact import Artefact

Refusal = tuple[Callable[[list[Any]], bool], str]  # which mappings it holds for, and the reason


class ForGood(str):
    """A reason that lies in the block or in how it is called: it stays while they do, and while its guards hold."""

    guards: list[list[Any]]

    @classmethod
    def of(cls, reason: str, guards: list[list[Any]] | None = None) -> ForGood:
        """guards: of the options of the call, as guards/option_guards.py has them."""
        found = cls(reason)
        found.guards = guards or []
        return found


@dataclass
class Known:
    """What an engine knows that would be as true of another network of the same kind. It holds no module.

    artefacts, refusals: by primary key. made: how many artefacts, by primary key, those that were there before left
    out. reported: the artefacts that the report has. often: by class and reason, how often a block was refused, and how
    the last time. compiled: classes of which some block was not. changing: paths of blocks that change lists or
    mappings that they are given or hold. split: paths of regions of which some calls cannot be captured, so that
    submodules below them are regions as well. withdrawn: reasons for which artefacts were withdrawn. off: kinds of call
    that do not pay (dispatch/compiled_share.py). images: no code is known that cannot take them with channels
    innermost. watched: what their code reaches by name.
    """

    artefacts: dict[str, list[Artefact]] = field(default_factory=dict)
    refusals: dict[str, list[Refusal]] = field(default_factory=dict)
    made: Counter[str] = field(default_factory=Counter)
    reported: set[str] = field(default_factory=set)
    often: dict[tuple[str, str], tuple[int, Refusal]] = field(default_factory=dict)
    compiled: set[str] = field(default_factory=set)
    changing: set[str] = field(default_factory=set)
    split: set[str] = field(default_factory=set)
    withdrawn: set[str] = field(default_factory=set)
    off: dict[Any, Any] = field(default_factory=dict)
    images: bool = True
    watched: Watched = field(default_factory=Watched)

    def keep_images_as_eager(self) -> None:
        """Some code cannot take images with channels innermost."""
        self.images = False
