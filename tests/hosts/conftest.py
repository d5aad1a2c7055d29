# SPDX-License-Identifier: Apache-2.0
"""What the tests on ComfyUI's own patchers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def pair() -> Iterator[Callable[[str], Any]]:
    """Makes an eager patcher and its compiled clone by the name of their backbone; see patchers.py."""
    from patchers import pairs

    with pairs() as make_pair:
        yield make_pair
