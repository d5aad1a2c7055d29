# SPDX-License-Identifier: Apache-2.0
"""The order of a tensor's dimensions in memory."""

from __future__ import annotations

from collections.abc import Sequence


def memory_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost in memory. One of size 1 stands where it stands among sizes."""
    moved = iter(sorted((i for i, size in enumerate(sizes) if size != 1), key=lambda i: (-strides[i], i)))
    return tuple(i if size == 1 else next(moved) for i, size in enumerate(sizes))
