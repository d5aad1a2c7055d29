# SPDX-License-Identifier: Apache-2.0
"""Pictures of few steps: what their graph costs is spread over several, so that none takes longer than eager.

An observed step takes several times as long as others, and so does a capture. In a picture of four steps neither is
made up for (FLUX.2 Klein 9B, H200: 0.84 s at a new size with both, 0.67 s eager, 2026-11-28). So the first picture of
its sizes runs region by region, the second one is observed in its first step, and the third one captures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..runtime.engine_state import EngineState, Picture
from ..runtime.lru_mapping import Recent

MANY = 12  # steps of a picture that makes up for both
_MOST_CALLS = 512  # combinations of sizes of which the picture is remembered


class FewSteps:
    """In which picture of few steps something was done last for calls of each kind. Used by one thread at a time."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._now: Picture | None = None
        self._last: Recent[Any, Callable[[], object]] = Recent(_MOST_CALLS)

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step begins."""
        picture = self._state.picture(args, kwargs)
        self._now = picture if picture is not None and 0 < picture.steps < MANY else None

    def waits(self, key: Any) -> bool:
        """Whether neither an observed step nor a capture is for this picture: it is the first, or had one of them."""
        if self._now is None:
            return False
        last = self._last.get(key)
        if last is None:
            self.mark(key)
            return True
        return last() is self._now.name

    def mark(self, key: Any) -> None:
        """This picture has had its part."""
        if self._now is not None:
            self._last[key] = self._now.reference()
