# SPDX-License-Identifier: Apache-2.0
"""Sizes in a graph as numbers, where they are known."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch


def hint(size: Any) -> int | None:
    """A size at the captured call; None where it depends on data."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None


def rows_of(x: torch.Tensor) -> int | None:
    """Rows of a layer's input (..., K) at the captured call; None where that depends on data."""
    return numbers_of(x.shape[:-1])


def numbers_of(sizes: Iterable[Any]) -> int | None:
    """How many numbers a tensor of these sizes has at the captured call; None where that depends on data."""
    known = [hint(size) for size in sizes]
    return None if None in known else math.prod(size or 0 for size in known)
