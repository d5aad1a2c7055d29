# SPDX-License-Identifier: Apache-2.0
"""What is said of an options text while it is typed: what is wrong with it, and the words that the last one may become.

It changes nothing and begins nothing: the text is checked again before the workflow runs.
"""

from __future__ import annotations

import re
from typing import Any

MOST = 6  # words that are offered
_WORD = re.compile(r"[\w.\-]+$")


def told(text: str) -> dict[str, Any]:
    """{"problem", "words", "typed"}: one sentence or "", and what the `typed` characters at the end may become."""
    found = _WORD.search(text)
    typed = found[0] if found else ""
    return {"problem": _problem(text), "words": _words(typed), "typed": len(typed)}


def _problem(text: str) -> str:
    from .compile_inputs import MEMORY_FORMATS, MODES, read_config

    try:
        read_config(MODES[0], True, MEMORY_FORMATS[0], text)
    except ValueError as error:
        return str(error).split(" Valid: ")[0]
    return ""


def _words(typed: str) -> list[str]:
    """Words that begin so, else those with a part that does."""
    from nexfort_engine.config.options import KEYS, MEMORY_FORMATS, OPTIONS, TOKENS

    if not typed:
        return []
    low = typed.lower()
    every = dict.fromkeys((*TOKENS, *KEYS, *MEMORY_FORMATS, *OPTIONS))
    if typed in every:
        return []
    found = [word for word in every if word.lower().startswith(low)]
    found += [word for word in every if word not in found and re.search(rf"[._\-]{re.escape(low)}", word.lower())]
    return found[:MOST]
