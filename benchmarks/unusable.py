# SPDX-License-Identifier: Apache-2.0
"""What a user has to set right before a benchmark can begin: one sentence, told before any long work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Unusable(Exception):
    """The text says what was found, what was expected and what to do. Scripts print it and end with exit code 2."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """The valid word that is spelled most like `word`."""
    folded = {one.lower(): one for one in valid}
    return folded[difflib.get_close_matches(word.lower(), list(folded), n=1, cutoff=0.0)[0]]
