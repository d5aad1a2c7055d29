# SPDX-License-Identifier: Apache-2.0
"""What a trace knows of sizes, kept simple as it learns which of them divide which.

A shape environment of torch knows relations, many of them with quotients rounded down. Once it learns that a size is
divisible by another it simplifies every one of them anew. A block that reshapes much learns that again and again, and
one of LTX-2's has 800 relations by then: that was half of its capture (torch 2.11, 2026-11). Here those relations are
simplified that the new fact, or a symbol that was replaced since, occurs in. So are those with a greatest number, for
which ranges count as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from ..system.process_settings import replaced


@contextmanager
def few_simplified() -> Iterator[None]:
    """Inside the block shape environments simplify those relations that change.

    Replaces a method of torch's for the length of the block; the caller holds the capture's lock.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original: Callable[..., Any] = ShapeEnv._maybe_evaluate_static
    known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()

    @functools.wraps(original)  # with what else its callers take from it
    def maybe_evaluate_static(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_resimplify_floor_div_axioms", False):
            self._resimplify_floor_div_axioms = False
            known.setdefault(self, _Known()).follow(self)
        return original(self, *args, **kwargs)

    with replaced(ShapeEnv, "_maybe_evaluate_static", maybe_evaluate_static):
        yield


class _Known:
    """What was known of an environment's sizes when its relations were last simplified."""

    def __init__(self) -> None:
        self._divisible: set[Any] = set()
        self._replaced: set[Any] = set()
        self._remainders: dict[Any, frozenset[Any]] = {}  # of the quotients that are rounded down, by relation
        self._symbols: dict[Any, frozenset[Any]] = {}
        self._mixed: dict[Any, bool] = {}  # whether it has a greatest number beside a quotient

    def follow(self, env: Any) -> None:
        """Simplify the relations that what is new occurs in, until no more of them change."""
        new, exchanged = env.divisible - self._divisible, env.replacements.keys() - self._replaced
        self._divisible, self._replaced = set(env.divisible), set(env.replacements)
        left = [
            one for one in env.axioms if self._look(one) & new or self._symbols[one] & exchanged or self._mixed[one]
        ]
        while left:
            relation = left.pop()
            simple = env.simplify(relation)
            if simple in env.axioms:
                continue
            env.axioms[simple] = env.axioms[relation]
            if self._look(simple) & self._divisible:
                left.append(simple)

    def _look(self, relation: Any) -> frozenset[Any]:
        """The remainders that are 0 where the relation's quotients are whole."""
        if relation not in self._remainders:
            from torch.utils._sympy.functions import FloorDiv, Max, Mod

            quotients = relation.atoms(FloorDiv) if relation.has(FloorDiv) else ()
            self._remainders[relation] = frozenset(Mod(*quotient.args) for quotient in quotients)
            self._symbols[relation] = frozenset(relation.free_symbols) if quotients else frozenset()
            self._mixed[relation] = bool(quotients) and relation.has(Max)
        return self._remainders[relation]
