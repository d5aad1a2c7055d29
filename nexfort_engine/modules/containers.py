# SPDX-License-Identifier: Apache-2.0
"""Containers of a module's own: lists and dictionaries in which its code may keep tensors for a later call."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from .module_keys import is_by_modules
from .tree import INTERNAL

Place = tuple[str, str, str]  # path of the module, attribute, kind of container
_KINDS = (list, dict)
_DEPTH = 3  # of containers in containers


class OwnContainers:
    """The containers of a module tree, looked for once: which of them may hold what is kept, each time it is asked."""

    def __init__(self, module: nn.Module, besides: Collection[str] = ()) -> None:
        """besides: names of attributes that belong to the host."""
        self._places = [
            (path, name, sub.__dict__)
            for path, sub in module.named_modules()
            for name, value in list(sub.__dict__.items())
            if type(value) in _KINDS
            and name not in besides
            and name not in INTERNAL
            and not name.startswith("_nexfort")
        ]

    def now(self) -> tuple[tuple[Place, ...], list[Any]]:
        """Where they are and themselves: those that are empty, with tensors or places for some, or by modules.

        Others hold settings and numbers, which are attributes like others.
        """
        places: list[Place] = []
        found = []
        known: dict[int, bool] = {}  # of those that are looked at: many modules may hold one
        for path, name, table in self._places:
            value = table.get(name)
            if type(value) not in _KINDS:
                continue
            if id(value) not in known:
                known[id(value)] = not value or _may_keep(value, _DEPTH) or is_by_modules(value)
            if known[id(value)]:
                places.append((path, name, type(value).__name__))
                found.append(value)
        return tuple(places), found


def _may_keep(value: Any, depth: int) -> bool:
    if value is None or isinstance(value, torch.Tensor):
        return True
    if not depth or type(value) not in (list, dict, tuple):
        return False
    items = value.values() if type(value) is dict else value
    return any(_may_keep(item, depth - 1) for item in items)


def in_two_places(values: Any) -> bool:
    """Whether a list or a dictionary among these, or in one of them, is reached by two ways."""
    seen: set[int] = set()

    def again(value: Any, depth: int) -> bool:
        if type(value) in _KINDS:
            if id(value) in seen:
                return True
            seen.add(id(value))
        elif type(value) is not tuple:
            return False
        items = value.values() if type(value) is dict else value
        return depth > 0 and any(again(item, depth - 1) for item in items)

    return any(again(value, _DEPTH) for value in values)


_CONTAINERS = (list, dict, set, collections.deque)
_KEPT = (*_CONTAINERS, torch.Tensor)  # of these `left_alone` says what they were


@contextlib.contextmanager
def left_alone(root: nn.Module, besides: Collection[str]) -> Iterator[None]:
    """Put back the tensors that modules hold, and what is in their containers: some keep them for their next call.

    Other values that a network puts on its modules stay for the captures; `put_back` is for these. besides: names of
    attributes that belong to the host.
    """
    before: list[Any] = []
    inner: list[tuple[Any, list[Any]]] = []
    for sub in root.modules():
        for table in (sub.__dict__, sub._buffers):
            names = [k for k, v in list(table.items()) if _is_state(v) and k not in besides and k not in INTERNAL]
            before.append((table, set(table), [(k, table[k], items_of(table[k])) for k in names]))
            inner += [one for k in names for one in _below(table[k])]
    try:
        yield
    finally:
        for table, there, was in before:
            new = [name for name in table.keys() - there if isinstance(table[name], torch.Tensor)]
            for name in new:
                if name not in besides:
                    del table[name]
            for name, value, items in was:
                now = table.get(name)
                if now is not value and (isinstance(value, torch.Tensor) or isinstance(now, torch.Tensor)):
                    table[name] = value
                refill(value, items)
        for value, items in inner:
            refill(value, items)


@contextlib.contextmanager
def put_back(root: nn.Module, besides: Collection[str]) -> Iterator[None]:
    """Put back what else modules hold: plain values, objects, submodules. besides: as above.

    The call that is under way goes on with them: its network puts others there before a later block. What was not there
    stays: a host may have made it once, with more that depends on it.
    """
    before = []
    for sub in root.modules():
        for table in (sub.__dict__, sub._modules):
            before.append((table, {k: v for k, v in list(table.items()) if _is_put_back(k, v, besides)}))
    try:
        yield
    finally:
        for table, was in before:
            for name, value in was.items():
                if (now := table.get(name)) is not value and not isinstance(now, _KEPT):
                    table[name] = value


def _is_put_back(name: str, value: Any, besides: Collection[str]) -> bool:
    is_ours = name == "forward" or name.startswith(("_nexfort", "nexfort"))
    return not is_ours and name not in INTERNAL and name not in besides and not isinstance(value, _KEPT)


def _is_state(value: Any) -> bool:
    return value is None or type(value) in _CONTAINERS or isinstance(value, torch.Tensor)


def items_in(value: Any) -> list[Any]:
    """What is in a container, of a dict its items; a class's own methods are not asked."""
    if issubclass(type(value), dict):
        return list(dict.items(value))
    for kind in (list, tuple, set, frozenset, collections.deque):
        if issubclass(type(value), kind):
            return list(kind.__iter__(value))
    return []


def items_of(value: Any) -> list[Any]:
    return items_in(value) if type(value) in _CONTAINERS else []


def _below(value: Any, depth: int = _DEPTH) -> list[tuple[Any, list[Any]]]:
    """The containers in a container, and in those, with what is in each."""
    found = []
    for item in items_of(value):
        inner = item[1] if isinstance(value, dict) else item
        if depth and type(inner) in (list, dict):
            found += [(inner, items_of(inner)), *_below(inner, depth - 1)]
    return found


def refill(value: Any, items: list[Any]) -> None:
    """Give a container what was in it; it stays the one that others hold. A class's own methods are not asked."""
    if are_same(items_in(value), items):
        return
    if issubclass(type(value), list):
        list.__setitem__(value, slice(None), items)
        return
    kind: Any = next(one for one in (collections.OrderedDict, *_CONTAINERS) if issubclass(type(value), one))
    kind.clear(value)
    (kind.extend if kind is collections.deque else kind.update)(value, items)


def are_same(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists of items are of the same objects, in one order."""
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]
    return one is other
