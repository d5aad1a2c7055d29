# SPDX-License-Identifier: Apache-2.0
"""Keys of mappings that are modules, such as those of a cache in which each convolution keeps the frames before.

Another block has other modules, and another process has none of these. So guards and changes name such a key by where
the module is in the tree of the block (`OfTree`), and in each call the key is the module that is there then. Only what
is there once can be named so, and only what a mapping tells from others by its identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class OfTree:
    """A key that is a module of the block's tree, by its dotted name there."""

    path: str

    def __repr__(self) -> str:
        return f"<module {self.path}>" if self.path else "<the block itself>"


class Given(list):
    """The lists and mappings of a call. root: the block that is called, None where its modules do not count."""

    __slots__ = ("root",)

    def __init__(self, root: nn.Module | None = None) -> None:
        super().__init__()
        self.root = root


def real(key: Any, mappings: Any) -> Any:
    """A key as a call's own mappings have it; one of a module that is no longer there stays what it is."""
    if type(key) is tuple:
        return tuple([real(part, mappings) for part in key])
    root = getattr(mappings, "root", None) if type(key) is OfTree else None
    if root is None:
        return key
    try:
        return root.get_submodule(key.path)
    except AttributeError:
        return key


def is_module(key: Any) -> bool:
    """Whether a key is a module. What stands for a value is not asked: any question is a use of it."""
    return issubclass(type(key), nn.Module)


def holds_module(key: Any) -> bool:
    """Whether a key is a module or is made of some, or is what stands for one."""
    return any(map(holds_module, key)) if type(key) is tuple else type(key) is OfTree or is_module(key)


def is_by_modules(value: Any) -> bool:
    """Whether a value is a mapping with such a key."""
    return isinstance(value, dict) and any(map(holds_module, dict.keys(value)))


def is_by_identity(kind: type) -> bool:
    """Whether modules of a class are told apart by their identity alone."""
    return kind.__eq__ is nn.Module.__eq__ and kind.__hash__ is nn.Module.__hash__


def places(root: nn.Module) -> dict[int, str]:
    """The dotted names of a tree's modules by their ids, without those that are there twice and what is below them."""
    found: dict[int, str] = {}
    twice: set[str] = set()

    def look(module: nn.Module, path: str) -> None:
        if id(module) in found:
            twice.add(found[id(module)])
            return
        found[id(module)] = path
        for name, child in module._modules.items():
            if child is not None:
                look(child, f"{path}.{name}" if path else name)

    look(root, "")
    below = tuple(f"{path}." if path else "" for path in twice)
    return {at: path for at, path in found.items() if path not in twice and not path.startswith(below)}


class Named:
    """A call's mappings with the names of the block's modules in the place of keys."""

    def __init__(self, root: nn.Module | None) -> None:
        self._root = root
        self._places: Mapping[int, str] | None = None

    def key(self, key: Any) -> Any:
        """One key; that of a module without a name stays what it is."""
        if self._root is None or not holds_module(key):
            return key
        if type(key) is tuple:
            return tuple(map(self.key, key))
        if not is_module(key) or not is_by_identity(type(key)):
            return key
        if self._places is None:
            self._places = places(self._root)
        place = self._places.get(id(key))
        return key if place is None else OfTree(place)

    def within(self, value: Any) -> Any:
        """A mapping, with those in it; itself where no key is a module."""
        if not isinstance(value, dict):
            return value
        found = {self.key(key): self.within(item) for key, item in value.items()}
        same = all(map(_are_one, found.items(), value.items()))
        return value if same else found


def _are_one(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] is other[0] and one[1] is other[1]
