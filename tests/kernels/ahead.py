# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for cards that are not there. No test lives here.

Each compiled_*.py beside it has `cases`, the kernels of an operator in their forms. As a script it compiles them, for
every card where it is called with "all". benchmarks/kernels_ahead.py makes a table of all of them.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CARDS = (80, 86, 89, 90, 100, 120)  # NVIDIA's, by their compute capability
FEW = (90,)  # the one that is measured
AMD = ("gfx942", "gfx1100")  # by their architecture
SHARED = 101376  # bytes of shared memory that a block may have on the cards of NVIDIA that have the least
SHARED_OF_90 = 232448
SHARED_OF_AMD = 65536


@dataclass(frozen=True)
class Case:
    """A kernel in one form for one card.

    kinds: Triton's names of the types of arguments. rest: that of those which are neither there nor constants. even:
    names of arguments that are multiples of 16; None: all pointers. check: of what is compiled, besides.
    """

    kernel: Any
    card: int | str
    kinds: Mapping[str, str]
    constants: Mapping[str, Any]
    rest: str = ""
    even: Collection[str] | None = None
    options: Mapping[str, int] | None = None
    check: Callable[[Any], None] | None = None

    def compiled(self) -> Any:
        """What Triton compiles. Raises what Triton raises, and AssertionError where that is not as it should be."""
        import triton
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        kinds = {**self.kinds, **dict.fromkeys(self.constants, "constexpr")}
        signature = {name: kinds.get(name, self.rest) for name in self.kernel.arg_names}
        pointers = [name for name, kind in signature.items() if kind.startswith("*")]
        even = set(pointers if self.even is None else self.even) - self.constants.keys()
        known = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(signature) if name in even}
        form = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = form(self.kernel, signature, dict(self.constants), known)
        made = triton.compile(source, target=self._target(), options=dict(self.options or {}))
        if isinstance(self.card, str):
            assert made.asm["hsaco"] and self.card in made.asm["amdgcn"]
        else:
            assert made.asm["cubin"] and f".target sm_{self.card}" in made.asm["ptx"]
        if self.check is not None:
            self.check(made)
        return made

    def _target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if isinstance(self.card, str):
            return GPUTarget("hip", self.card, 64 if self.card.startswith("gfx9") else 32)
        return GPUTarget("cuda", self.card, 32)


def cards(every: bool, since: int = CARDS[0]) -> list[int]:
    """The few since a card, or all that are there since it."""
    return [card for card in (CARDS if every else FEW) if card >= since]


def amd(every: bool) -> tuple[str, ...]:
    """Cards of AMD, for the kernels that run on them: all, or none."""
    return AMD if every else ()


def combined(every: bool, *choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """All combinations, or each value at least once."""
    values = [list(some) for some in choices]
    if every:
        return list(itertools.product(*values))
    return [tuple(some[at % len(some)] for some in values) for at in range(max(map(len, values)))]


def run(cases: Callable[[bool], Iterable[Case]]) -> None:
    """Compile them: what such a script does."""
    for case in cases("all" in sys.argv[1:]):
        case.compiled()


def all_cases() -> Iterator[Case]:
    """Those of all operators, for every card."""
    for file in sorted(Path(__file__).parent.glob("compiled_*.py")):
        yield from importlib.import_module(file.stem).cases(True)
