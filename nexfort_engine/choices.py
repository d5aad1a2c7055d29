# SPDX-License-Identifier: Apache-2.0
"""Choices: how Inductor shapes a kernel, where its rule of thumb leaves time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LONGEST_ROW = 4096


@contextmanager
def whole_rows() -> Iterator[None]:
    """Inside the block a sum over one row of at most LONGEST_ROW numbers keeps the row in registers.

    Inductor does so up to 1024 and reads longer rows twice. A layer norm of 2048 rows of 1280 with a sum before it took
    5.8 microseconds so, 12.1 otherwise; 4608 rows of 3072: 32 and 41 (fp16, H200, torch 2.11, 2026-11).
    """
    from torch._inductor import choices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class WholeRows(choices.InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            length = features.reduction_numel
            known = getattr(length, "is_number", False)
            if known and int(length) <= LONGEST_ROW and features.get_reduction_hint() == ReductionHint.INNER:
                return True
            return choices.InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    with V.set_choices_handler(WholeRows()):
        yield
