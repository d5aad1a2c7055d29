# SPDX-License-Identifier: Apache-2.0
"""The cards that scripts compile kernels for, by their compute capability. No test lives here."""

from __future__ import annotations

import sys

ALL = (80, 86, 89, 90, 100, 120)
FEW = (90,)  # the one that is measured


def cards(since: int = ALL[0]) -> list[int]:
    """The few since a card, or all that are there since it where a script is called with "all"."""
    return [card for card in (ALL if "all" in sys.argv[1:] else FEW) if card >= since]
