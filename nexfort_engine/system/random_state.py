# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are drawn aside: what is drawn after a block are the numbers that would have come without it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def drawn_aside(devices: Sequence[int] = ()) -> Iterator[None]:
    """Put back the states of torch's, Python's and numpy's own generators at the end.

    devices: numbers of the CUDA devices whose generators count as well.
    """
    numpy = sys.modules.get("numpy")
    python = random.getstate()
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
