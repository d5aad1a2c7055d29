# SPDX-License-Identifier: Apache-2.0
"""Sentinels: what a block is shown in the place of a value of its options that it has not used yet."""

from __future__ import annotations

from typing import Any

from ..modules.tree import PLAIN

Path = tuple[Any, ...]  # (number of the mapping among the call's mappings, key, key of the nested mapping, ...)


class ValueUsed(Exception):
    """A value that was handed out as a sentinel was used; the capture begins again with its path admitted.

    further: paths that are to be admitted with it.
    """

    def __init__(self, path: Path, *further: Path) -> None:
        super().__init__(path)
        self.path, self.further = path, further


def _used(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    raise ValueUsed(object.__getattribute__(self, "_path"))


class Sentinel:
    """Stands for a value that has not been used yet: any operation but identity and storing raises ValueUsed."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        object.__setattr__(self, "_path", path)

    def __getattribute__(self, name: str) -> Any:
        raise ValueUsed(object.__getattribute__(self, "_path"))

    __setattr__ = __delattr__ = _used

    @classmethod
    def __torch_function__(cls, _func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if type(item) is cls:
                    raise ValueUsed(object.__getattribute__(item, "_path"))
        return NotImplemented


for _name in (
    "repr str bytes format lt le eq ne gt ge hash bool call len length_hint getitem setitem delitem iter next reversed "
    "contains add radd iadd sub rsub isub mul rmul imul matmul rmatmul truediv rtruediv floordiv rfloordiv mod rmod "
    "divmod rdivmod pow rpow lshift rlshift rshift rrshift and rand xor rxor or ror neg pos abs invert complex int "
    "float index round trunc floor ceil enter exit await"
).split():
    setattr(Sentinel, f"__{_name}__", _used)


class Place(Sentinel):
    """Stands for a bookkeeping value that says where in the network a block sits (`block`, `block_index`).

    Blocks make keys of it and look them up among the patches. Indexing and hashing are no use, and neither is looking
    for a key where there is none: then the guard is that there is none for the block at hand either, so that one
    artefact serves all blocks that others left alone. Comparing and all else is a use like any other.
    """

    __slots__ = ("_steps", "_value")

    def __init__(self, path: Path, value: Any, steps: tuple[int, ...] = ()) -> None:
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_steps", steps)

    def __getitem__(self, number: Any) -> Any:
        value = object.__getattribute__(self, "_value")
        path = object.__getattribute__(self, "_path")
        if type(value) is not tuple or type(number) is not int:
            raise ValueUsed(path)
        return Place(path, value[number], (*object.__getattribute__(self, "_steps"), number))

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_value"))


def place_in(key: Any) -> Path | None:
    """The path of the place that a key is made of, None where it is made of none."""
    if type(key) is Place:
        return object.__getattribute__(key, "_path")
    if type(key) is tuple:
        return next((p for k in key if (p := place_in(k)) is not None), None)
    return None


def template_of(key: Any) -> list[Any] | None:
    """How a key is made of places and plain values, JSON-able; None where it holds something else."""
    if type(key) is Place:
        return ["place", [*object.__getattribute__(key, "_path")], [*object.__getattribute__(key, "_steps")]]
    if type(key) is tuple:
        parts = [template_of(k) for k in key]
        return None if None in parts else ["tuple", *parts]
    return ["plain", key] if type(key) in PLAIN else None


def resolved(key: Any) -> Any:
    """A key made of places as the caller's mapping has it."""
    if type(key) is Place:
        return object.__getattribute__(key, "_value")
    return tuple(map(resolved, key)) if type(key) is tuple else key
