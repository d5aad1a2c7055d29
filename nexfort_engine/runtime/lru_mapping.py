# SPDX-License-Identifier: Apache-2.0
"""A mapping that holds what was asked for lately: what is known for the exact sizes of a call must not grow for ever.

It evicts in two ages, so that asking for a key costs next to nothing. It knows nothing of what it holds.
"""

from __future__ import annotations

from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A dict of at most `most` keys, of which the half that was asked for or set last is always among them.

    Length and iteration are of the newer age alone. Used by one thread at a time, as a dict is.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._each = max(most // 2, 1)
        self._before: dict[K, V] = {}

    def __missing__(self, key: K) -> V:
        value = self._before.pop(key)  # KeyError where it is not there either
        self[key] = value
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._each and not super().__contains__(key):
            self._before = dict(self)
            super().clear()
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._before

    def get(self, key: K, default: Any = None) -> Any:
        """The value of a key, which is then among the latest; `default` where there is none."""
        try:
            return self[key]
        except KeyError:
            return default

    def setdefault(self, key: K, default: Any = None) -> Any:
        """The value of a key, set where there was none."""
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        """Hold nothing."""
        super().clear()
        self._before = {}

    def held(self) -> int:
        """How many keys are held, older ones included."""
        return len(self) + len(self._before.keys() - self.keys())
