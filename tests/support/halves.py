# SPDX-License-Identifier: Apache-2.0
"""How the contracts are shared out between two processes, by their backbone."""

from __future__ import annotations


def half_of(backbone: str) -> int:
    """In which of the two processes the contracts of a backbone run; "0" and "1" stand for themselves."""
    return sum(backbone.encode()) % 2
