# SPDX-License-Identifier: Apache-2.0
"""Module fingerprint: what a network is between its regions, as flat lists, so that a change of it shows.

A replayed step runs none of the network's own code. So whatever that code would have consulted is compared: attributes
that are plain values, small containers of such, functions that were put on a module, submodules, hooks, replaced
forwards, and names that came or went.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import nn

from ..modules.tree import INTERNAL, PLAIN, Tree

_MOST_ITEMS = 64  # of a container that is looked into
_Slots = tuple[list[dict[str, Any]], list[str]]


class ModuleFingerprint:
    """The modules of a network outside its regions, as they are now.

    A region itself is looked at too, for hooks and another forward: they run around its artefact.
    """

    def __init__(self, root: nn.Module, regions: list[nn.Module]) -> None:
        inside = {id(sub) for region in regions for sub in region.modules()}
        outside = [sub for sub in root.modules() if id(sub) not in inside or sub is root]
        found = [
            (sub.__dict__, name, value)
            for sub in outside
            for name, value in list(sub.__dict__.items())
            if name not in INTERNAL and name != "forward"
        ]
        self._plain = _slots([row for row in found if type(row[2]) in PLAIN])
        self._values = [value for _, _, value in found if type(value) in PLAIN]
        self._containers = [(own, name, _copy(value)) for own, name, value in found if _is_plain_container(value)]
        functions = [row for row in found if callable(row[2]) and not isinstance(row[2], (nn.Module, type))]
        self._put_on = _slots(functions)
        self._functions = [value for _, _, value in functions]
        self._tables = [sub.__dict__ for sub in outside]
        self._names = [_public(table) for table in self._tables]
        self._tree = Tree(outside, own_forwards=[*outside, *regions])
        self.hooked = self._tree.patched

    def unchanged(self) -> bool:
        """Whether everything is as it was."""
        if not self._tree.unchanged():
            return False
        if list(map(dict.get, *self._plain)) != self._values:
            return False
        if not all(map(is_, map(dict.get, *self._put_on), self._functions)):
            return False
        if list(map(_public, self._tables)) != self._names:
            return False
        return all(_same(own.get(name), value) for own, name, value in self._containers)


def _slots(rows: list[tuple[dict[str, Any], str, Any]]) -> _Slots:
    return [own for own, _, _ in rows], [name for _, name, _ in rows]


def _public(table: dict[str, Any]) -> frozenset[str]:
    """The names that code asks for; hosts keep books under others, on every step."""
    return frozenset([name for name in table if not name.startswith("_")])


def _is_plain_container(value: Any) -> bool:
    if type(value) not in (list, tuple, dict, set) or len(value) > _MOST_ITEMS:
        return False
    items = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return all(map(PLAIN.__contains__, map(type, items)))


def _copy(value: Any) -> Any:
    return type(value)(value)


def _same(found: Any, wanted: Any) -> bool:
    """Only containers of plain values are compared: others may not say whether they are equal."""
    return type(found) is type(wanted) and _is_plain_container(found) and found == wanted
